"""Files of the chat: autosave, --resume, /save, /load and /export; forged files of others."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from safetensors import safe_open
from safetensors.torch import save_file

import mmkv.chat.saved
from mmkv import Engine
from mmkv.chat.repl import Repl
from mmkv.chat.saved import KEPT, SHARE, chat_extra, chat_options, elsewhere
from mmkv.dialogue_schema import parse_held
from mmkv.engine import session_file
from mmkv.engine.config import EngineConfig
from mmkv.engine.errors import MmkvError, SessionError, plain
from mmkv.engine.strict import InvalidFile
from tests.fuzz.strategies import edited, values
from tests.support.chat_models import new_repl, save_qwen3_vl

if TYPE_CHECKING:
    from tests.support.cli_fixtures import Ran

pytest_plugins = ("tests.support.cli_fixtures",)


FEW = ("--max-new-tokens", "5")


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of this test's autosaved chats."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "mmkv" / "chats"


def replies(ran: Ran) -> list[tuple[str, dict[str, int]]]:
    """Return text and tokens of each reply of a run with --json, which must have ended well."""
    assert ran.code == 0 and "error" not in ran.err, ran.err
    return [(r["text"], r["tokens"]) for r in map(json.loads, ran.out.splitlines())]


# --- autosave ---


def test_a_chat_that_is_killed_goes_on_with_resume(
    mmkv: Callable[..., Ran], small_engine: Engine, model: str, state: Path
) -> None:
    options = ("--json", *FEW, "--policy", "snapkv", "--budget", "16")
    one, two, three = replies(mmkv("chat", model, "-i", *options, stdin="hello\nand?\nso?\n"))
    killed = new_repl(small_engine, model)
    killed.handle("hello")
    killed.handle("and?")
    # Nothing was closed and nothing said goodbye; model, policy and budget are those of the file.
    ran = mmkv("chat", "--resume", "-i", "--json", *FEW, stdin="so?\n")
    assert replies(ran) == [three]
    (file,) = [path for path in state.iterdir() if path.name in ran.err]
    assert f'loaded {file}: 2 turn(s), {two[1]["seen"]} tokens; latest: "and?"' in ran.err
    # That chat was kept in the same file, so that it is the latest again.
    again = mmkv("chat", "--resume", "-i", "--json", *FEW, stdin="/history\n")
    assert f"loaded {file}: 3 turn(s)" in again.err and ">>> so?" in again.err
    assert f">>> hello\n{plain(one[0])}\n" in again.err
    killed.session.close()


def test_autosaved_files_are_private_few_and_whole(
    small_engine: Engine, model: str, state: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = os.umask(0)
    try:
        for number in range(KEPT + 3):
            chat = new_repl(small_engine, model)
            chat.handle(f"hello {number}")
            latest = max(state.iterdir(), key=lambda path: path.stat().st_mtime)
            os.utime(latest, (number, number))
            chat.handle("/clear")  # a conversation of its own from here on
            chat.session.close()
    finally:
        os.umask(before)
    files = list(state.iterdir())
    assert len(files) == KEPT and stat.S_IMODE(state.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    capfd.readouterr()
    newest = max(files, key=lambda path: path.stat().st_mtime)
    chat = new_repl(small_engine, model, load=str(newest))
    chat.load(newest)
    assert f'latest: "hello {KEPT + 2}"' in capfd.readouterr().err
    chat.session.close()


def test_a_failing_autosave_is_one_line_once(
    repl: Repl, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fail(*_: Any) -> None:
        raise full

    monkeypatch.setattr(repl.session.__class__, "save", fail)
    for text in ("hello", "and?", "so?"):
        repl.handle(text)
    shown = capfd.readouterr()
    assert shown.err.count("not kept for --resume") == 1
    assert "No space left on device" in shown.err and len(repl.session.history) == 6


def test_a_state_folder_that_cannot_be_is_one_line(
    mmkv: Callable[..., Ran], model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    ran = mmkv("chat", model, "-i", *FEW, stdin="hello\nand?\n")
    assert ran.code == 0 and ran.err.count("not kept for --resume") == 1
    assert mmkv("chat", "--resume", "-i").error_line().endswith("begin one with mmkv chat")


def test_no_autosave_leaves_nothing(mmkv: Callable[..., Ran], model: str, state: Path) -> None:
    mmkv("chat", model, "-i", "--no-autosave", *FEW, stdin="hello\n")
    mmkv("chat", model, *FEW, stdin="one answer\n")
    assert not state.exists()


def test_saving_takes_a_small_share_of_the_time(
    repl: Repl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save of 3 seconds (a large cache) is followed by none for 60, and the end saves."""
    now, saves = [1000.0], []
    monkeypatch.setattr(mmkv.chat.saved.time, "monotonic", lambda: now[0])

    def save(session: Any, path: Path, extra: Any) -> None:
        saves.append(now[0])
        now[0] += 3
        path.write_bytes(b"")

    monkeypatch.setattr(repl.session.__class__, "save", save)
    for _ in range(11):
        repl.handle("hello")
        now[0] += 20
    assert saves == [1000.0, 1063.0, 1126.0, 1189.0] and 3 * SHARE == 60
    repl._keep(last=True)
    assert len(saves) == 5


