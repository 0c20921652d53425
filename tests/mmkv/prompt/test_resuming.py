"""A conversation's rendering that goes on from an earlier one, beside a rendering of all of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mmkv import Engine, Session
from mmkv.engine.errors import InputError
from mmkv.prompt import sandbox
from mmkv.prompt.special import CUT
from mmkv.prompt.template import ChatTemplate
from mmkv.resources import bundled_model
from tests.mmkv.prompt.test_held import REWRITING, with_template
from tests.support.chat_models import CHATML, LLAVA_TEMPLATE, SMOLVLM_TEMPLATE, save_llama, script
from tests.support.tool_templates import FORMS, HERMES, TOOLS, call, tool_tokenizer

ASSETS = Path(str(bundled_model())).parent
OPENS = "{% if add_generation_prompt %}A:{% endif %}"
TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}" + OPENS
# In the ways of published families: what each does beside writing one message behind the other.
QWEN2_VL = (
    "{% set pictures = namespace(value=0) %}{% for m in messages %}"
    "{% if loop.first and m.role != 'system' %}<|im_start|>system\nBe.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}"
    "{% set pictures.value = pictures.value + 1 %}"
    "{% if add_vision_id %}Picture {{ pictures.value }}: {% endif %}<|image_pad|>"
    "{% elif p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN3_VL = (
    "{% if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}"
    "{{ messages[0].content[0].text }}{% endif %}{% for t in tools %}{{ t | tojson }}{% endfor %}"
    "<|im_end|>\n{% elif messages[0].role == 'system' %}S{{ messages[0].content[0].text }}"
    "{% endif %}{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or (messages[loop.index0 - 1].role != 'tool') %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{% for p in m.content %}{{ p.text or p.type }}{% endfor %}"
    "{% if loop.last or (messages[loop.index0 + 1].role != 'tool') %}<|im_end|>\n{% endif %}"
    "{% elif m.role != 'system' %}<|im_start|>{{ m.role }}\n"
    "{% for p in m.content %}{{ p.text or '<|image_pad|>' }}{% endfor %}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN3 = (
    "{% set ns = namespace(looking=true, last=messages | length - 1) %}"
    "{% for m in messages[::-1] %}{% set at = (messages | length - 1) - loop.index0 %}"
    "{% if ns.looking and m.role == 'user' %}"
    "{% set ns.looking = false %}{% set ns.last = at %}{% endif %}{% endfor %}"
    "{% for m in messages %}[{{ m.role }}{{ m.content }}"
    "{% if loop.index0 > ns.last and m.role == 'assistant' %}thought{% endif %}]{% endfor %}"
)
GEMMA = (
    "{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}"
    "{% endif %}{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('in turn') }}{% endif %}"
    "<{{ m.role }}>{{ first if loop.first else '' }}{{ m.content | trim }}\n{% endfor %}" + OPENS
)
LLAMA = (
    "{% if strftime_now is defined %}{% set day = strftime_now('%Y') %}{% endif %}"
    "{% if messages[0].role == 'system' %}{% set said = messages[0].content %}"
    "{% set messages = messages[1:] %}{% else %}{% set said = '' %}{% endif %}"
    "Today: {{ day }}{{ said }}{% for m in messages %}"
    "{% if m.role == 'tool' %}ipython{{ m.content }}{% elif m.tool_calls %}"
    "{{ m.tool_calls[0].function | tojson }}{% else %}[{{ m.role }}]{{ m.content }}{% endif %}"
    "{% endfor %}" + OPENS
)
CHECKED = (
    "{% set ns = namespace(index=0) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.index = ns.index + 1 %}{% endif %}{% endfor %}"
    "{{ 'many' if ns.index > 99 }}" + TURNS
)
PREVIOUS = (
    "{% for m in messages %}{{ loop.previtem.role if loop.previtem is defined else '-' }}"
    ">{{ m.role }}{{ loop.index }}{{ m.content }}{{ loop.depth }}{% endfor %}" + OPENS
)
NUMBERED = (
    "{% set ns = namespace(n=0, last='') %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{{ ns.n }}{{ ns.last }}{{ m.content }}{% set ns.last = m.content[:3] %}{% endfor %}"
    "{{ ns.n }} in all"
)
FOLLOWED = {
    "chatml": CHATML,
    "llava": LLAVA_TEMPLATE,
    "smolvlm": SMOLVLM_TEMPLATE,
    "bundled": (ASSETS / "tiny-vlm" / "chat_template.jinja").read_text(),
    "eyes": (ASSETS / "smollm2-llava" / "chat_template.jinja").read_text(),
    "qwen2-vl": QWEN2_VL,
    "qwen3-vl": QWEN3_VL,
    "gemma": GEMMA,
    "llama": LLAMA,
    "previous": PREVIOUS,
    "numbered": NUMBERED,
    "trimmed": REWRITING["trimmed"],
    "qwen xml": FORMS["qwen_xml"],
}
# What cannot be gone on from, or could be wrongly by who does not look at all that is read.
BODY = "{{ m.role }}{{ m.content }};{% endfor %}"
LOOP = "{% for m in messages %}"
OTHERS = {
    **{f"form {name}": source for name, source in FORMS.items()},
    **REWRITING,
    "qwen3": QWEN3,
    "turns counted ahead": CHECKED,
    "what the clock says ahead": "{{ strftime_now('%S') }}" + TURNS,
    "length in a round": f"{LOOP}{{{{ messages | length }}}}{BODY}",
    "length of the loop": f"{LOOP}{{{{ loop.length }}}}{BODY}",
    "rounds left": f"{LOOP}{{{{ 'near' if loop.revindex < 4 }}}}{BODY}",
    "the last differs": f"{LOOP}{{{{ '' if loop.last else '|' }}}}{BODY}",
    "what comes next": f"{LOOP}{{{{ loop.nextitem.content if loop.nextitem }}}}{BODY}",
    "two ahead": f"{LOOP}{{{{ messages[loop.index0 + 2].content }}}}{BODY}",
    "the last message": f"{LOOP}{{{{ messages[-1].content }}}}{BODY}",
    "the last by a filter": f"{LOOP}{{{{ (messages | last).content }}}}{BODY}",
    "the fourth": f"{LOOP}{{{{ messages[4].content }}}}{BODY}",
    "from the fourth": f"{LOOP}{{{{ 'long' if messages[4:] }}}}{BODY}",
    "any": "{% if 'e' in messages | map(attribute='content') | join %}E{% endif %}" + TURNS,
    "any in a round": f"{LOOP}{{{{ messages | map(attribute='role') | list | length }}}}{BODY}",
    "a loop in a round": f"{LOOP}{{% for o in messages %}}{{{{ o.role[0] }}}}{{% endfor %}}{BODY}",
    "of the last user": "{% set q = (messages | selectattr('role', 'eq', 'user') | list)[-1] %}"
    f"{LOOP}{{{{ 'here' if m == q }}}}{BODY}",
    "two loops that write": TURNS + TURNS,
    "the same twice": "{% for m in messages %}x{% endfor %}{% for m in messages %}x{% endfor %}",
    "the other loop": "{% if messages | length > 5 %}" + TURNS + "{% else %}{% for m in messages %}"
    "{{ m.content }}{% endfor %}{% endif %}",
    "no second loop": "{% set ns = namespace(n=0) %}{% for m in messages %}"
    "{% set ns.n = ns.n + 1 %}{% endfor %}{% if ns.n > 5 %}many{% else %}" + TURNS + "{% endif %}",
    "break": "{% for m in messages %}{% if loop.index > 3 %}{% break %}{% endif %}{{ m.content }}"
    "{% endfor %}" + TURNS,
    "filtered": "{% for m in messages if m.role == 'user' %}{{ loop.index }}{{ m.content }}"
    "{% endfor %}",
    "backwards": "{% for m in messages | reverse %}{{ m.content }}{% endfor %}",
    "all but the last": "{% for m in messages[:-1] %}{{ m.content }}{% endfor %}|"
    "{{ messages[-1].role }}",
    "another macro": "{% if messages | length > 4 %}{% macro f() %}A{% endmacro %}{% else %}"
    "{% macro f() %}B{% endmacro %}{% endif %}" + f"{LOOP}{{{{ f() }}}}{BODY}",
    "with": "{% with c = namespace(n=0) %}{% for m in messages %}{% set c.n = c.n + 1 %}{{ c.n }}"
    "{{ m.content }}{% endfor %}{% endwith %}",
    "in a macro": "{% macro all() %}" + TURNS + "{% endmacro %}{{ all() }}{{ all() }}",
    "in a text": "{% set said %}" + TURNS + "{% endset %}{{ said }}{{ said | length }}",
    "a list that grows": "{% set ns = namespace(seen=[]) %}{% for m in messages %}"
    "{% set ns.seen = ns.seen + [m.content] %}{{ m.content }}{{ ns.seen | length }}{% endfor %}",
    "a text that grows": "{% set ns = namespace(all='') %}{% for m in messages %}"
    "{% set ns.all = ns.all ~ m.content %}{% endfor %}{{ ns.all }}",
    "a generator": "{% set g = messages | map(attribute='content') %}{% for m in messages %}"
    "{{ g | first }}{{ m.content }};{% endfor %}",
    "a namespace in a list": "{% set spaces = [namespace(n=0)] %}{% set s = spaces[0] %}"
    "{% for m in messages %}{% set s.n = s.n + 1 %}{{ s.n }}{{ m.content }}{% endfor %}",
    "messages in a namespace": "{% set ns = namespace(all=messages) %}{% for m in messages %}"
    "{{ ns.all | length }}{{ m.content }}{% endfor %}",
    "cycle": f"{LOOP}{{{{ loop.cycle('a', 'b', 'c') }}}}{BODY}",
    "cycler": "{% set c = cycler('a', 'b', 'c') %}" + f"{LOOP}{{{{ c.next() }}}}{BODY}",
    "joiner": "{% set j = joiner('|') %}" + f"{LOOP}{{{{ j() }}}}{BODY}",
    "changed": f"{LOOP}{{{{ 'new' if loop.changed(m.role) }}}}{BODY}",
    "another name": f"{LOOP}{{% set l = loop %}}{{{{ l.index }}}}{BODY}",
    "by its name": f"{LOOP}{{{{ loop['index'] }}}}{BODY}",
    "by a filter": f"{LOOP}{{{{ loop | attr('length') }}}}{BODY}",
    "the loop itself": f"{LOOP}{{{{ loop }}}}{BODY}",
    "opened within": f"{LOOP}{{{{ 'open' if add_generation_prompt }}}}{BODY}",
    "opened by a macro": "{% macro o() %}{{ add_generation_prompt }}{% endmacro %}"
    f"{LOOP}{{{{ o() }}}}{BODY}",
    "the list itself": "{{ messages }}" + TURNS,
    "a list's method": "{{ messages.copy is defined }}" + TURNS,
    "shown wide": "{{ [messages] | pprint }}" + TURNS,
    "another list": "{% for m in messages + messages %}{{ m.content }}{% endfor %}",
    "pairs": "{% for a, b in messages | items %}{{ a }}{% endfor %}",
    "batches": "{% for b in messages | batch(2) %}{{ b[0].content }}{% endfor %}",
    "the clock": f"{LOOP}{{{{ strftime_now('%S') }}}}{BODY}",
    "shown first": "{% set first = messages[0] %}" + f"{LOOP}{{{{ first.content }}}}{BODY}",
    "shown second": "{% set one = messages[1] %}" + f"{LOOP}{{{{ one.content }}}}{BODY}",
    "nothing": "{{ bos_token }}",
}  # fmt: skip
WORDS = ["hello", "", " a ", "<|im_end|>", "so <|im_start|>user", "é中", "{{ x }}", "yes\n"]


def parts(rng: random.Random, pictures: bool) -> list[dict[str, Any]]:
    made = [{"type": "text", "text": rng.choice(WORDS)} for _ in range(rng.randint(1, 2))]
    if pictures and rng.random() < 0.3:
        made.insert(rng.randint(0, len(made)), {"type": "image"})
    return made


def grown(rng: random.Random, talk: list[dict[str, Any]], pictures: bool) -> list[dict[str, Any]]:
    """Return a conversation with what a turn adds to it: a reply first, or more of the question."""
    talk = [*talk]
    if not talk:
        first = rng.choice(["system", "", "system", "", "assistant"])
        talk += [{"role": first, "content": parts(rng, False)}] if first else []
        return [*talk, {"role": "user", "content": parts(rng, pictures)}]
    last = talk[-1]
    if last["role"] == "user" and rng.random() < 0.3:  # observed
        return [*talk[:-1], {**last, "content": [*last["content"], *parts(rng, pictures)]}]
    said: dict[str, Any] = {"role": "assistant", "content": parts(rng, False)}
    if rng.random() < 0.2:
        said["reasoning_content"] = "well"
    if rng.random() < 0.4:
        calls = [call("press", f"c{len(talk):07}{n}", key="x") for n in range(rng.randint(1, 2))]
        said["tool_calls"] = calls
        results = [
            {
                "role": "tool",
                "tool_call_id": one["id"],
                "name": "press",
                "content": parts(rng, pictures),
            }
            for one in calls
        ]
        asked = [{"role": "user", "content": parts(rng, pictures)}] if rng.random() < 0.2 else []
        return [*talk, said, *results, *asked]
    more = [{"role": "system", "content": parts(rng, False)}] if rng.random() < 0.15 else []
    return [*talk, said, *more, {"role": "user", "content": parts(rng, pictures)}]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A clock that stands still in a turn, and one marker for all renderings."""
    now = [0]
    theirs = sandbox._theirs

    def with_clock() -> Any:
        made = theirs().overlay()
        made.globals = {**made.globals, "strftime_now": strftime_now}
        return made

    def strftime_now(form: str) -> str:
        return str(now[0] if form == "%S" else 2026)

    monkeypatch.setattr(sandbox, "_theirs", with_clock)
    monkeypatch.setattr("mmkv.prompt.template.new_marker", lambda: "0123456789abcdef" * 2)
    sandbox._compiled.cache_clear()
    yield now
    sandbox._compiled.cache_clear()


