"""Chats that send their whole history go on from a copy of their memory, also where it changed."""

from __future__ import annotations

import base64
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mmkv import Engine
from mmkv.engine.errors import InputError
from mmkv.engine.policies import make_policy
from mmkv.prompt import sandbox
from mmkv.prompt.template import ChatTemplate
from mmkv.reply import Sampler
from mmkv.server import prompts
from mmkv.server.engine_thread import EngineCore
from mmkv.server.job import ChatJob, ConversationLookup
from mmkv.server.media import resolver
from mmkv.server.prompts import Message, Part, Rendered, outline
from tests.mmkv.prompt.test_held import THOUGHTS
from tests.support.chat_models import (
    CHATML,
    byte_tokenizer,
    picture,
    save_llama,
)
from tests.support.media import write_clip
from tests.support.policies import EVICTING
from tests.support.servers import Server, picture_part, serving
from tests.support.tiers import long_but

LONG = "a text that is long enough to be read in several chunks of sixteen tokens each"
QUESTION = " ".join([LONG] * 4)  # long enough to be kept apart from what follows it
PICTURE = picture_part(picture("red", (40, 32)))
SYSTEM = {"role": "system", "content": f"you answer questions. {LONG}"}
CAUSAL = ["dbtrimkv", "trimkv", "streamingllm", "gkv", "h2o", "lagkv", "morphkv", "snapkv:window=4"]
# Each of the other presets has the same score or needs as one of those.
REST = [name for name in EVICTING if name not in [*CAUSAL, "snapkv"]]


def load(folder: Path, **options: Any) -> Engine:
    given = {"gates": "random", "policy": "dbtrimkv", "budget": 24, "dtype": "float32"} | options
    return Engine.from_pretrained(
        folder, kv_limit=8 * 2**20, page_size=4, prefill_chunk=16, **given
    )


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(lambda: load(folder)) as made:
        yield made


class Watch:
    """What each job's first session holds, and its logits, when its prompt stands."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[list[list[torch.Tensor]], torch.Tensor, int]] = []
        begin = ChatJob._begin_replies

        def watched(job: ChatJob, logits: torch.Tensor) -> None:
            assert job.live is not None
            self.seen.append((job.live.retained(), logits.clone(), job.counts.prefilled))
            begin(job, logits)

        monkeypatch.setattr(ChatJob, "_begin_replies", watched)


def same(one: Any, two: Any) -> bool:
    rows = zip(itertools.chain(*one[0]), itertools.chain(*two[0]), strict=True)
    return torch.equal(one[1], two[1]) and all(torch.equal(a, b) for a, b in rows)


def usage(answer: Any) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]


@pytest.mark.parametrize(
    "policy",
    long_but(("dbtrimkv", "snapkv:window=4"), [*CAUSAL, *REST], "a second each"),
)
def test_a_resumed_memory_is_that_of_a_fresh_run(
    policy: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same conversation, once from a snapshot and once afresh: same entries, same logits."""
    watch = Watch(monkeypatch)
    shown = {"role": "user", "content": [PICTURE, {"type": "text", "text": f"what? {LONG}"}]}
    history = [SYSTEM, shown, {"role": "assistant", "content": "a red one"}]
    first, second = ({"role": "user", "content": f"{name} {LONG}"} for name in ("why?", "how?"))
    with serving(lambda: load(folder, policy=policy)) as server:
        said = {"mmkv": {"resume": "auto"}}
        assert usage(server.chat(*history, first, **said))["mmkv"]["resumed"] == 0
        resumed = server.chat(*history, second, **said)
        fresh = server.chat(*history, second, mmkv={"resume": "never"})
        system = server.chat(SYSTEM, second, **said)
        server.chat(SYSTEM, second, mmkv={"resume": "never"})
    own, other = usage(resumed), usage(fresh)
    assert own["mmkv"]["resumed"] > other["mmkv"]["resumed"] == 0
    assert usage(system)["mmkv"]["resumed"] > 0
    assert own["mmkv"]["evicted"] == other["mmkv"]["evicted"]
    assert (own["mmkv"]["evicted"] > 0) != make_policy(policy).keeps_prompt
    assert same(watch.seen[1], watch.seen[2]) and same(watch.seen[3], watch.seen[4])
    assert resumed.json()["choices"] == fresh.json()["choices"]
    assert watch.seen[1][2] == own["prompt_tokens"] - own["mmkv"]["resumed"]


