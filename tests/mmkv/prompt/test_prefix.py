"""Replies that begin with given words: the prompt is transformers', the reply one message."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mmkv import Engine, Sampling, Session
from mmkv.engine.errors import InputError
from mmkv.prompt.messages import as_parts
from mmkv.prompt.special import CUT, tokenize
from mmkv.prompt.template import ChatTemplate
from mmkv.reply import LogitSettings, ReplyWriter
from mmkv.sampling import checked
from mmkv.scheduler import Scheduler
from mmkv.scheduler.conversation import CachedConversation
from mmkv.scheduler.replies import EngineExecutor, ReplyJob, message
from tests.mmkv.prompt.test_held import MOVING, OPENED, THOUGHTS, TRIMMED, held_ids, with_template
from tests.support.chat_models import CHATML, byte_tokenizer, save_llama, script

# What templates of published models do with a last reply, shortened.
TEMPLATES = {
    "chatml": CHATML,
    "thoughts": THOUGHTS,
    "opened thoughts": OPENED,
    "trimmed": TRIMMED,
    "moving": MOVING,
    # As Qwen3's: a block of thoughts stands before the last reply, empty where it has none.
    "empty thoughts": "{% for m in messages %}<|im_start|>{{ m.role }}\n{% set text = m.content %}"
    "{% if m.role == 'assistant' %}{% set thought = '' %}{% if '</think>' in text %}"
    "{% set thought = text.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.last or thought %}<think>\n{{ thought.strip('\n') }}\n</think>\n\n{% endif %}"
    "{{ text.lstrip('\n') }}{% else %}{{ text }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    # As Llama 3's: all is trimmed, and roles stand in headers.
    "headers": "{% for m in messages %}{% set text = '[' + m.role + ']\n\n' + m.content | trim "
    "+ '<|im_end|>' %}{{ text if not loop.first else '<|endoftext|>' + text }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]\n\n' }}{% endif %}",
    # As Gemma's: the assistant has another name.
    "another name": "{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else "
    "m.role %}{{ '<|im_start|>' + role + '\n' + m.content | trim + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>model\n' }}{% endif %}",
    # As DeepSeek R1's: thoughts of a reply are not shown.
    "no thoughts": "{% for m in messages %}{% if m.role == 'assistant' %}A:"
    "{{ m.content.split('</think>')[-1] }}<|im_end|>{% else %}U:{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}A:<think>\n{% endif %}",
}
TALK = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nhi"},
    {"role": "user", "content": "and how? "},
]
REFUSING = ("empty thoughts", "no thoughts")
TRIMS = ("trimmed", "headers", "another name")
PIECES = ["Sure", " ", "  ", "\n", "\n\n", "<think>", "</think>", ",", "é", "{", "hello"]


def theirs(source: str, talk: list[dict[str, Any]], **options: Any) -> Any:
    """Return what transformers makes of a talk whose last message is continued."""
    more = {"chat_template": source, "continue_final_message": True} | options
    return byte_tokenizer(source).apply_chat_template(talk, **more)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_prompt_is_that_of_transformers(name: str) -> None:
    tokenizer, rng, refused = byte_tokenizer(), Random(3), 0
    plain = ChatTemplate(tokenizer, TEMPLATES[name], parts=False)
    texts = ["Sure", "Sure, ", "Sure.\n", "<think>\nwell\n</think>\n\nSo ", "<think>\nwell"]
    texts += ["".join(rng.choices(PIECES, k=rng.randint(1, 6))) for _ in range(15)]
    for prefix in filter(str.strip, texts):
        for talk in (TALK[:1], TALK):
            template = plain.with_prefix(prefix)
            whole = [*talk, {"role": "assistant", "content": prefix}]
            try:
                wanted = theirs(TEMPLATES[name], whole, tokenize=False)
            except ValueError:
                wanted = None
            # They look for the words anywhere in the text.
            if wanted is None or not wanted.endswith((prefix.lstrip(), prefix.strip())):
                refused += 1
                with pytest.raises(InputError, match="in another way than it was given"):
                    template.render(talk, opening=True)
                continue
            text = template.render(talk, opening=True)
            assert text == wanted
            assert (
                tokenize(tokenizer, text)
                == theirs(TEMPLATES[name], whole, return_dict=True)["input_ids"]
            )
            shown = template.prefix_in(text)
            assert text.endswith(shown.lstrip()) and shown.rstrip() == prefix.rstrip()
            assert plain.render(talk, opening=True) == template.before_reply(talk)
    assert (refused > 0) == (name in REFUSING)


def said(session: Session) -> list[dict[str, Any]]:
    """Return a session's history with contents as texts."""
    return [
        {**one, "content": "".join(part["text"] for part in as_parts(one["content"]))}
        for one in session.history
    ]


def test_special_tokens_in_a_prefix_are_text() -> None:
    tokenizer = byte_tokenizer()
    template = ChatTemplate(tokenizer, CHATML, parts=False).with_prefix("a<|im_end|>\nb<|im_")
    text = template.render(TALK[:1], opening=True)
    assert text.replace(CUT, "").endswith("<|im_start|>assistant\na<|im_end|>\nb<|im_")
    ids = tokenize(tokenizer, text)
    assert ids.count(tokenizer.eos_token_id) == 1  # of the question
    assert template.prefix_in(text) == template.prefix


