"""An adapter joined with a language model: read as any LLaVA is, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from PIL import Image

from mmkv import Engine, Sampling
from mmkv.engine.model.fingerprint import fingerprint
from mmkv.engine.model.gates import foreign_note, load_gates, make_random_gates, save_gates
from mmkv.engine.runtime import Runtime
from mmkv.training.data.scenes import EMPTY
from mmkv.training.llava.__main__ import main
from mmkv.training.llava.adapter import LlavaAdapter, load, save, vision_config
from mmkv.training.llava.pictures import Shown
from tests.support.llava import HIDDEN, SYSTEM

if TYPE_CHECKING:
    from tests.support.cli_fixtures import Ran

pytest_plugins = ("tests.support.cli_fixtures", "tests.support.llava_fixtures")


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
    assert "mmkv.eval.smollm2" in refusal(tmp_path / "fits", tmp_path / "empty", output)
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
    monkeypatch.setattr("mmkv.training.llava.__main__.BUNDLED_ADAPTER", "not-installed")
    asked = ["join", "--language-model", str(tmp_path), "--output", str(tmp_path / "made")]
    assert main(asked) == 1
    assert "holds no adapter; name one with --adapter" in capsys.readouterr().err