def test_a_dialogue_reads_each_turn_once(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six turns with pictures: each reads its own tokens, and replies as one session does.

    However many came before it, it is rendered once, and its own picture alone is decoded: to know
    it, and to read it.
    """
    watch = Watch(monkeypatch)
    work = Counter[str]()
    for module, function in ((sandbox, sandbox.render), (resolver, resolver.data_uri_content)):

        def counted(*given: Any, function: Callable[..., Any] = function) -> Any:
            work[function.__name__] += 1
            return function(*given)

        monkeypatch.setattr(module, function.__name__, counted)
    messages: list[Any] = []
    before = 0
    for turn in range(6):
        look = picture_part(picture("blue", (24 + 8 * turn, 24)))
        messages.append({"role": "user", "content": [look, {"type": "text", "text": f"{turn}?"}]})
        work.clear()
        answer = server.chat(*messages, max_tokens=6)
        assert turn < 2 or work == {"render": 1, "data_uri_content": 2}
        used = usage(answer)
        new = used["prompt_tokens"] - before
        # The last sampled token is fed with the next turn.
        assert watch.seen[-1][2] == new <= 80
        assert used["prompt_tokens_details"]["cached_tokens"] == used["mmkv"]["resumed"] == before
        assert used["mmkv"]["kv_bytes"] <= used["mmkv"]["bound_bytes"]
        before = used["prompt_tokens"] + used["completion_tokens"] - 1
        text = answer.json()["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": text})
    assert used["mmkv"]["evicted"] > used["mmkv"]["kept"]


def test_edits_and_other_tries_go_on_before_the_question(server: Server) -> None:
    base = usage(server.chat(SYSTEM, f"first {QUESTION}"))
    again = usage(server.chat(SYSTEM, f"first {QUESTION}", temperature=1.3, n=3, seed=1))
    assert again["mmkv"]["resumed"] > base["prompt_tokens"] - 25  # all but the reply's opening
    edited = usage(server.chat(SYSTEM, f"second {QUESTION}"))
    assert 0 < edited["mmkv"]["resumed"] < again["mmkv"]["resumed"]


def test_a_short_question_is_read_once_more_and_a_system_message_is_not(server: Server) -> None:
    for asked in ("in short?", f"at length? {QUESTION}"):
        server.chat(SYSTEM, asked)
        again = usage(server.chat(SYSTEM, asked))
        left = again["prompt_tokens"] - again["mmkv"]["resumed"]
        # Of the byte tokenizer: the reply's opening, or that and the message with its markers.
        assert left < 25 if asked.endswith(QUESTION) else len(asked) < left < len(asked) + 50


@pytest.mark.parametrize(
    "other",
    [
        {"mmkv": {"budget": 25}},
        {"cache_salt": "mine"},
        {"mmkv": {"resume": "never"}},
    ],
    ids=str,
)
def test_nothing_is_shared_where_the_memory_would_be_another(
    server: Server, other: dict[str, Any]
) -> None:
    asked = f"shared? {other} {LONG}"
    server.chat(SYSTEM, asked)
    assert usage(server.chat(SYSTEM, asked, **other))["mmkv"]["resumed"] == 0


def test_resume_can_be_required_and_be_said_in_a_header(server: Server) -> None:
    unknown = server.chat("never heard of", mmkv={"resume": "required"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (409, "not_resumable")
    server.chat(SYSTEM, "known")
    assert usage(server.chat(SYSTEM, "known", mmkv={"resume": "required"}))["mmkv"]["resumed"]
    server.client.headers["X-Mmkv-Resume"] = "never"
    try:
        assert usage(server.chat(SYSTEM, "known"))["mmkv"]["resumed"] == 0
        server.client.headers["X-Mmkv-Resume"] = "maybe"
        assert server.chat(SYSTEM, "known").status_code == 400
    finally:
        del server.client.headers["X-Mmkv-Resume"]


def test_what_a_stop_text_cut_off_is_not_resumed(server: Server) -> None:
    """The memory after it holds words that the client never saw."""

    def replies(core: EngineCore) -> int:
        return sum(one.replied for one in core.prefix_cache._found.values())

    said = server.chat(QUESTION, max_tokens=12, cache_salt="whole").json()["choices"][0]
    stop = said["message"]["content"][3:5]
    before = server.inside(replies)
    cut = server.chat(QUESTION, max_tokens=12, cache_salt="cut", stop=stop).json()["choices"][0]
    assert cut["finish_reason"] == "stop"
    text = cut["message"]["content"]
    assert said["message"]["content"].startswith(text) and len(text) <= 3
    assert server.inside(replies) == before
    found = usage(server.chat(QUESTION, text, "and?", cache_salt="cut"))
    assert 0 < found["mmkv"]["resumed"] < found["prompt_tokens"] - len("and?")


def test_policies_that_score_by_the_question_share_only_when_asked(folder: Path) -> None:
    with serving(lambda: load(folder, policy="snapkv:window=4")) as server:
        for _ in range(2):
            assert usage(server.chat(SYSTEM, "same"))["mmkv"]["resumed"] == 0
        for _ in range(2):
            last = usage(server.chat(SYSTEM, "same", mmkv={"resume": "auto"}))
        assert last["mmkv"]["resumed"] > 0


def test_snapshots_stay_within_their_limit_and_give_way(folder: Path) -> None:
    def pages(core: EngineCore) -> int:
        return core.prefix_cache.pages

    engine = load(folder)
    with serving(lambda: engine, snapshot_bytes=150 * engine.cache.pool.page_bytes) as server:
        for turn in range(8):
            server.chat(f"{turn} {QUESTION}")
            assert 0 < server.inside(pages) <= 150
        # The newest is there, the oldest is not.
        assert usage(server.chat(f"7 {QUESTION}"))["mmkv"]["resumed"] > 0
        assert usage(server.chat(f"0 {QUESTION}"))["mmkv"]["resumed"] == 0


def test_a_dialogue_leaves_what_it_no_longer_needs_behind(folder: Path) -> None:
    """Of each of its turns but the latest, and not what another conversation went on from, too."""

    def copies(core: EngineCore) -> int:
        return len(core.scheduler.residents.copies)

    with serving(lambda: load(folder)) as server:

        def ask(messages: list[Any]) -> int:
            answer = server.chat(*messages, max_tokens=4)
            text = answer.json()["choices"][0]["message"]["content"]
            messages.append({"role": "assistant", "content": text})
            resumed: int = usage(answer)["mmkv"]["resumed"]
            return resumed

        messages: list[Any] = [SYSTEM]
        kept: list[int] = []
        shared: list[Any] = []
        for turn in range(5):
            messages.append({"role": "user", "content": f"{turn} {QUESTION}"})
            assert ask(messages) > 0 or not turn
            kept.append(server.inside(copies))
            if turn == 1:  # two others go on from here
                for name in "ab":
                    shared = [*messages, {"role": "user", "content": name}]
                    assert ask([*shared]) > 0
        # The system's, those of a question and its reply, and the reply before; then three more,
        # of the others' two replies and of what they went on from.
        assert kept == [3, 4, 3 + 3, 4 + 3, 4 + 3]
        # Another reply, and another last message, take what is there.
        assert ask(messages[:-1]) > 0
        assert ask([*messages[:-2], {"role": "user", "content": "another"}]) > 0
        assert ask([*shared[:-1], {"role": "user", "content": "c"}]) > 0
        first = ask([*messages[:3], {"role": "user", "content": "d"}])
        system = ask([SYSTEM, {"role": "user", "content": "e"}])
        assert first == system > 0  # the first reply's is gone


def test_what_conversations_begin_with_stays(folder: Path) -> None:
    """An example in messages before each question; one of the conversations has two turns."""
    with serving(lambda: load(folder)) as server:

        def ask(messages: list[Any], text: str) -> tuple[int, list[Any]]:
            asked = [*messages, {"role": "user", "content": text}]
            answer = server.chat(*asked, max_tokens=4)
            said = answer.json()["choices"][0]["message"]
            resumed: int = usage(answer)["mmkv"]["resumed"]
            return resumed, [*asked, {"role": "assistant", "content": said["content"]}]

        example = {"role": "user", "content": f"an example {QUESTION}"}
        first = [SYSTEM, example, {"role": "assistant", "content": "an answer"}]
        assert ask(first, "a")[0] == 0
        begun, other = ask(first, "b")
        assert ask(other, "more")[0] > begun
        assert ask(first, "c")[0] == begun > ask([SYSTEM], "d")[0] > 0


def test_a_request_takes_the_room_of_snapshots(folder: Path) -> None:
    engine = load(folder)
    with serving(lambda: engine) as server:
        reservation = server.inside(lambda core: _price(core))
        engine.cache.pool.limit = reservation + 20
        for turn in range(6):
            assert usage(server.chat(f"{turn} {LONG}", max_tokens=20))["prompt_tokens"] > 60
        assert server.inside(lambda core: core.prefix_cache.pages) <= reservation + 20


def _price(core: EngineCore) -> int:
    from mmkv.sampling import Sampling
    from mmkv.server.work import ChatWork

    return core.job(ChatWork([], "", Sampling()), lambda: None).reservation().total


def test_segments_end_with_messages_and_add_up(server: Server) -> None:
    template = server.inside(lambda core: core.engine.processor.template)
    messages = [
        {"role": role, "content": [{"type": "text", "text": f"<{role} {at}>".ljust(300, ".")}]}
        for at, role in enumerate(["system", "user", "assistant", "user", "assistant", "user"])
    ]
    whole = template.render(messages, opening=True)
    for held in range(len(messages)):
        found = cut(template, messages, held)
        assert found is not None
        before = template.render(messages[:held], opening=False) if held else ""
        assert before + "".join(one.text for one in found) == whole
        assert [(one.first, one.last) for one in found[:-1]] == [
            (at, at + 1) for at in range(held, len(messages))
        ]
    # A short question goes with the opening of the reply, and one with a picture does not.
    short = {"role": "user", "content": [{"type": "text", "text": "why?"}]}
    shown = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "why?"}]}
    for last, segments in ((short, 1), (shown, 2)):
        for held, replied in ((5, True), (4, False)):
            found = cut(template, [*messages[:5], last], held, replied)
            assert found is not None and len(found) == segments + (held == 4)
            assert found[-1].text.endswith("<|im_start|>assistant\n")
    # After a reply that was sampled, its end marker is still to come.
    found = cut(template, messages, 3, replied=True)
    assert found is not None and found[0].text.startswith("<|im_end|>\n<|im_start|>user")


# Templates that say something else as soon as more messages follow, or refuse beginnings.
TEMPLATES = {
    "chatml": CHATML,
    "plain": None,
    "system apart": "{% if messages[0].role == 'system' %}[{{ messages[0].content }}]\n"
    "{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}",
    "system folded into a question": "{% if messages[0].role == 'system' %}"
    "{% if messages | length < 2 %}{{ raise_exception('ask something') }}{% endif %}"
    "{% set system = messages[0].content + ' ' %}{% set rest = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}<s>"
    "{% for m in rest %}{{ m.role }}: {{ (system if loop.first else '') + m.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}",
    "the last looks different": "{% for m in messages %}{% if loop.last %}>{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}it:{% endif %}",
    "replies look ahead": "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' and "
    "loop.nextitem is defined %}{% endif %}{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}it:{% endif %}",
    "in a macro": "{% macro all() %}{% for m in messages %}{{ m.content }};{% endfor %}"
    "{% endmacro %}{{ all() }}{% if add_generation_prompt %}it:{% endif %}",
    "read twice": "{% for m in messages[::-1] %}{% endfor %}{% for m in messages %}"
    "{{ m.content }};{% endfor %}{% if add_generation_prompt %}it:{% endif %}",
    "closed": "{% for m in messages %}{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}it:{% else %}end{% endif %}",
    "open by mistake": "{% set add_generation_prompt = true %}{% for m in messages %}"
    "{{ m.content }};{% endfor %}{% if add_generation_prompt %}it:{% endif %}",
    "asked twice": "{% for m in messages %}{{ m.content }}{% if not (loop.last and "
    "add_generation_prompt) %};{% endif %}{% endfor %}{% if add_generation_prompt %}it:{% endif %}",
    "a macro of that name": "{% macro add_generation_prompt() %}x{% endmacro %}"
    "{% for m in messages %}{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}it:{% endif %}",
    "asked in other words": "{% for m in messages %}{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt and messages | length > 1 %}it:{% endif %}",
}
PLAIN_ENDS = {"chatml", "plain", "system apart", "system folded into a question"} | {
    "the last looks different",
    "replies look ahead",
    "in a macro",
    "read twice",
}


def cut(*given: Any, **named: Any) -> Any:
    """Return what is to be read of a conversation, in its segments; None: it cannot go on."""
    found = outline(*given, **named)
    return None if found is None else found.segments


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("replied", [True, False])
def test_what_was_read_before_is_not_rendered_by_itself_again(
    name: str, replied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text that is known leads to the same cuts as rendering it, and so does a wrong one."""
    template = ChatTemplate(byte_tokenizer(), TEMPLATES[name], parts=False)
    roles = ["system", *["user", "assistant"] * 4, "user"]
    messages = [
        {"role": role, "content": f"<{at}>".ljust(300, ".")} for at, role in enumerate(roles)
    ]
    held = 5 if replied else 4
    read = outline(template, messages[:4])  # a fresh run that begins the reply messages[4]
    assert read is not None
    text = read.text
    if not replied:
        at = next((i for i, one in enumerate(read.segments) if one.last == held), None)
        if at is None:
            pytest.skip("no message ends there with this template, so nothing is kept")
        after = "".join(one.text for one in read.segments[at + 1 :])
        text = text.removesuffix(after) if after else text
    rendered: list[int] = []
    render = ChatTemplate.render

    def counted(self: ChatTemplate, shown: Any, *arguments: Any, **named: Any) -> str:
        rendered.append(len(shown))
        return render(self, shown, *arguments, **named)

    monkeypatch.setattr(ChatTemplate, "render", counted)
    plain = cut(template, messages, held, replied)
    before, rendered[:] = len(rendered), []
    assert cut(template, messages, held, replied, Rendered.of(text)) == plain
    if name in ("chatml", "plain"):  # says the same of them in a longer conversation
        assert len(rendered) == before - 1
    assert cut(template, messages, held, replied, Rendered.of(text + "!")) == plain
    assert Rendered.of(text).begins(text + "more") and not Rendered.of(text).begins(text[:-1])


@pytest.mark.parametrize("name", TEMPLATES)
def test_where_the_opening_begins_is_known_where_it_is_a_template_s_last_word(name: str) -> None:
    template = ChatTemplate(byte_tokenizer(), TEMPLATES[name], parts=False)
    messages = [{"role": role, "content": role * 9} for role in ("system", "user")]
    layout, without = template.layout(messages, True), template.render(messages, False)
    assert (layout.end is not None) == (name in PLAIN_ENDS)
    if layout.end is not None:
        assert layout.text[: layout.end] == without
    assert template.layout(messages, False).end == len(without)


def test_few_messages_are_read_at_once_where_each_is_rendered_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prompts, "_MOST_RENDERED", 4)
    asked = [{"role": "user", "content": str(at)} for at in range(5)]
    for name, refused in (("chatml", False), ("the last looks different", True)):
        template = ChatTemplate(byte_tokenizer(), TEMPLATES[name], parts=False)
        assert cut(template, asked[:4])
        if refused:
            with pytest.raises(InputError, match="at most 4 are read at once; send fewer"):
                outline(template, asked)
        else:
            assert cut(template, asked)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_long_conversation_is_cut_where_each_of_its_beginnings_ends(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By where the template's loop stands as by rendering every beginning of the conversation."""
    template = ChatTemplate(byte_tokenizer(), TEMPLATES[name], parts=False)
    roles = ["system", *["user", "assistant"] * 4, "user"]
    messages = [
        {"role": role, "content": f"<{at}>".ljust(300, ".")} for at, role in enumerate(roles)
    ]
    rendered = 0
    render = ChatTemplate.render

    def counted(*arguments: Any, **named: Any) -> str:
        nonlocal rendered
        rendered += 1
        return render(*arguments, **named)

    monkeypatch.setattr(ChatTemplate, "render", counted)
    for first, held in ((0, 0), (1, 0), (0, 3)):
        shown = messages[first:]
        rendered = 0
        found = cut(template, shown, held)
        times, often = rendered, prompts._FEW
        monkeypatch.setattr(prompts, "_FEW", len(shown))
        assert found == cut(template, shown, held)
        monkeypatch.setattr(prompts, "_FEW", often)
        if name in ("chatml", "system apart", "read twice"):
            assert times <= 3 and found is not None
            assert len(found) == len(shown) - held + 1


def test_a_template_that_forgets_replies_is_not_resumed_after_them() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}[{{ m.content }}]{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}"
    )
    template = ChatTemplate(byte_tokenizer(), source, parts=False)
    said = "a" * 300
    messages = [{"role": role, "content": said} for role in ("user", "assistant", "user")]
    assert cut(template, messages, 2, replied=True) is None
    found: Callable[[int], Any] = lambda held: cut(template, messages, held)  # noqa: E731
    assert [one.text for one in found(1)] == [f"[{said}]", ">"]


