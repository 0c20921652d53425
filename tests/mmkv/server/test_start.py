"""What keeps a server from starting, and policies without a bound."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import signal
import socket
import tempfile
from pathlib import Path
from typing import Any

import pytest

import mmkv
from mmkv import Engine
from mmkv.cli.app import run
from mmkv.engine.errors import BudgetError, ModelError
from mmkv.server.engine_thread import EngineCore, compile_kernels
from mmkv.server.run import first_lines, opened, serve
from mmkv.server.settings import ServerSettings
from tests.support.servers import MODEL, asked, serving


def test_a_missing_package_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "uvicorn" else found(name)
    )
    assert run(["serve"]) == 1
    said = capsys.readouterr().err
    assert "uvicorn" in said and "pip install 'mmkv[serve]'" in said and said.count("\n") == 1


# Options that cannot be, and what is said in one line.
REFUSED: list[tuple[list[str], str]] = [
    (["--memory", "much"], "--memory"),
    (["--memory", "1KiB"], "raise --memory"),
    *((["--cors-origin", one], "--cors-origin") for one in ("a.b", "https://a.b/", "ftp://a", "")),
    (["--api-key", ""], "API key is empty"),
    (["--api-key", "one", "--api-key", "\t"], "API key is empty"),
    (["--replicas", "2"], "--session-folder"),
    (["--replicas", "2", "--session-folder", ".", "--max-connections", "9"], "does nothing"),
    (["--key-weight", "2", "--api-key", "a"], "--shared-budget"),
    (["--key-weight", "2", "--shared-budget", "8"], "one for each key"),
    (["--key-weight", "-1", "--api-key", "a", "--shared-budget", "8"], "positive"),
    ([*2 * ["--key-weight", "2", "--api-key", "a"], "--shared-budget", "8"], "given twice"),
    (["--shared-floor", "2"], "give that, too"),
    (["--shared-by-risk"], "give that, too"),
    *(
        (["--shared-budget", "8", *other.split()], "--shared-budget takes the place")
        for other in (
            "--risk 0.02 --budget-max 1MiB",
            "--risk 0.02",
            "--budget-max 1MiB",
            "--budget 8",
            "--budget-bytes 1MiB",
            "--budget-fraction 0.5",
        )
    ),
]


@pytest.mark.parametrize(("options", "says"), REFUSED, ids=str)
def test_options_that_cannot_be(
    options: list[str], says: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["serve", str(folder), "--policy", "streamingllm", "--quiet", *options]) in (1, 2)
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1


def test_an_address_and_a_folder_that_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    """Before the model, which is not there, is looked for."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for given, says in {
            f"--port {taken.getsockname()[1]}": "; give another --port",
            "--host 198.51.100.1": "; give a --host that is this machine's",
            "--allowed-local-media-path nowhere": "no folder nowhere; make it",
            "--max-body 0": "lets no request in; give",
        }.items():
            assert run(["serve", "no-model", "--quiet", *given.split()]) in (1, 2)
            said = capsys.readouterr().err
            assert says in said and said.count("\n") == 1