def shown(render: Callable[..., Any], *given: Any) -> Any:
    """Return what is rendered, or how that fails."""
    try:
        return render(*given)
    except InputError as error:
        return str(error)


def compared(source: str, seed: int, turns: int, clock: list[int]) -> tuple[int, int]:
    """Let a conversation grow; count its renderings, and those that went on from an earlier one."""
    rng = random.Random(seed)
    pictures, tooled = "image" in source, rng.random() < 0.5
    tokenizer = tool_tokenizer(HERMES)
    values = {"add_vision_id": True} if "add_vision_id" in source and rng.random() < 0.5 else {}

    def made() -> ChatTemplate:
        template = ChatTemplate(tokenizer, source, pictures or source is QWEN3_VL)
        return template.with_values(values).with_tools(TOOLS if tooled else [])

    template, checkpoint, before = made(), None, ""
    talk: list[dict[str, Any]] = []
    count = went_on = 0
    for turn in range(turns):
        clock[0] = turn
        talk = grown(rng, talk, pictures)
        ends = talk[-1]["role"] != "user" or rng.random() < 0.6
        now = template.with_prefix("So" if ends and rng.random() < 0.1 else "")
        fresh = made().with_prefix(now.prefix)
        whole = shown(fresh.render if ends else fresh.render_open, talk, *[True] * ends)
        found = shown(now.go_on, talk, ends, checkpoint)
        if isinstance(found, str):
            assert found == whole
            continue
        count += 1
        went_on += found.after is not None
        # Behind the same number of characters it is the same, cuts and all.
        assert whole.endswith(found.text) and len(whole.replace(CUT, "")) == found.length
        # What stands before is what was read.
        assert found.after is None or whole.replace(CUT, "").startswith(before)
        checkpoint = found.checkpoint
        before = whole.replace(CUT, "")[: checkpoint.length] if checkpoint else ""
    return count, went_on


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_family_goes_on_from_the_turn_before(name: str, clock: list[int]) -> None:
    found = [compared(FOLLOWED[name], seed, 8, clock) for seed in range(3)]
    assert sum(one for _, one in found) > 0.5 * sum(count for count, _ in found)