def test_how_pictures_are_cut_is_part_of_a_conversation() -> None:
    processor: Any = SimpleNamespace(rule=lambda count: f"rule of {count}")
    shown = Message("user", (Part("image", url="x", digest="d"), Part("text", "what?")))
    work: Any = SimpleNamespace(base_key="k", messages=[shown])
    lookup = ConversationLookup(SimpleNamespace(processor=processor), work, None, None)  # type: ignore[arg-type]
    assert lookup._keys == prompts.chain("k", [shown], "rule of 1")
    assert lookup._keys != prompts.chain("k", [shown], None)


def test_who_said_a_message_is_part_of_it(server: Server) -> None:
    """The same texts as [user, user] and as [system, user] are two conversations."""
    texts = (f"one of two roles. {LONG}", QUESTION)

    def asked_as(role: str) -> int:
        messages = [{"role": role, "content": texts[0]}, {"role": "user", "content": texts[1]}]
        return usage(server.chat(*messages))["mmkv"]["resumed"]

    assert asked_as("user") == 0
    assert asked_as("system") == 0
    assert asked_as("system") > 0 and asked_as("user") > 0


def test_how_a_video_is_sampled_is_part_of_it(
    server: Server, tmp_path_factory: pytest.TempPathFactory
) -> None:
    pytest.importorskip("av", reason="videos need PyAV")
    clip = write_clip(tmp_path_factory.mktemp("clips") / "steps.mp4").read_bytes()
    url = f"data:video/mp4;base64,{base64.b64encode(clip).decode()}"

    def watched(fps: float) -> tuple[int, int]:
        part = {"type": "video_url", "video_url": {"url": url, "fps": fps}}
        said = [part, {"type": "text", "text": QUESTION}]
        found = usage(server.chat(SYSTEM, {"role": "user", "content": said}))
        return found["mmkv"]["resumed"], found["prompt_tokens"]

    first, few = watched(1)
    after, more = watched(2)
    # The system message is shared, and nothing of the video.
    again = usage(server.chat(SYSTEM, "else?"))["mmkv"]["resumed"]
    assert first in (0, again) and after == again < few < more
    assert watched(1)[0] > again and watched(2)[0] > again