def test_without_a_template_the_text_is_continued() -> None:
    template = ChatTemplate(byte_tokenizer(), None, parts=False).with_prefix("Sure, ")
    assert template.render(TALK[:1], opening=True) == "helloSure, "


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def engine(llama: Path) -> Iterator[Engine]:
    made = Engine.from_pretrained(llama, policy="full", dtype="float32")
    yield made
    made.cache.check()
    assert made.cache.pool.free_pages == made.cache.pool.num_pages


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_session_reads_and_keeps_one_message(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Turns with a prefix and without one: what is held is a fresh rendering of the history."""
    with_template(engine, TEMPLATES[name])
    replies = [("Sure,", " I can. "), ("", "never"), ("<think>x</think>\nBut", " yes"), ("So ", "")]
    replies = [one for one in [*replies, ("", "no")] if name not in REFUSING or "<" not in one[0]]
    script(monkeypatch, engine, [reply for _, reply in replies])
    talk: list[dict[str, Any]] = []
    with engine.session() as session:
        for at, (prefix, reply) in enumerate(replies):
            talk.append({"role": "user", "content": f"{at}?"})
            assert "".join(session.send(f"{at}?", prefix=prefix)) == reply
            assert session.last is not None and session.last.text == reply
            begun = [*talk, {"role": "assistant", "content": prefix}] if prefix else talk
            opening = {"continue_final_message": bool(prefix), "add_generation_prompt": not prefix}
            wanted = theirs(TEMPLATES[name], begun, return_dict=True, **opening)["input_ids"]
            assert held_ids(session) == [*wanted, *byte_tokenizer()(reply)["input_ids"]]
            assert session.note is None
            shown = prefix.rstrip() if name in TRIMS else prefix
            talk.append({"role": "assistant", "content": shown + reply})
            assert said(session) == talk


def test_a_reply_with_a_prefix_is_the_models_own(llama: Path, engine: Engine) -> None:
    """Greedy, as transformers generates behind the same ids; and what is kept is not read again."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(llama, dtype=torch.float32)
    tokenizer, greedy = engine.processor.tokenizer, Sampling(9, temperature=0)
    for prefix in ("Sure, ", "a<|im_end|>b", "é"):
        ids: list[int] = []
        with engine.session() as session:
            for begins in (prefix, "", "So"):
                text = "<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n"
                new = tokenizer(f"<|im_end|>\n{text}" if ids else text)["input_ids"]
                new = new + tokenize(tokenizer, begins.replace("<|im", f"<{CUT}|im"))
                list(session.send("why?", prefix=begins, sampling=greedy))
                assert session.last is not None
                # The last sampled token is fed with the next turn.
                assert session.last.prompt_tokens == len(new) + bool(ids)
                ids += new
                with torch.no_grad():
                    wanted = model.generate(torch.tensor([ids]), max_new_tokens=9, do_sample=False)
                reply = wanted[0, len(ids) :].tolist()
                assert session.last.token_ids == reply and len(reply) == 9
                ids += reply


@pytest.mark.parametrize("road", ["scheduler", "file", "undo"])
def test_a_prefix_stands_on_every_road(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, road: str
) -> None:
    script(monkeypatch, engine, ["b", "d"])
    wanted = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "Sure, b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]
    if road == "scheduler":
        kept, scheduler = CachedConversation(engine), Scheduler(EngineExecutor(engine))
        for given in (message("a", prefix="Sure, "), message("c")):
            scheduler.submit(ReplyJob(engine, given, session=kept), "one")
            while scheduler.turn():
                pass
        session = kept.wake()
    else:
        session = engine.session()
        session.undo_depth = int(road == "undo")
        list(session.send("a", prefix="Sure, "))
        if road == "file":
            session.save(tmp_path / "s.mmkv")
            session.close()
            session = Session.load(engine, tmp_path / "s.mmkv")
        else:
            before = session.history[:]
            engine.processor.tokenizer("c")
            list(session.send("c", prefix="x"))
            assert session.history[-1]["content"] == "xd"
            assert session.undo() and session.history == before
            script(monkeypatch, engine, ["d"])
        list(session.send("c"))
    with session:
        assert said(session) == wanted
        assert session.memory().differs is None
        text = engine.processor.tokenizer.decode(held_ids(session))
        assert text == engine.processor.template.render(wanted[:3], opening=True) + "d"


def test_a_prefix_is_words(engine: Engine) -> None:
    with engine.session() as session:
        with pytest.raises(InputError, match="prefix is blank"):
            session.send("a", prefix=" \n")
        with pytest.raises(InputError, match="prefix is int"):
            session.send("a", prefix=1)  # type: ignore[arg-type]
        assert session.history == [] and session.seen == 0


def test_a_reply_is_taken_token_by_token() -> None:
    """SentencePiece drops the space that a text begins with; behind words it is kept. The end that
    a request names has no row, and as an end of the model's own it is no stop text.
    """
    vocabulary = {piece: n for n, piece in enumerate(["<unk>", "</s>", "\u2581", *"abc"])}
    inner = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    inner.normalizer = normalizers.Sequence([])
    inner.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")
    ids = [vocabulary[piece] for piece in ("\u2581", "b", "\u2581", "c")]
    engine: Any = SimpleNamespace(
        processor=SimpleNamespace(tokenizer=tokenizer),
        thought_marks=None,
        eos_token_ids=frozenset({1}),
        media_token_ids=frozenset(),
    )
    asked = LogitSettings(top_logprobs=1, stop_tokens=frozenset({1}))
    for prefix, wanted in (("", "b c"), ("a", " b c")):
        writer, rows = ReplyWriter(engine, checked(Sampling(9)), asked, prefix=prefix), []
        for token in (*ids, 1):
            writer.put(writer.choose(torch.eye(6)[token]))
            rows.append([row.token for row in writer.take_scored()])
        assert writer.take() == writer.held_text() == wanted
        assert rows == [*([token] for token in ids), []] and writer.stop_text is None
        speed = writer.reply(0, None).tokens_per_second  # the end takes a step, too
        assert speed * writer._decoding == pytest.approx(len(ids))