@pytest.mark.parametrize("name", OTHERS)
def test_no_template_shows_another_text(name: str, clock: list[int]) -> None:
    for seed in range(2):
        compared(OTHERS[name], seed, 8, clock)


def says(role: str, words: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": words}], **more}


ASKED, SAID = says("user", "what?"), says("assistant", "this")
IN_TURN = (
    "{% for m in messages %}{% if m.role == 'system' or loop.previtem.role == m.role %}"
    "{{ raise_exception('no') }}{% endif %}" + BODY
).replace("or loop", "or not loop.first and loop")
RESULTS = (
    "{{ tools | tojson }}{% for m in messages %}{{ m.role }}{% for p in m.content %}"
    "{{ p.text or '<|image_pad|>' if m.role != 'tool' else p.text }}{% endfor %}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %};{% endfor %}"
)
SHOT = {**says("tool", "seen", tool_call_id="one", name="press")}
SHOT["content"] = [*SHOT["content"], {"type": "image"}]


@pytest.mark.parametrize(
    "source, before, more",
    [
        # Tools in words go into the system's message, which comes late.
        (CHATML, [ASKED, SAID, ASKED], [SAID, says("system", "be"), ASKED]),
        # And into the first question, which is not the first message.
        (IN_TURN, [SAID, ASKED], [SAID, ASKED]),
        # A picture among results moves behind the last of them.
        (
            RESULTS,
            [
                ASKED,
                {**SAID, "tool_calls": [call("press", "one"), call("press", "two")]},
                SHOT,
                says("tool", "none", tool_call_id="two", name="press"),
            ],
            [SAID, ASKED],
        ),
    ],
)
def test_what_is_put_elsewhere_is_not_lost(
    source: str, before: list[dict[str, Any]], more: list[dict[str, Any]]
) -> None:
    tokenizer = tool_tokenizer(HERMES)
    template = ChatTemplate(tokenizer, source, source is RESULTS).with_tools(TOOLS)
    checkpoint = template.go_on(before, True, None).checkpoint
    whole = template.render([*before, *more], True)
    found = template.go_on([*before, *more], True, checkpoint)
    assert whole.endswith(found.text) and len(whole.replace(CUT, "")) == found.length


def test_chance_is_not_gone_on_from() -> None:
    source = "{% for m in messages %}{{ 'ab' | random }}{{ m.content }}{% endfor %}"
    template = ChatTemplate(tool_tokenizer(HERMES), source, False)
    assert template.go_on([ASKED, SAID, ASKED], True, None).checkpoint is None


@pytest.mark.long("more conversations, of 40 turns")
@pytest.mark.parametrize("name", [*FOLLOWED, *OTHERS])
def test_long_conversations(name: str, clock: list[int]) -> None:
    for seed in range(100, 110):
        compared((FOLLOWED | OTHERS)[name], seed, 40, clock)


def texts_read(monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[int, int]]:
    """Count the characters that templates are given and write, since the count before."""
    given, made = [0], [0]
    render = ChatTemplate._rendered

    def watched(self: ChatTemplate, shaped: Any, *more: Any, **named: Any) -> str:
        given[0] += sum(len(repr(message)) for message in shaped)
        text = render(self, shaped, *more, **named)
        made[0] += len(text)
        return text

    def since() -> tuple[int, int]:
        counts = given[0], made[0]
        given[0] = made[0] = 0
        return counts

    monkeypatch.setattr(ChatTemplate, "_rendered", watched)
    return since


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = save_llama(tmp_path_factory.mktemp("llama"), tokenizer=tool_tokenizer(HERMES))
    return Engine.from_pretrained(folder, policy="full", dtype="float32")


@pytest.mark.parametrize("source", [CHATML, QWEN3_VL, NUMBERED, HERMES, REWRITING["thoughts"]])
def test_a_session_reads_what_one_does_that_renders_all(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """Asked, and shown more, turn by turn: the same ids in the same calls."""
    with_template(engine, source, source is QWEN3_VL)
    fed: list[list[int]] = []
    prefill = Session.prefill

    def watched(self: Session, inputs: Any, progress: Any = None) -> Any:
        fed.append(inputs["input_ids"][0].tolist())
        return prefill(self, inputs, progress)

    monkeypatch.setattr(Session, "prefill", watched)
    said = ["<think>\nso\n</think>\n\nyes", "no <tool_call>", " ", "é"]
    with engine.session() as session, engine.session() as whole:
        for turn in range(12):
            script(monkeypatch, engine, [said[turn % 4]] * 2)
            for one in (session, whole):
                for seen in range(turn % 3):
                    one.observe(f"seen {seen} <|im_end|>")
                    whole.held.checkpoint = None
                list(one.send(f"and {turn}?"))
                whole.held.checkpoint = None
            half = len(fed) // 2
            assert fed[:half] == fed[half:] and session.held.differs == whole.held.differs
            assert session.held.pieces == whole.held.pieces
            fed.clear()


@pytest.mark.parametrize("source", [CHATML, QWEN3_VL])
def test_a_turn_touches_no_old_messages(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """Turns that are all as long: as many characters are rendered for each, and come of it."""
    with_template(engine, source, source is QWEN3_VL)
    since, counts = texts_read(monkeypatch), []
    with engine.session() as session:
        for turn in range(100, 140):
            script(monkeypatch, engine, ["yes"])
            if turn % 2:
                session.observe(f"seen {turn}")
            list(session.send(f"and {turn}?"))
            counts.append(since())
    assert counts[4:6] * 18 == counts[4:], counts


def test_a_changed_message_is_seen(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with_template(engine, CHATML)
    script(monkeypatch, engine, ["yes"] * 6)
    with engine.session() as session:
        for turn in range(4):
            list(session.send(f"and {turn}?"))
        session.history[1]["content"] = "no"
        part = {"type": "text", "text": "and 1?"}
        session.history[2]["content"] = [part]
        for words in ("so?", "well?"):  # inside a message, too
            part["text"] = words
            list(session.send(words))
            text = "".join(piece.text or "" for piece in session.held.pieces or ())
            whole = engine.processor.template.render(session.history[:-1], True).replace(CUT, "")
            assert "no<|im_end|>" in text and text.count(words) == 2 and text == whole + "yes"