def test_numbers_of_a_resumed_request_with_two_replies(folder: Path) -> None:
    """By hand: what two copies hold and have dropped counts twice, the prompt once."""
    new = 6
    with serving(lambda: load(folder)) as made:
        rows, ends = made.inside(lambda core: (core.engine.spec.rows, core.engine.eos_token_ids))
        fields = {"max_tokens": new, "logit_bias": {str(one): -100 for one in ends}}

        def evicted_so_far() -> float:
            lines = made.client.get("/metrics").text.splitlines()
            named = [line for line in lines if line.startswith("mmkv_entries_evicted_total{")]
            return sum(float(line.rpartition(" ")[2]) for line in named)

        prompt = usage(made.chat(SYSTEM, QUESTION, max_tokens=1))["prompt_tokens"]
        held = made.inside(
            lambda core: {
                one.live.seen: one.live.memory().entries
                for one in core.prefix_cache._found.values()
            }
        )
        for count in (1, 2):
            before = evicted_so_far()
            found = usage(made.chat(SYSTEM, QUESTION, n=count, **fields))
            own = found["mmkv"]
            assert 0 < own["resumed"] < prompt
            assert found["prompt_tokens"] == prompt
            assert found["completion_tokens"] == count * new
            assert found["total_tokens"] == prompt + count * new, "resumed ones are among them"
            # The last token of a reply is drawn and not read.
            seen = rows * (prompt + new - 1)
            assert own["kept"] + own["evicted"] == count * seen
            gone_before = rows * own["resumed"] - held[own["resumed"]]
            assert gone_before > 0
            assert evicted_so_far() - before == own["evicted"] - count * gone_before


