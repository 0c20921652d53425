"""``python -m training.llava``: pictures, an adapter that learns, and a joined LLaVA."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file
from tokenizers import Tokenizer, models

from mmkv import Engine, Sampling
from mmkv.engine.errors import ModelError
from mmkv.engine.model.fingerprint import fingerprint
from mmkv.engine.model.gates import foreign_note, load_gates, make_random_gates, save_gates
from mmkv.engine.runtime import Runtime
from mmkv.resources import BUNDLED_ADAPTER, asset
from mmkv.training.data.scenes import EMPTY
from mmkv.training.llava.__main__ import (
    Eyes,
    Language,
    WordTable,
    arguments,
    caption,
    encode,
    install,
    main,
    opening,
)
from mmkv.training.llava.adapter import (
    CHAT_TEMPLATE,
    LlavaAdapter,
    load,
    save,
    vision_config,
    with_image_token,
)
from mmkv.training.llava.pictures import PLACES, EasyVQA, PictureTurn, Shown, all_names, talk
from mmkv.training.measure.record import ROOT
from tests.support.chat_models import save_llama
from tests.support.llava import HIDDEN, SYSTEM, options

if TYPE_CHECKING:
    from tests.support.cli_fixtures import Ran

pytest_plugins = (
    "tests.support.cli_fixtures",
    "tests.support.llava_fixtures",
)


def test_training_changes_the_adapter_and_not_the_language_model(
    trained: tuple[Path, dict[str, Any]], language: Path
) -> None:
    adapter, before = trained
    assert {path.name: path.read_bytes() for path in language.iterdir()} == before
    facts = json.loads((adapter / "adapter.json").read_text())
    assert facts["settings"]["words_steps"] == 3 and facts["commit"] is not None
    counted = facts["results"]["adapter"]
    assert sum(row["of"] for row in counted.values()) == 4 * 6
    phases = [json.loads((adapter / name / "log.json").read_text()) for name in ("words", "eyes")]
    assert [lines[-1]["step"] for lines in phases] == [3, 2]


def test_a_language_model_is_read_as_its_own_template_says(language: Path, easy: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(language)
    tokenizer = with_image_token(transformers.AutoTokenizer.from_pretrained(language))
    reads = Language(model, tokenizer)
    LlavaAdapter(vision_config(16, 1), model.config)  # must not touch the language model
    turns = talk(2, "train", EasyVQA.of(easy, "train"), turns=6)
    ids, labels, shown = encode(turns, tokenizer)
    assert len(shown) > 1
    messages: list[dict[str, Any]] = []
    for turn in turns:
        picture = [{"type": "image"}] if turn.shown else []
        asked = {"type": "text", "text": turn.question.text}
        messages += [
            {"role": "user", "content": [*picture, asked]},
            {"role": "assistant", "content": turn.question.answer},
        ]
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert opening(tokenizer) == SYSTEM
    expected = whole.removeprefix(SYSTEM).replace("<image>", "<image>" * 16)
    assert ids == tokenizer(expected, add_special_tokens=False)["input_ids"]
    said = [turn.question.answer + "<|im_end|>" for turn in turns]
    assert tokenizer.decode([label for label in labels if label >= 0]) == "".join(said)
    wanted = torch.tensor([label >= 0 for label in labels[1:]] + [False])[None]
    visual = torch.randn(16 * len(shown), HIDDEN)
    with torch.no_grad():
        logits = reads.logits(torch.tensor([ids]), visual, wanted)
        first = tokenizer(SYSTEM, return_tensors="pt", add_special_tokens=False)["input_ids"]
        whole_ids = torch.cat([first, torch.tensor([ids])], 1)
        embedded = model.get_input_embeddings()(whole_ids)
        embedded[whole_ids == reads.image] = visual
        reference = model(inputs_embeds=embedded).logits[:, first.shape[1] :][wanted]
    torch.testing.assert_close(logits, reference, atol=1e-4, rtol=1e-4)


def test_the_spare_token_becomes_the_picture_token() -> None:
    inner = Tokenizer(models.BPE(vocab={"a": 0, "<empty_output>": 1, "<|im_end|>": 2}, merges=[]))
    inner.add_special_tokens(["<empty_output>", "<|im_end|>"])
    before = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>")
    after = with_image_token(before)
    assert after.convert_tokens_to_ids("<image>") == 1 and len(after) == len(before)
    assert after("a<image><|im_end|>")["input_ids"] == [0, 1, 2]
    assert after.eos_token == "<|im_end|>" and after.chat_template == CHAT_TEMPLATE
    inner = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    with pytest.raises(ModelError, match="<empty_output>"):
        with_image_token(transformers.PreTrainedTokenizerFast(tokenizer_object=inner))


def test_a_language_model_too_narrow_is_refused(
    easy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    narrow = save_llama(tmp_path / "narrow")
    assert main(["train", *options(narrow, easy, tmp_path / "out")]) == 1
    assert "a hidden size of 204" in capsys.readouterr().err


def test_missing_pictures_are_named(
    language: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *options(language, tmp_path / "none", tmp_path / "out")]) == 1
    assert "pip install --no-deps easy-vqa" in capsys.readouterr().err


def test_the_bundled_adapter_is_what_the_command_makes() -> None:
    folder = asset(BUNDLED_ADAPTER)
    facts = json.loads((folder / "adapter.json").read_text())
    given = arguments(["train", "--language-model=x", "--output=y"])
    unsettled = {"command", "output", "language_model", "easy_vqa", "threads", "save_every"}
    asked = {k: v for k, v in vars(given).items() if k not in unsettled | {"resume", "held_out"}}
    assert {name: facts["settings"][name] for name in asked} == asked
    assert (folder / "chat_template.jinja").read_text() == CHAT_TEMPLATE
    assert sum(file.stat().st_size for file in folder.iterdir()) < 6_000_000
    fetched = "$(mmkv pull smollm2-135m)"
    train = f"python -m training.llava train --language-model {fetched} --output runs/llava"
    page = (ROOT / "benchmarks" / "notes" / "smollm2-llava.md").read_text()
    assert "mmkv pull smollm2-llava" in page and train in page


# An adapter joined with a language model: read as any LLaVA is, or refused.


def test_transformers_and_mmkv_give_the_same_tokens(joined: Path) -> None:
    shown = [Image.effect_noise((50 + n, 40), 90).convert("RGB") for n in range(2)]
    model = transformers.AutoModelForImageTextToText.from_pretrained(joined, dtype=torch.float32)
    processor = transformers.AutoProcessor.from_pretrained(joined, backend="pil")
    content = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "what are these?"}]
    text = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True
    )
    inputs = processor(text=text, images=shown, return_tensors="pt")
    made = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    engine = Engine.from_pretrained(joined, policy="full", dtype="float32")
    sampling = Sampling(max_new_tokens=8, temperature=0)
    with engine.session() as session:
        list(session.send("what are these?", images=shown, sampling=sampling))
        assert session.last is not None
        assert session.last.token_ids == made[0, inputs["input_ids"].shape[1] :].tolist()
        assert session.memory().by_modality["image"] == 2 * 16 * 2 * 2  # tokens, layers, KV heads


def test_the_trained_features_are_transformers_own(
    joined: Path, trained: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    model = transformers.AutoModelForImageTextToText.from_pretrained(joined, dtype=torch.float32)
    made = load(trained[0], model.config.text_config)
    picture = tmp_path / "half.png"
    Image.effect_noise((64, 64), 90).convert("RGB").save(picture)
    shown = [Shown(("frog",)), Shown(("apple", "bus", EMPTY, "key"))]
    shown += [Shown(("red circle",), file=picture, mirrored=mirrored) for mirrored in (True, False)]
    processor = transformers.AutoProcessor.from_pretrained(joined, backend="pil")
    pixels = processor.image_processor([one.picture() for one in shown], return_tensors="pt")
    with torch.no_grad():
        theirs = model.model.get_image_features(**pixels).pooler_output
        torch.testing.assert_close(made(shown), torch.stack(list(theirs)))


def test_text_alone_is_the_language_models(joined: Path, language: Path) -> None:
    chats = [
        [{"role": "user", "content": "hello"}],
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}],
    ]
    tokenizer = transformers.AutoTokenizer.from_pretrained(joined)
    rendered = [
        tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        for chat in chats
    ]
    ending = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert rendered == [SYSTEM + ending, "<|im_start|>system\nbe brief<|im_end|>\n" + ending]
    index = json.loads((joined / "model.safetensors.index.json").read_text())
    files = [load_file(file) for file in joined.glob("*.safetensors")]
    sizes = [tensor.nbytes for file in files for tensor in file.values()]
    assert len(files) > 1 and index["metadata"]["total_size"] == sum(sizes)
    ids = torch.arange(20)[None]
    alone = transformers.AutoModelForCausalLM.from_pretrained(language, dtype=torch.float32)
    whole = transformers.AutoModelForImageTextToText.from_pretrained(joined, dtype=torch.float32)
    assert torch.equal(alone(ids).logits, whole(ids).logits)


def test_a_chat_answers_about_a_picture(mmkv: Callable[..., Ran], joined: Path, easy: Path) -> None:
    picture = easy / "train" / "images" / "0.png"
    ran = mmkv(
        "chat",
        str(joined),
        "--image",
        str(picture),
        "-p",
        "what is this?",
        "--json",
        "--policy",
        "streamingllm",
        "--budget",
        "64",
        "--max-new-tokens",
        "4",
    )
    assert ran.code == 0, ran.err
    answer = json.loads(ran.out)
    assert answer["tokens"]["generated"] > 0 and answer["entries"]["by_modality"]["image"] > 0


def test_gates_of_the_language_model_are_no_strangers(
    joined: Path, language: Path, tmp_path: Path
) -> None:
    spec = Runtime.from_pretrained(str(joined), policy="full", device="cpu").spec
    for model, known in ((str(language), True), ("another", False)):
        base = fingerprint(model) or "0" * 64
        save_gates(make_random_gates(spec), tmp_path, spec, None, base_fingerprint=base)
        assert (foreign_note(load_gates(tmp_path, spec), str(joined)) is None) == known


def random_adapter(folder: Path, hidden: int = HIDDEN) -> LlavaAdapter:
    torch.manual_seed(1)
    text = transformers.LlamaConfig(hidden_size=hidden, head_dim=8)
    made = LlavaAdapter(vision_config(16, 1), text)
    save(made, folder, {})
    return made


def test_join_refuses_what_does_not_fit(
    language: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refusal(adapter: Path, model: Path, output: Path) -> str:
        folders = {"adapter": adapter, "language-model": model, "output": output}
        assert main(["join", *(f"--{k}={v}" for k, v in folders.items())]) == 1
        return capsys.readouterr().err

    random_adapter(tmp_path / "fits")
    random_adapter(tmp_path / "wide", 64)
    (tmp_path / "empty").mkdir()
    output = tmp_path / "output"
    assert "no LLaVA adapter" in refusal(tmp_path / "empty", language, output)
    assert "hidden size 64" in refusal(tmp_path / "wide", language, output)
    assert "mmkv pull smollm2-135m" in refusal(tmp_path / "fits", tmp_path / "empty", output)
    assert "holds a checkpoint" in refusal(tmp_path / "fits", language, language)
    assert not output.exists()


def test_another_language_model_is_noted(
    language: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    random_adapter(tmp_path / "adapter")
    given = [f"--language-model={language}", f"--output={tmp_path / 'made'}"]
    assert main(["join", *given, f"--adapter={tmp_path / 'adapter'}"]) == 0
    assert "trained for other weights" in capsys.readouterr().err


def test_an_installation_without_the_adapter_says_where_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mmkv.training.llava.adapter.BUNDLED_ADAPTER", "not-installed")
    asked = ["join", "--language-model", str(tmp_path), "--output", str(tmp_path / "made")]
    assert main(asked) == 1
    assert (
        "holds no adapter: a checkout of mmkv has assets/not-installed" in capsys.readouterr().err
    )


# The pictures and talks that an adapter is trained on, and what it says it sees.


def test_easy_vqa_tells_colour_and_shape_through_negations(easy: Path) -> None:
    read = EasyVQA.of(easy, "train")
    names = [one.names[0] for one in read.pictures]
    assert names == ["teal circle", "gray triangle", "brown circle"]


def test_held_out_talks_ask_what_training_never_shows(easy: Path) -> None:
    data = {split: EasyVQA.of(easy, split) for split in ("train", "heldout")}
    seen = {split: [talk(n, split, data[split]) for n in range(400)] for split in data}  # type: ignore[arg-type]
    trained = {part for turns in seen["train"] for turn in turns for part in parts(turn)}
    known = {name for name, _ in trained}
    asked: Counter[str] = Counter()
    for turns in seen["heldout"]:
        shown = Shown(())
        for turn in turns:
            shown = turn.shown or shown
            if shown.file is not None:
                continue
            about = (shown.names[0], shown.background)
            if turn.question.kind == "grid":
                where = next(place for place in PLACES if place in turn.question.text)
                about = (turn.question.answer, where)
                assert shown.names[PLACES.index(where)] == turn.question.answer
            assert about not in trained and about[0] in {*known, EMPTY}
            asked[turn.question.kind] += 1
    assert min(asked[kind] for kind in ("one thing", "colour", "shape", "grid")) > 30
    assert known <= set(all_names())


def parts(turn: PictureTurn) -> set[tuple[str, str]]:
    """Return name and background, and in a grid name and place, of what a drawn picture shows."""
    if turn.shown is None or turn.shown.file is not None:
        return set()
    names = turn.shown.names
    shown = {(name, turn.shown.background) for name in names}
    if len(names) > 1:
        shown |= set(zip(names, PLACES, strict=True))
    return {each for each in shown if each[0] != EMPTY}


def test_a_caption_says_what_stands_where() -> None:
    shown = Shown(("apple", EMPTY, "red circle", "frog"))
    told = caption(shown)
    assert len(told) == 16
    at = told.index("third")
    assert told[at : at + 6] == ["third", "red", "circle", "fourth", "frog", ","]
    alone = caption(Shown(("teal circle",)))
    assert len(alone) == 16 and [e for e in alone if " " not in e] == ["teal", "circle"]
    colours = shown.picture().resize((2, 2), Image.Resampling.BOX)
    assert colours.getpixel((1, 0)) == (255, 255, 255)
    red, _, blue = colours.getpixel((0, 1))  # type: ignore[misc]
    assert red > blue + 50


def test_a_projector_gives_the_vector_of_the_entry_that_is_seen(language: Path, easy: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(language, dtype=torch.float32)
    tokenizer = with_image_token(transformers.AutoTokenizer.from_pretrained(language))
    table = WordTable(Language(model, tokenizer))
    adapter = LlavaAdapter(vision_config(16, 1), model.config)
    eyes = Eyes(adapter, table)
    shown = [Shown(("frog",)), Shown(("apple", "bus", EMPTY, "key"))]
    lines = table.lines(shown)
    for sure in (4.0, 20.0):
        # A classifier that says these entries whatever it sees: their logit is high.
        said = torch.full((len(table.vectors),), -sure)
        said[lines[0, 8]] = sure
        with torch.no_grad():
            eyes.classify.weight.zero_()
            eyes.classify.bias.copy_(said)
        install(eyes, table)
        made = adapter(shown)
        torch.testing.assert_close(
            made, table.vectors[lines[0, 8]].expand_as(made), atol=2e-3, rtol=2e-3
        )
