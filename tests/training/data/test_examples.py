"""Training data as tensors: which tokens are targets, what is cut, how rows are packed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from mmkv.prompt.loading import load_processor
from mmkv.prompt.processing import Processor
from mmkv.prompt.template import ChatTemplate
from mmkv.prompt.video import Clip
from mmkv.resources import bundled_model
from mmkv.training.data.conversations import Conversation, ConversationDocument, DataError
from mmkv.training.data.examples import Encoder, Example, Examples, Mixture
from mmkv.training.data.labels import TurnFinder
from tests.support.chat_models import (
    CHATML,
    save_internvl,
    save_llava,
    save_qwen2_5_vl,
    save_qwen3_vl,
)
from tests.training.data.test_conversations import image, turns

LLAMA3 = (
    "{{ '<s>' }}{% for m in messages %}<|start|>{{ m.role }}<|end|>\n\n{{ m.content | trim }}"
    "<|eot|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)
LLAMA2 = (
    "{{ '<s>' }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }} </s>{% endif %}{% endfor %}"
)
VICUNA = (
    "{% for m in messages %}{{ m.role | upper }}: {{ m.content }}"
    "{{ '</s>' if m.role == 'assistant' else ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)
PHI = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|eot|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}<|endoftext|>{% endif %}"
)
SMOL = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\n"
    "You are a helpful assistant<|im_end|>\n{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# What each template writes for a reply, as a pattern whose group is what the assistant says.
SAYS = {
    "llama3": (LLAMA3, r"<\|start\|>assistant<\|end\|>\n\n(.*?<\|eot\|>)"),
    "llama2": (LLAMA2, r"\[/INST\](.*?</s>)"),
    "vicuna": (VICUNA, r"ASSISTANT:( .*?</s>)"),
    "phi": (PHI, r"<\|assistant\|>\n(.*?<\|eot\|>)"),
    "smollm": (SMOL, r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)"),
    "chatml": (CHATML, r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)"),
}
MARKERS = [
    "<s>",
    "</s>",
    "<|start|>",
    "<|end|>",
    "<|eot|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|user|>",
    "<|assistant|>",
    "<|endoftext|>",
]
TALK = turns("what is red?", "a red thing", "and\nblue?", "red\n\n blue ", "thanks", "red: blue")


@pytest.fixture(scope="module")
def merging() -> PreTrainedTokenizerFast:
    """Return a tokenizer with merges over white space: ``: `` and ``red`` join."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    inner.train_from_iterator([LLAMA2, " a red thing\n\n and red blue: thing what is"] * 3, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")
    made.add_special_tokens({"additional_special_tokens": MARKERS})
    return made


def text_processor(tokenizer: Any, template: str | None) -> Processor:
    return Processor(tokenizer, ChatTemplate(tokenizer, template, parts=False))


def chat(messages: list[dict[str, Any]]) -> Conversation:
    return Conversation(messages, "here", 1)


def encode(processor: Processor, messages: list[dict[str, Any]], **options: Any) -> Example:
    (made,) = Encoder(processor, 10_000, **options)(chat(messages))
    return made


@pytest.mark.parametrize("name", SAYS)
def test_labels_are_the_tokens_of_the_assistant(
    merging: PreTrainedTokenizerFast, name: str
) -> None:
    """Against the rendered text: a token is a target when it covers characters of a reply."""
    template, says = SAYS[name]
    made = encode(text_processor(merging, template), TALK)
    text = merging.apply_chat_template(TALK, chat_template=template, tokenize=False)
    spans = [match.span(1) for match in re.finditer(says, text, re.DOTALL)]
    assert len(spans) == 3
    coded = merging(text, add_special_tokens=False, return_offsets_mapping=True)
    wanted = [
        token if any(a < end and b > begin for begin, end in spans) else -100
        for token, (a, b) in zip(coded["input_ids"], coded["offset_mapping"], strict=True)
    ]
    assert made.input_ids.tolist() == coded["input_ids"] and made.labels.tolist() == wanted
    assert made.input_ids.dtype == made.labels.dtype == torch.int64