# --- /save, /export and --save ---


def targets(folder: Path, repl: Repl) -> dict[str, tuple[str, str, str]]:
    """Return names to save to: what is refused of them, and what /save! says."""
    talk = folder / "talk.mmkv"
    repl.session.save(talk)
    (folder / "photo.png").write_bytes(b"\x89PNG precious")
    (folder / "notes.md").write_text("precious")
    (folder / "empty").write_bytes(b"")
    (folder / "header.mmkv").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")
    for name in ("photo.png", "talk.mmkv", "folder", "pipe", "nothing"):
        (folder / f"to-{name}").symlink_to(folder / name)
    (folder / "to-null").symlink_to("/dev/null")
    (folder / "loop").symlink_to(folder / "loop")
    refused = {
        "photo.png": "photo.png is not a session file; .*/save! ",
        "notes.md": "is not a session file",
        "empty": "is not a session file",
        "header.mmkv": "is not a session file",
        "talk.mmkv": "exists and stays as it is; .*/save! ",
        "to-talk.mmkv": "exists and stays as it is",
    }
    never = {
        "folder": "is a folder",
        "pipe": "is a pipe",
        "to-photo.png": "is a link to",
        "to-folder": "is a folder",
        "to-pipe": "is a pipe",
        "to-nothing": "is a link to a file that is not there",
        "to-null": "is a device",
        "loop": "",
        "no/where.mmkv": "there is no folder",
        "photo.png/x": "there is no folder",
        "a\0b": "not a usable file name",
        "x" * 300: "",
        "~no-such-user/x": "not a usable file name",
    }
    made = {name: (says, "saved to") for name, says in refused.items()}
    made |= {name: (says, says) for name, says in never.items()}
    return {
        name: (name if name.startswith("~") else str(folder / name), *says)
        for name, says in made.items()
    }


def contents(folder: Path) -> dict[str, bytes | str]:
    return {
        path.name: path.read_bytes()
        if path.is_file() and not path.is_symlink()
        else f"{stat.S_IFMT(path.lstat().st_mode)}"
        for path in sorted(folder.iterdir())
    }