# Conversations whose earlier messages are shown in another way later, over HTTP.
#
# Right values: the tokens that transformers' ``apply_chat_template`` and processors make of them.


TOKENIZER = byte_tokenizer()
REPLY = "<think>thought, thought, thought</think>y"


@pytest.fixture(scope="module")
def rewritten_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"), THOUGHTS)


def rewritten_load(folder: Path, budget: int) -> Engine:
    return Engine.from_pretrained(
        folder, policy="streamingllm", budget=budget, dtype="float32", kv_limit=8 * 2**20
    )


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the model says next, a reply after the other; and what each prompt came to."""
    queue: list[str] = []
    spelled: list[int] = []

    def draw(*_: Any) -> int:
        if not spelled:
            text = queue.pop(0)
            spelled.extend([*TOKENIZER(text)["input_ids"], TOKENIZER.eos_token_id])
        return spelled.pop(0)

    monkeypatch.setattr(Sampler, "draw", draw)
    return queue


def rendered(*texts: str) -> list[int]:
    talk = [
        {"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)
    ]
    return TOKENIZER.apply_chat_template(talk, chat_template=THOUGHTS, add_generation_prompt=True)[
        "input_ids"
    ]


def test_under_eviction_usage_and_memory_say_what_was_lost(
    rewritten_folder: Path, says: list[str], tmp_path: Path
) -> None:
    with serving(lambda: rewritten_load(rewritten_folder, 24), session_folder=tmp_path) as server:
        says += [REPLY, "z", REPLY, "z"]
        name = server.client.post("/v1/sessions", json={}).json()["id"]
        for text in ("a question of some length", "b?"):
            made = server.client.post(
                f"/v1/sessions/{name}/chat/completions",
                json={
                    "model": "small",
                    "messages": [{"role": "user", "content": text}],
                    "max_tokens": 60,
                },
            )
        used = made.json()["usage"]
        assert "were read again" in used["mmkv"]["differs"]
        assert used["prompt_tokens"] == len(rendered("a question of some length", REPLY, "b?"))
        memory = server.client.get(f"/v1/sessions/{name}/memory").json()
        assert memory["differs"] == used["mmkv"]["differs"]
        # A chat has its messages: it reads them afresh, and nothing differs.
        server.chat("another question of some length", max_tokens=60)
        again = server.chat("another question of some length", REPLY, "b?", max_tokens=60)
        used = again.json()["usage"]
        assert used["mmkv"]["differs"] is None
        wanted = len(rendered("another question of some length", REPLY, "b?"))
        assert used["prompt_tokens"] == wanted