@pytest.mark.parametrize("name", SAYS)
def test_a_long_chat_is_not_tokenized_again_for_each_turn(
    merging: PreTrainedTokenizerFast, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is tokenized grows with the chat's length, not with its square: labels as above."""
    lengths: list[int] = []
    tokenize = TurnFinder.tokenize

    def counted(self: TurnFinder, text: str) -> list[int]:
        lengths.append(len(text))
        return tokenize(self, text)

    monkeypatch.setattr(TurnFinder, "tokenize", counted)
    template, says = SAYS[name]
    talk = [message for number in range(30) for message in turns(f"what is {number}?", "red: blue")]
    made = encode(text_processor(merging, template), talk)
    text = merging.apply_chat_template(talk, chat_template=template, tokenize=False)
    assert sum(lengths) <= 3 * len(text)
    said = merging.decode(made.labels[made.labels != -100])
    assert said == "".join(re.findall(says, text, re.DOTALL))


def test_a_token_merged_over_the_opening_belongs_to_the_reply(
    merging: PreTrainedTokenizerFast,
) -> None:
    made = encode(text_processor(merging, VICUNA), turns("q", "red"))
    ids = made.labels[made.labels != -100].tolist()
    assert merging.decode(ids) == " red</s>" and len(ids) == 2


def test_without_a_template_only_the_reply_is_labelled(merging: PreTrainedTokenizerFast) -> None:
    made = encode(text_processor(merging, None), turns("what is red?", " a thing"))
    assert merging.decode(made.labels[made.labels != -100]) == " a thing"


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}[{{ messages | length }}]{{ m.content }}{% endfor %}",
        # Thoughts only in the last reply.
        "{% for m in messages %}<|start|>{% if loop.last %}<think>{% endif %}{{ m.content }}<|eot|>"
        "{% endfor %}{% if add_generation_prompt %}<|start|>{% endif %}",
        "{% for m in messages %}<|start|>{{ m.content }}{% if loop.last and m.role != 'user' %}"
        " thing{% endif %}<|eot|>{% endfor %}{% if add_generation_prompt %}<|start|>{% endif %}",
        "{{ messages[-1].content }}",
        "{% for m in messages %}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<think>{% endif %}",
    ],
)
def test_templates_that_do_not_nest(merging: PreTrainedTokenizerFast, template: str) -> None:
    notes: list[str] = []
    encoder = Encoder(text_processor(merging, template), 1000, report=notes.append)
    assert encoder(chat(TALK)) == [] and encoder.tally["broken"] == 1
    assert "template shows the beginning" in notes[0]


@pytest.fixture(scope="module")
def bundled() -> Processor:
    return load_processor(bundled_model())


def answers_of(processor: Processor, example: Example) -> str:
    return processor.tokenizer.decode(example.labels[example.labels != -100])


def seen_talk(folder: Path) -> list[dict[str, Any]]:
    """Three turns, with a picture of 4 tokens in the first and two of 1 in the second."""
    image(folder / "big.png"), image(folder / "small.png", "blue", (32, 32))
    parts = [{"type": "image", "image": str(folder / n)} for n in ("big.png", "small.png")]
    messages = turns("", "a red circle", "", "yes", "How many?", "three")
    messages[0]["content"] = [parts[0], {"type": "text", "text": "What is at row 1?"}]
    messages[2]["content"] = [parts[1], parts[1], {"type": "text", "text": "Do you see it?"}]
    return messages


def test_labels_with_pictures_of_the_bundled_model(bundled: Processor, tmp_path: Path) -> None:
    made = encode(bundled, seen_talk(tmp_path))
    wanted, labels = [], []
    see = "<|vision_start|>{}<|vision_end|>"
    four, one = (see.format("<|image_pad|>" * n) for n in (4, 1))
    for asked, answer in (
        (f"{four}What is at row 1?", "a red circle"),
        (f"{one}{one}Do you see it?", "yes"),
        ("How many?", "three"),
    ):
        opening = f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
        for text, target in ((opening, False), (f"{answer}<|im_end|>", True), ("\n", False)):
            ids = bundled.tokenizer.encode(text, add_special_tokens=False)
            wanted += ids
            labels += ids if target else [-100] * len(ids)
    assert made.input_ids.tolist() == wanted and made.labels.tolist() == labels
    assert made.media["image_grid_thw"].tolist() == [[1, 4, 4], [1, 2, 2], [1, 2, 2]]
    assert made.media["pixel_values"].shape[0] == 16 + 4 + 4
    assert made.token_types is not None and int(made.token_types.sum()) == 6
    shapes = {name: tensor.shape for name, tensor in made.inputs().items()}
    assert shapes["input_ids"] == shapes["labels"] == shapes["mm_token_type_ids"] == (1, len(made))
    assert "attention_mask" not in shapes


@pytest.mark.parametrize("save", [save_qwen3_vl, save_llava, save_internvl])
def test_labels_with_pictures_of_other_families(
    tmp_path: Path, save: Callable[[Path], Path]
) -> None:
    processor = load_processor(save(tmp_path / "model"))
    made = encode(processor, seen_talk(tmp_path))
    end = "<|im_end|>"
    assert answers_of(processor, made) == f"a red circle{end}yes{end}three{end}"


def test_labels_after_a_video(tmp_path: Path, bundled: Processor, monkeypatch: Any) -> None:
    frames = np.zeros((4, 64, 64, 3), np.uint8)
    clip = Clip(frames, (0, 12, 24, 36), 24.0)
    monkeypatch.setattr("mmkv.prompt.processing.load_video", lambda *_, **__: clip)
    ask = [{"type": "video", "video": "v.mp4"}, {"type": "text", "text": "What is it?"}]
    messages = turns("", "a red circle", "", "yes")
    messages[0]["content"] = messages[2]["content"] = ask
    older = load_processor(save_qwen2_5_vl(tmp_path / "older"))
    for processor in (bundled, load_processor(save_qwen3_vl(tmp_path / "newer")), older):
        made = encode(processor, messages)
        assert answers_of(processor, made) == "a red circle<|im_end|>yes<|im_end|>"
        assert made.media["video_grid_thw"].shape == (2, 3)
        stamped = "seconds>" in processor.tokenizer.decode(made.input_ids)
        assert stamped == ("second_per_grid_ts" not in made.media) == (processor is not older)