def test_idle_memories_lie_where_no_cleaner_looks(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base directory specification has a folder for what outlasts a restart."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    given: list[ServerSettings] = []
    monkeypatch.setattr("mmkv.server.run.serve", lambda load, settings, *_: given.append(settings))
    options = ["--cors-origin", "https://chat.example:8443", "--max-connections", "9"]
    assert run(["serve", str(folder), "--quiet", *options]) == 0
    assert given[0].idle_folder == tmp_path / "mmkv" / "hibernated"
    assert given[0].cors == ("https://chat.example:8443",) and given[0].connections == 9


def test_a_home_that_cannot_be_written_keeps_no_server_from_starting(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Containers often have none; a folder that was named has to be there (test_hibernation)."""
    (tmp_path / "home").write_text("no folder")

    def load() -> Engine:
        return Engine.from_pretrained(folder, policy="streamingllm", budget=24, dtype="float32")

    with serving(load, idle_folder=tmp_path / "home" / "hibernated") as server:
        assert server.chat("hello").status_code == 200
        lies = server.inside(lambda core: core.folder.path)
        assert lies.is_dir() and lies.is_relative_to(tempfile.gettempdir())
        assert server.client.get("/health").json() == {"status": "ok"}
    assert "among the temporary files" in caplog.text and not lies.exists()


def test_a_budget_that_would_bind_nothing_is_refused(folder: Path) -> None:
    """The policy of the server evicts nothing, so that a request's budget would be dropped."""

    def load() -> Engine:
        return Engine.from_pretrained(folder, policy="full", dtype="float32")

    with serving(load) as server:
        for given in (8, "64MiB"):
            told = server.chat("hello", mmkv={"budget": given})
            assert told.status_code == 400 and told.json()["error"]["param"] == "mmkv.budget"
            assert "policy 'full' evicts nothing" in told.json()["error"]["message"]
            opened = server.client.post("/v1/sessions", json={"budget": given})
            assert opened.status_code == 400 and opened.json()["error"]["param"] == "budget"
        made = server.client.post("/v1/sessions", json={}).json()
        session = made["id"]
        assert made["budget"] == "none"
        turn = server.client.post(f"/v1/sessions/{session}/chat/completions", json=asked("hello"))
        assert turn.status_code == 200 and server.chat("hello").status_code == 200
        assert server.client.get(f"/v1/models/{MODEL}").json()["mmkv"]["budget"] == "none"


def test_a_key_of_spaces_in_the_environment_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MMKV_API_KEY", "  ")
    assert run(["serve", str(folder), "--memory", "1KiB", "--quiet"]) == 2
    assert "API key is empty" in capsys.readouterr().err


def test_an_engine_that_cannot_be_loaded_ends_the_start() -> None:
    def load() -> Engine:
        raise ModelError("no such model; name another")

    with pytest.raises(ModelError, match="no such model"), opened(load, ServerSettings(name=MODEL)):
        pass


@pytest.mark.parametrize("warm", [False, True])
def test_a_server_reads_a_picture_before_it_serves(warm: bool, folder: Path) -> None:
    """And holds nothing of it."""

    def load() -> Engine:
        return Engine.from_pretrained(folder, policy="streamingllm", budget=24, dtype="float32")

    def pages(core: EngineCore) -> tuple[int, int]:
        pool = core.engine.cache.pool
        return pool.num_pages, pool.num_pages - pool.free_pages

    with serving(load, warm=warm) as server:
        made, held = server.inside(pages)
        assert ((made > 0), held) == (warm, 0)
        assert len(server.state.media.pool.processes) == warm


def test_kernels_are_compiled_by_a_prompt_of_each_size_and_a_burst(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, before the server serves; nothing is held of it then."""
    engine = Engine.from_pretrained(
        folder, policy="streamingllm", budget=24, dtype="float32", prefill_chunk=32
    )
    bursts: list[tuple[int, int, bool]] = []
    decode = engine.decode_many

    def noted(sessions: Any, tokens: Any, steps: int, **drawn: Any) -> Any:
        made = decode(sessions, tokens, steps, **drawn)
        bursts.append((sessions[0].seen, len(made[0]), drawn["draws"] is not None))
        return made

    monkeypatch.setattr(engine, "decode_many", noted)
    compile_kernels(engine)
    read = 32 + 70 + 3 + 20 + 40
    assert bursts == [(read + 20, 20, False), (read + 40, 20, True)]
    assert engine.cache.pool.free_pages == engine.cache.pool.num_pages > 0


@pytest.mark.parametrize("options", [{"policy": "full"}, {"budget": "25%"}], ids=str)
def test_what_has_no_bound_is_priced_by_the_context(folder: Path, options: dict[str, Any]) -> None:
    def load(limit: int) -> Engine:
        given = {"policy": "streamingllm", "budget": 24} | options
        return Engine.from_pretrained(folder, dtype="float32", kv_limit=limit, **given)

    # An eighth of it is kept for what pictures look like.
    said = r"beside 8,192 for features of pictures; raise --memory, .* or --vision-cache$"
    with pytest.raises(BudgetError, match=said), serving(lambda: load(2**16)):
        pass
    with serving(lambda: load(2**26)) as server:
        usage = server.chat("hello").json()["usage"]
        assert usage["mmkv"]["kv_bytes"] <= usage["mmkv"]["bound_bytes"]


def test_the_first_lines_say_what_fits(folder: Path) -> None:
    def load(**options: Any) -> Engine:
        return Engine.from_pretrained(folder, dtype="float32", kv_limit=2**22, **options)

    with serving(lambda: load(policy="streamingllm", budget=24, kv="bf16"), drain=7) as server:
        first, room, *_, last = first_lines(server.state, 8000)
        assert first == (
            "small is ready: a page to chat with at http://127.0.0.1:8000/, OpenAI's and "
            "Anthropic's APIs at http://127.0.0.1:8000/v1"
        )
        assert last == "Ctrl-C stops it; replies under way get 7 s"
        # 24 x 2 layers x 2 heads, in pages of 16 entries, of which each row may half fill one.
        found = re.fullmatch(
            r"policy streamingllm keeps 96 entries of each conversation \(24 entries per row, "
            r"at most (.*) KiB\): room for (\d+) conversations in (.*) MiB of cache",
            room,
        )
        assert found is not None, room
        each, limit = float(found[1]) * 2**10, float(found[3]) * 2**20
        assert each >= 96 / 16 * server.inside(lambda core: core.engine.cache.pool.page_bytes)
        assert int(found[2]) * each <= 1.01 * limit and (int(found[2]) + 1) * each >= 0.99 * limit
    with serving(lambda: load(policy="full"), page=False) as server:
        first, room, *_ = first_lines(server.state, 8000)
        assert "page" not in first and room == "policy full, budget none"


def test_the_memory_is_set_aside_at_the_start(folder: Path) -> None:
    """Nothing is copied for a pool to grow; and what is not there is said before requests come."""

    def load(limit: int) -> Engine:
        return Engine.from_pretrained(
            folder, policy="streamingllm", budget=24, dtype="float32", kv_limit=limit
        )

    def columns(core: EngineCore) -> list[int]:
        return [column.data_ptr() for column in core.engine.cache.pool.columns()]

    with serving(lambda: load(2**22)) as server:
        pool = server.inside(lambda core: core.engine.cache.pool)
        assert pool.num_pages == pool.limit
        before = server.inside(columns)
        for at in range(3):
            assert server.chat(f"{at} and so on").status_code == 200
        assert server.inside(columns) == before
    with pytest.raises(BudgetError, match="lower --memory"), serving(lambda: load(2**50)):
        pass


def test_replicas_need_ray_and_a_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "mmkv.server.replicas.find_spec", lambda name: None if name == "ray" else found(name)
    )
    assert run(["serve", "--replicas", "2", "--session-folder", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "pip install 'mmkv[ray]'" in said and said.count("\n") == 1


def test_options_are_read_into_settings(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[ServerSettings] = []
    monkeypatch.setattr("mmkv.server.run.serve", lambda load, settings, *_: given.append(settings))
    line = (
        f"--host 0.0.0.0 --port 9 --memory 2MiB --snapshots 1KiB --max-body 3MiB --store 4KiB "
        f"--api-key a --api-key b --allowed-host Example.com. "
        f"--allowed-local-media-path {tmp_path} --session-folder {tmp_path} --keep-sessions "
        "--no-page --served-model-name m --drain 0.5"
    )
    assert run(["serve", str(folder), "--quiet", *line.split()]) == 0
    found = given[0]
    assert (found.host, found.port, found.memory) == ("0.0.0.0", 9, 2 * 2**20)
    assert (found.snapshot_bytes, found.body, found.store_bytes) == (2**10, 3 * 2**20, 4 * 2**10)
    assert found.api_keys == ("a", "b") and found.hosts == ("example.com",)
    assert found.media_folder == found.session_folder == tmp_path
    assert found.keep_sessions and not found.page and found.name == "m" and found.drain == 0.5


def test_the_server_imports_nothing_of_the_chat() -> None:
    root = Path(mmkv.__file__).parent
    files = [*root.glob("server/**/*.py"), *root.glob("scheduler/*.py"), root / "loading.py"]
    assert len(files) > 30
    for file in files:
        found = re.search(r"^\s*(?:from|import) mmkv\.chat\b", file.read_text(), re.MULTILINE)
        assert not found, file


def test_sigterm_is_left_to_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which passes it on when it is done; the program then ends by itself."""
    found: list[Any] = []

    class Web:
        def __init__(self, state: Any, app: Any, host: str, port: int, *_: Any, **__: Any) -> None:
            found.append((host, port))

        def run(self) -> None:
            found.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("mmkv.server.connections.WebServer", Web)
    monkeypatch.setattr("mmkv.server.app.make_app", lambda *_: None)
    monkeypatch.setattr("mmkv.server.run.opened", lambda *_: contextlib.nullcontext())
    settings = ServerSettings(name="m", port=8123)
    try:
        serve(lambda: pytest.fail("loaded"), settings, 1.0, print)
    finally:
        signal.signal(signal.SIGTERM, before)
    (place, handler) = found
    assert place == (settings.host, 8123) and handler(signal.SIGTERM, None) is None