def test_save_overwrites_nothing_by_accident(
    repl: Repl, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    repl.handle("hello")
    repl.autosave = None
    folder = tmp_path / "files"
    folder.mkdir()
    cases = targets(folder, repl)
    repl.handle("and?")
    before = contents(folder)
    names = list(cases)
    random.Random(1).shuffle(names)
    capfd.readouterr()
    for name in names:
        path, says, _ = cases[name]
        repl.handle(f"/save {path}")
        shown = capfd.readouterr().err
        assert shown.startswith("mmkv: error: ") and shown.count("\n") == 1, shown
        assert re.search(says, shown), shown
        assert contents(folder) == before, name
    for name in sorted(names, key=lambda name: cases[name][2] == "saved to"):
        path, _, says = cases[name]
        repl.handle(f"/save! {path}")
        shown = capfd.readouterr().err
        assert says in shown and shown.count("\n") == 1, shown
    after = contents(folder)
    changed = {name for name in after if after[name] != before.get(name)}
    # A link stays one, and what it names was written.
    assert changed == {"photo.png", "notes.md", "empty", "header.mmkv", "talk.mmkv"}
    assert Path("/dev/null").is_char_device()


def test_save_asks_at_a_terminal(
    repl: Repl, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Reader:
        def __init__(self, answer: bool) -> None:
            self.answer, self.asked = answer, ""

        def agrees(self, question: str) -> bool:
            self.asked = question
            return self.answer

    file = tmp_path / "talk.mmkv"
    repl.handle("hello")
    repl.handle(f"/save {file}")
    old = file.read_bytes()
    repl.handle("and?")
    for answer in (False, True):
        repl.reader = Reader(answer)  # type: ignore[assignment]
        repl.handle(f"/save {file}")
        assert repl.reader.asked == f"{file} exists; overwrite it?"  # type: ignore[union-attr]
        assert (file.read_bytes() == old) is not answer
    (tmp_path / "a.png").write_bytes(b"picture")
    repl.handle(f"/save {tmp_path / 'a.png'}")
    assert (tmp_path / "a.png").read_bytes() == b"picture"


def test_a_tilde_is_the_home(
    repl: Repl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    repl.handle("hello")
    repl.handle("/save ~/talk.mmkv")
    repl.handle("/export ~/talk.md")
    assert (tmp_path / "talk.mmkv").is_file() and (tmp_path / "talk.md").is_file()
    seen = repl.session.seen
    repl.handle("/clear")
    repl.handle("/load ~/talk.mmkv")
    assert repl.session.seen == seen


def test_export_writes_markdown_and_overwrites_only_its_own(
    repl: Repl, tmp_path: Path, picture: str, capfd: pytest.CaptureFixture[str]
) -> None:
    repl.handle("/system Be kind.")
    repl.handle(f"/image {picture}")
    repl.handle("what is it?")
    file, notes = tmp_path / "talk.md", tmp_path / "notes.md"
    notes.write_text("# My notes")
    repl.handle(f"/export {file}")
    reply = repl.session.history[-1]["content"]
    title = Path(repl.options.model).name
    assert file.read_text() == (
        f"# Conversation with {title}\n\n**System**\n\nBe kind.\n\n"
        f"**You**\n\n[picture] what is it?\n\n**Reply**\n\n{reply}\n"
    )
    repl.handle(f"/export {notes}")
    assert notes.read_text() == "# My notes"
    repl.handle("and?")
    old = file.read_text()
    repl.handle(f"/export {file}")
    assert file.read_text() == old
    repl.handle(f"/export! {file}")
    assert file.read_text().startswith(old.rstrip("\n")) and "and?" in file.read_text()


def test_load_and_save_as_options(
    mmkv: Callable[..., Ran], model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    talk = str(tmp_path / "talk.mmkv")
    options = (*FEW, "--json")
    policy = ("--policy", "snapkv", "--budget", "16")
    whole = replies(mmkv("chat", model, "-i", *options, *policy, stdin="hello\nand?\nso?\n"))
    ran = mmkv("chat", model, "-i", *options, *policy, "--save", talk, stdin="hello\n")
    assert replies(ran) == whole[:1]
    # One answer a call: the file goes on, with the model, the policy and the budget that it has.
    ran = mmkv("chat", "--load", talk, "--save", talk, "-p", "and?", *options)
    assert (
        json.loads(ran.out)["tokens"] == whole[1][1]
        and json.loads(ran.out)["budget"]["value"] == 16
    )
    ran = mmkv("chat", "--load", talk, "-i", *options, stdin="so?\n")
    assert replies(ran) == whole[2:]
    ran = mmkv("chat", "--load", talk, "-i", *options, "--budget", "8", stdin="so?\n")
    assert json.loads(ran.out)["budget"]["value"] == 8
    assert "exists" in mmkv("chat", model, "-p", "x", "--save", talk).error_line()
    assert "no session file at" in mmkv("chat", "--load", "/nowhere", "-p", "x").error_line()
    assert "not a session file" in mmkv("chat", "--load", __file__, "-p", "x").error_line()
    both = mmkv("chat", "--resume", "--load", talk, "-i")
    assert both.code == 2 and "exclude each other" in both.error_line()
    Path(talk).write_bytes(Path(talk).read_bytes()[:-9])
    assert "is cut off; use a whole copy" in mmkv("chat", "--load", talk, "-p", "x").error_line()


def test_a_saved_chat_goes_on_with_its_adapter(
    mmkv: Callable[..., Ran], model: str, tmp_path: Path
) -> None:
    place, talk = tmp_path / "tuned", str(tmp_path / "talk.mmkv")
    place.mkdir()
    at = "base_model.model.model.language_model.layers.0.mlp.down_proj.lora_"
    with safe_open(Path(model) / "model.safetensors", framework="pt") as file:
        rows, columns = file.get_tensor("model.language_model.layers.0.mlp.down_proj.weight").shape
    torch.manual_seed(0)
    factors = {f"{at}A.weight": torch.randn(4, columns), f"{at}B.weight": torch.randn(rows, 4)}
    save_file(factors, place / "adapter_model.safetensors")
    (place / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 40}')
    options, adapter = (*FEW, "--json", "--policy", "full"), ("--adapter", str(place))
    plain = replies(mmkv("chat", model, "-i", *options, stdin="hello\nand?\n"))
    whole = replies(mmkv("chat", model, *adapter, "-i", *options, stdin="hello\nand?\n"))
    assert whole[0] != plain[0]
    ran = mmkv("chat", model, *adapter, "-i", *options, "--save", talk, stdin="hello\n")
    assert replies(ran) == whole[:1]
    assert replies(mmkv("chat", "--load", talk, "-i", *options, stdin="and?\n")) == whole[1:]
    line = mmkv("chat", str(place), "-p", "hello").error_line()
    assert f"name both: mmkv chat BASE --adapter {place}" in line


# Session files of others: forged, too large, or naming what would have to be fetched.


def forge(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    """Rewrite a session file after ``change(metadata, tensors)``, with a checksum that is right."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    del metadata["digest"]
    change(metadata, tensors)
    metadata["digest"] = session_file._digest(tensors, metadata)
    save_file(tensors, path, metadata=metadata)


def with_options(path: Path, options: Any) -> None:
    """Put ``options`` where ``mmkv chat`` keeps its own."""

    def change(metadata: dict[str, Any], _: object) -> None:
        extra = json.loads(metadata["extra"]) | {"mmkv.chat": json.dumps(options)}
        metadata["extra"] = json.dumps(extra)

    forge(path, change)


def pages_held(engine: Engine) -> int:
    return engine.cache.pool.num_pages - engine.cache.pool.free_pages


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = save_qwen3_vl(tmp_path_factory.mktemp("model"), positions=1024)
    return Engine.from_pretrained(
        folder, policy="segments-hs", gates="random", budget=24, page_size=4
    )


@pytest.fixture
def saved(engine: Engine, tmp_path: Path) -> Path:
    with engine.session() as session:
        session.prefill({"input_ids": torch.arange(60)[None] + 3})
        session.save(tmp_path / "s.mmkv")
    return tmp_path / "s.mmkv"


FORGERIES: dict[str, Callable[[dict[str, Any], dict[str, Any]], None]] = {
    "negative length": lambda state, tensors: (
        tensors["length"].view(-1)[:2].add_(torch.tensor([-100, 100]))
    ),
    "lengths beyond the tokens": lambda state, tensors: (
        tensors["length"].view(-1)[:2].add_(torch.tensor([1, -1]) * tensors["length"].view(-1)[1])
    ),
    "a token twice": lambda state, tensors: tensors["position"][:2].fill_(3),
    "a token to come": lambda state, tensors: tensors["position"][:1].fill_(60),
    "a modality of its own": lambda state, tensors: tensors["modality"][:1].fill_(3),
    "NaN keys": lambda state, tensors: tensors["keys"][0].fill_(torch.nan),
    "log_beta above 0": lambda state, tensors: tensors["log_beta"][0].fill_(0.5),
    "long rope": lambda state, tensors: state.update(long_rope=True),
    "an end past the context": lambda state, tensors: state.update(next_position=2000),
    "more prompt than tokens": lambda state, tensors: state.update(prompt_tokens=61),
    "counts that do not add up": lambda state, tensors: state.update(evicted=1),
    "a budget of nothing": lambda state, tensors: state.update(budget=["entries", 0.1]),
}


@pytest.mark.parametrize("kind", FORGERIES)
def test_each_kind_of_forgery_is_refused(kind: str, engine: Engine, saved: Path) -> None:
    def change(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
        state = json.loads(metadata["state"])
        FORGERIES[kind](state, tensors)
        metadata["state"] = json.dumps(state)

    engine.load_session(saved)[0].close()
    forge(saved, change)
    with pytest.raises(SessionError, match="use a copy, or begin a new session"):
        engine.load_session(saved)
    assert pages_held(engine) == 0
    engine.cache.check()


def test_a_scorer_survives_what_a_file_says_of_its_counts(engine: Engine, saved: Path) -> None:
    """What a scorer keeps is its own: any number is taken and leads to no index out of range."""

    def change(_: object, tensors: dict[str, Any]) -> None:
        for name in tensors:
            if name.startswith("memory.segment"):
                tensors[name] = torch.full_like(tensors[name], torch.nan)

    forge(saved, change)
    with engine.load_session(saved)[0] as session:
        session.decode(5)
    engine.cache.check()


def test_a_picture_token_that_was_generated_is_refused(engine: Engine, tmp_path: Path) -> None:
    """Before any turn: it would stand before each later prompt, without a picture."""
    picture = engine.processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    path = tmp_path / "s.mmkv"
    with engine.session() as session:
        session.unfed = (picture,)
        session.save(path)
    with pytest.raises(SessionError, match="conversation in the session file is damaged"):
        engine.load_session(path)


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"ids": [3, 4]}, "do not add up"),
        ({"ids": [-1, 2, 3]}, "none of a text"),
        ({"ids": [10**9, 2, 3]}, "none of a text"),
        ({"end": [2, 3, 3, 0]}, "do not add up"),
        ({"end": [4, 4, 4, 0], "ids": [1, 2, 3, 4]}, "not as long as the session"),
        ({"text": None, "ids": None}, "do not add up"),
        ({"rule": "tiles"}, "pieces"),
        ({"more": 1}, "pieces"),
    ],
)
def test_what_a_file_says_was_read_has_to_add_up(change: dict[str, Any], cause: str) -> None:
    piece = {"text": "abc", "ids": [1, 2, 3], "end": [3, 3, 3, 0], "pictures": 0, "rule": None}
    given = {"pieces": [piece | {"reply": False}], "differs": None, "unread": True}
    held = parse_held(json.dumps(given), 3, 100, {7})
    assert held.pieces is not None and held.as_json() == given | {
        "pieces": [piece | {"reply": False, "ids": [1, 2, 3], "end": (3, 3, 3, 0)}]
    }
    assert held.unread is None  # pictures that no file has
    del given["unread"]  # there are none
    assert parse_held(json.dumps(given), 3, 100, {7}).unread == ((), ())
    given["pieces"] = [piece | {"reply": False} | change]
    with pytest.raises(InvalidFile, match=cause):
        parse_held(json.dumps(given), 3, 100, {7})
    assert parse_held("null", 3, 100, {7}).pieces is None  # of older files


@pytest.mark.parametrize("entries", [2**26, 2**34])
def test_a_file_for_which_there_is_no_room_is_refused_before_it_is_read(
    entries: int, engine: Engine, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 5 GB and 1.3 TB, with a hole for most of them; the pool's limit and the kernel refuse."""
    monkeypatch.setattr(engine.cache.pool, "limit", 200)
    with safe_open(saved, framework="pt") as file:
        metadata = file.metadata()
    state = json.loads(metadata["state"])
    state |= {"seen": entries // 4, "entries": entries, "evicted": 0}
    state |= {"prompt_tokens": 60, "next_position": 60}
    metadata["state"] = json.dumps(state)
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, (shape, dtype) in engine.cache.layout(entries).items():
        size = torch.Size(shape).numel() * dtype.itemsize
        header[name] = {
            "dtype": session_file.NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [end, end + size],
        }
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    lengths = struct.pack("<4q", *[entries // 4] * 4)
    assert header["length"]["data_offsets"] == [0, len(lengths)]
    with saved.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text + lengths)
        out.truncate(8 + len(text) + end)
    with pytest.raises(MmkvError, match=r"limit is 200|into memory|use a copy"):
        engine.load_session(saved)
    assert pages_held(engine) == 0


@pytest.mark.parametrize("how", ["load", "fork"])
def test_an_import_that_fails_is_taken_back(
    how: str, engine: Engine, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when memory runs out while a column is written: every page and slot comes back."""
    session, _ = engine.load_session(saved)
    reference = session.fork()
    held = pages_held(engine)
    columns = type(engine.cache.pool).columns

    def broken(pool: Any) -> list[Any]:
        found = columns(pool)
        return [*found[:3], None, *found[4:]]

    with monkeypatch.context() as patch:
        patch.setattr(type(engine.cache.pool), "columns", broken)
        with pytest.raises((TypeError, AttributeError)):
            if how == "load":
                engine.load_session(saved)
            else:
                session.fork()
    assert pages_held(engine) == held and sum(engine.cache._open) == 2
    engine.cache.check()
    with reference, session:
        assert torch.equal(session.decode(5), reference.decode(5))


# --- What a file names ---


GOOD_OPTIONS = {"model": "m", "policy": "snapkv:window=8", "lookahead": 2, "evict_every": 1}


def test_odd_options_in_a_file_are_refused_in_one_line(saved: Path) -> None:
    taken = []

    @settings(max_examples=80, deadline=None, derandomize=True)
    @given(options=edited(GOOD_OPTIONS) | values)
    def read(options: Any) -> None:
        with_options(saved, options)
        try:
            options = chat_options(saved)
            elsewhere(options)
        except SessionError as error:
            assert "\n" not in str(error)
            return
        taken.append(options)
        kinds = {"model": str, "policy": str, "lookahead": float, "evict_every": int, "kv": str}
        assert all(type(value) is kinds[name] for name, value in options.items())

    read()
    assert 5 < len(taken) < 60


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ("model", {"model": "somebody/model"}),
        ("adapter", {"adapter": "somebody/tuned"}),
        ("gates", {"gates": "somebody/gates"}),
        ("policy", {"policy": "wgkv+dbtrimkv:write_gates=somebody/gates"}),
    ],
)
def test_a_file_does_not_decide_what_is_fetched(
    option: str,
    named: dict[str, str],
    mmkv: Callable[..., Ran],
    model: str,
    saved: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[Any] = []

    def fetch(config: Any, *_: Any, **__: Any) -> None:
        started.append(getattr(config, option))
        raise SessionError("fetched")

    monkeypatch.setattr(Engine, "from_config", fetch)
    with_options(saved, {"model": model} | named)
    line = mmkv("chat", "--load", str(saved), "-p", "hi").error_line()
    (value,) = named.values()
    wanted = (value,) if option == "model" else (f"--{option}", value)
    assert f"mmkv chat {' '.join(wanted)} --load {saved}" in line and not started
    # Named by the user, it is loaded.
    assert "fetched" in mmkv("chat", *wanted, "--load", str(saved), "-p", "hi").error_line()
    assert started == [value]
    # So is a folder that is here.
    with_options(saved, {"model": model})
    assert "fetched" in mmkv("chat", "--load", str(saved), "-p", "hi").error_line()


def test_relative_paths_of_gates_are_kept_whole(
    engine: Engine, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written in one folder, opened in another."""
    (tmp_path / "here" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    policy = "wgkv+dbtrimkv:threshold=0.2,write_gates=mine"
    config = EngineConfig(model="m", policy=policy, gates="mine")
    held = json.loads(chat_extra(engine, config, "m")["mmkv.chat"])
    folder = tmp_path / "here" / "mine"
    assert held["policy"] == f"wgkv+dbtrimkv:threshold=0.2,write_gates={folder}"
    assert held["gates"] == str(folder)
    with_options(saved, held)
    monkeypatch.chdir(tmp_path)
    assert elsewhere(chat_options(saved)) == {"model": "m"}
    folder.rmdir()
    assert elsewhere(chat_options(saved)).keys() == {"model", "gates", "policy"}
