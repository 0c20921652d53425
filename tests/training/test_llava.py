"""``python -m training.llava train``: an adapter learns, and the language model stays as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, models

from mmkv.engine.errors import ModelError
from mmkv.resources import BUNDLED_ADAPTER, asset
from mmkv.training.llava.__main__ import arguments, main
from mmkv.training.llava.adapter import CHAT_TEMPLATE, LlavaAdapter, vision_config, with_image_token
from mmkv.training.llava.pictures import EasyVQA, talk
from mmkv.training.llava.teach import Language, encode, opening
from mmkv.training.measure.record import ROOT
from tests.support.chat_models import save_llama
from tests.support.llava import HIDDEN, SYSTEM, options

pytest_plugins = ("tests.support.llava_fixtures",)


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


def test_a_finished_run_resumes_to_the_same_adapter(
    trained: tuple[Path, dict[str, Any]],
    language: Path,
    easy: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    adapter, _ = trained
    first = load_file(adapter / "adapter.safetensors")
    given = options(language, easy, adapter)
    assert main(["train", *given]) == 1
    assert "--resume" in capsys.readouterr().err
    assert main(["train", *given, "--resume", "--seed=1"]) == 1
    assert "seed" in capsys.readouterr().err
    assert main(["train", *given, "--resume"]) == 0
    again = load_file(adapter / "adapter.safetensors")
    assert all(torch.equal(first[name], again[name]) for name in first)


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
    join = "python -m training.llava join --language-model smollm2 --output smollm2-llava"
    train = "python -m training.llava train --language-model smollm2 --output runs/llava"
    page = (ROOT / "eval" / "notes" / "smollm2-llava.md").read_text()
    assert join in page and train in page
    assert "eval/notes/smollm2-llava.md" in (ROOT / "README.md").read_text()