def test_labels_after_a_video_of_frames(tmp_path: Path, monkeypatch: Any) -> None:
    clip = Clip(np.zeros((3, 32, 32, 3), np.uint8), (0, 12, 24), 24.0)
    monkeypatch.setattr("mmkv.prompt.processing.load_video", lambda *_, **__: clip)
    messages = turns("", "a red circle", "", "yes")
    messages[0]["content"] = [{"type": "video", "video": "v.mp4"}]
    messages[2]["content"] = seen_talk(tmp_path)[0]["content"]
    processor = load_processor(save_internvl(tmp_path / "model"))
    made = encode(processor, messages)
    assert answers_of(processor, made) == "a red circle<|im_end|>yes<|im_end|>"


def test_plain_text_is_all_targets_and_cut_into_pieces(bundled: Processor) -> None:
    text = "What is at row 1? " * 40
    reported: list[str] = []
    encoder = Encoder(bundled, 64, report=reported.append)
    pieces = encoder(ConversationDocument(text, "f", 3))
    ids = bundled.tokenizer.encode(text, add_special_tokens=False)
    assert torch.cat([p.input_ids for p in pieces]).tolist() == ids
    assert all(torch.equal(p.input_ids, p.labels) for p in pieces)
    sizes = [len(p) for p in pieces]
    assert max(sizes) <= 64 and max(sizes) - min(sizes) <= 1 and len(sizes) == -(-len(ids) // 64)
    assert reported == [f"f:3: {len(ids)} tokens cut into {len(sizes)} pieces"]
    assert encoder.summary() == "of 1 rows 1 split"


def test_long_chats_are_dropped_or_cut_between_turns(bundled: Processor, tmp_path: Path) -> None:
    messages = seen_talk(tmp_path)
    whole = encode(bundled, messages)
    two, one = (encode(bundled, messages[:count]) for count in (4, 2))
    reported: list[str] = []
    for limit, wanted in (
        (len(whole), whole),
        (len(whole) - 1, two),
        (len(two), two),
        (len(two) - 1, one),
        (len(one) - 1, None),
    ):
        cutter = Encoder(bundled, limit, "cut", reported.append)
        made = cutter(chat(messages))
        if wanted is None:
            assert made == [] and cutter.tally["dropped"] == 1
        else:
            assert torch.equal(made[0].input_ids, wanted.input_ids)
            assert torch.equal(made[0].labels, wanted.labels)
            for name, tensor in wanted.media.items():
                assert torch.equal(made[0].media[name], tensor)
        dropper = Encoder(bundled, limit, report=reported.append)
        assert len(dropper(chat(messages))) == (wanted is whole)
        assert dropper.tally["dropped"] == (wanted is not whole)
    assert any("2 of 6 messages" in line for line in reported)


def test_rows_that_cannot_be_encoded_are_counted(bundled: Processor, tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_bytes(b"no picture")
    bad = turns("", "a")
    bad[0]["content"] = [{"type": "image", "image": str(tmp_path / "bad.png")}]
    reported: list[str] = []
    encoder = Encoder(bundled, 512, report=reported.append)
    rows = [chat(bad)] * 7 + [ConversationDocument("a", "f", 1)]
    assert [encoder(row) for row in rows] == [[]] * 8
    assert encoder.tally["broken"] == 8 and len(reported) == 2
    assert encoder.summary() == "of 8 rows 8 broken"
    for settings_ in ({"max_length": 4}, {"max_length": 64, "long_chats": "fold"}):
        with pytest.raises(DataError):
            Encoder(bundled, **settings_)


def test_a_dataset_replaces_unusable_examples(bundled: Processor) -> None:
    good = [chat(turns(f"What is at row {n}?", "a red circle")) for n in range(6)]
    long = [chat(turns("What is at row? " * 20, "no"))] * 6
    text = [ConversationDocument("What is at row 1? " * 30, "f", 1)]

    def dataset() -> Examples:
        encoder = Encoder(bundled, 96, report=lambda line: None)
        return Examples(Mixture([good, long, text], [1, 1, 1], 5), encoder, 30)

    made, again = dataset(), dataset()
    rows = [made[n] for n in range(30)]
    assert all(torch.equal(again[n]["input_ids"], rows[n]["input_ids"]) for n in (29, 3, 17, 0))
    assert all(row["input_ids"].shape == row["labels"].shape for row in rows)
    assert made.encoder.tally["dropped"] > 0 and len(made) == 30
    with pytest.raises(IndexError):
        made[30]
    nothing = Examples(Mixture([long], [1.0]), Encoder(bundled, 96, report=lambda line: None), 1)
    with pytest.raises(
        DataError, match=r"no usable row .* the last was here:1: left out: .* tokens"
    ):
        nothing[0]
