"""Conversations whose earlier messages are shown in another way later, over HTTP.

Right values: the tokens that transformers' ``apply_chat_template`` and processors make of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mmkv import Engine
from mmkv.reply import Sampler
from mmkv.server.job import ChatJob
from tests.mmkv.prompt.test_rewritten_turns import THOUGHTS, fresh_inputs
from tests.support.chat_models import (
    byte_tokenizer,
    picture,
    save_llama,
    save_llava_onevision,
)
from tests.support.servers import Server, picture_part, serving

TOKENIZER = byte_tokenizer()
REPLY = "<think>thought, thought, thought</think>y"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"), THOUGHTS)


def load(folder: Path, budget: int) -> Engine:
    return Engine.from_pretrained(
        folder, policy="streamingllm", budget=budget, dtype="float32", kv_limit=8 * 2**20
    )


@pytest.fixture(scope="module")
def roomy(folder: Path) -> Iterator[Server]:
    with serving(lambda: load(folder, 600)) as made:
        yield made


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


class Prompts:
    """The logits behind each prompt, and its tokens as the session says them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[torch.Tensor, list[int]]] = []
        begin = ChatJob._begin_replies

        def watched(job: ChatJob, logits: torch.Tensor) -> None:
            assert job.live is not None and job.live.held.pieces is not None
            ids = [token for piece in job.live.held.pieces for token in piece.ids or ()]
            self.seen.append((logits.clone(), ids))
            begin(job, logits)

        monkeypatch.setattr(ChatJob, "_begin_replies", watched)


def rendered(*texts: str) -> list[int]:
    talk = [
        {"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)
    ]
    return TOKENIZER.apply_chat_template(talk, chat_template=THOUGHTS, add_generation_prompt=True)[
        "input_ids"
    ]


@pytest.mark.parametrize("way", ["chat", "stripped chat", "session", "response"])
def test_a_later_turn_holds_what_a_fresh_rendering_holds(
    roomy: Server, says: list[str], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    prompts = Prompts(monkeypatch)
    # Long enough to be kept apart from its opening, and other words each time.
    first = f"{way}: a question of some length " * 12
    says += [REPLY, "z", "u"]
    shown = "y" if way == "stripped chat" else REPLY
    asked = [first, "b?", "c?"]
    if way.endswith("chat"):
        made = [
            roomy.chat(first, max_tokens=60),
            roomy.chat(first, shown, "b?", max_tokens=60),
            roomy.chat(first, shown, "b?", "z", "c?", max_tokens=60),
        ]
    elif way == "session":
        name = roomy.client.post("/v1/sessions", json={}).json()["id"]
        url = f"/v1/sessions/{name}/chat/completions"
        made = [
            roomy.client.post(
                url,
                json={
                    "model": "small",
                    "messages": [{"role": "user", "content": text}],
                    "max_tokens": 60,
                },
            )
            for text in asked
        ]
    else:
        made = []
        for text in asked:
            before = made[-1].json()["id"] if made else None
            body = {"model": "small", "input": text, "previous_response_id": before}
            made.append(roomy.client.post("/v1/responses", json=body))
    for answer in made:
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["mmkv"]["differs"] is None
    counts = [len(ids) for _, ids in prompts.seen]
    assert [ids for _, ids in prompts.seen] == [
        rendered(first),
        rendered(first, shown, "b?"),
        rendered(first, shown, "b?", "z", "c?"),
    ]
    used = [one.json()["usage"] for one in made]
    assert [one.get("prompt_tokens", one.get("input_tokens")) for one in used] == counts
    assert all(one["mmkv"]["resumed"] > len(first) for one in used[1:])  # it was not read again
    resumed = [one["mmkv"]["resumed"] for one in used[1:]]
    engine = roomy.inside(lambda core: core.engine)

    def exact(ids: list[int]) -> torch.Tensor:
        with engine.session() as fresh:
            return fresh.prefill({"input_ids": torch.tensor([ids])})

    for logits, ids in prompts.seen:
        wanted = roomy.inside(lambda _, ids=ids: exact(ids))
        torch.testing.assert_close(logits, wanted, atol=1e-5, rtol=1e-5)
    assert resumed == sorted(resumed)


def test_thoughts_are_kept_where_a_session_asks_for_it(roomy: Server, says: list[str]) -> None:
    says += [REPLY, "z"]
    name = roomy.client.post("/v1/sessions", json={}).json()["id"]
    for text in ("a?", "b?"):
        made = roomy.client.post(
            f"/v1/sessions/{name}/chat/completions",
            json={
                "model": "small",
                "messages": [{"role": "user", "content": text}],
                "max_tokens": 60,
                "mmkv": {"rewrites": "keep"},
            },
        )
    used = made.json()["usage"]
    assert "as wanted" in used["mmkv"]["differs"]
    kept = len(rendered("a?")) + len(REPLY) + len(rendered("b?")) + 2  # end and line of the reply
    assert used["prompt_tokens"] == kept
    memory = roomy.client.get(f"/v1/sessions/{name}/memory").json()
    assert memory["differs"] == used["mmkv"]["differs"]


def test_under_eviction_usage_and_memory_say_what_was_lost(
    folder: Path, says: list[str], tmp_path: Path
) -> None:
    with serving(lambda: load(folder, 24), session_folder=tmp_path) as server:
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


def test_onevision_reads_pictures_by_how_many_there_are(tmp_path: Path, says: list[str]) -> None:
    says += ["red", "blue", "green", "red", "blue"]
    folder = save_llava_onevision(tmp_path)

    def load() -> Engine:
        return Engine.from_pretrained(
            folder, policy="streamingllm", budget=600, dtype="float32", kv_limit=8 * 2**20
        )

    images = [picture("red", (50, 70)), picture("blue", (90, 40)), picture("green", (30, 30))]
    with serving(load) as server:
        messages: list[Any] = []
        talk: list[Any] = []
        for image in images:
            text = {"type": "text", "text": "what?"}
            messages.append({"role": "user", "content": [picture_part(image), text]})
            talk.append({"role": "user", "content": [{"type": "image", "image": image}, text]})
            made = server.chat(*messages, max_tokens=9).json()
            used = made["usage"]
            assert used["prompt_tokens"] == fresh_inputs(folder, talk)["input_ids"].shape[1]
            assert used["mmkv"]["differs"] is None
            reply = made["choices"][0]["message"]["content"]
            messages.append({"role": "assistant", "content": reply})
            talk.append({"role": "assistant", "content": [{"type": "text", "text": reply}]})
        assert used["mmkv"]["resumed"] > 0  # from the second picture on by one rule
        name = server.client.post("/v1/sessions", json={}).json()["id"]
        for message in messages[0:3:2]:
            made = server.client.post(
                f"/v1/sessions/{name}/chat/completions",
                json={"model": "small", "messages": [message], "max_tokens": 9},
            ).json()
        assert "an earlier picture stays as it was read" in made["usage"]["mmkv"]["differs"]


def test_a_chat_keeps_thoughts_where_it_asks_for_it(roomy: Server, says: list[str]) -> None:
    says += [REPLY, "z", "z"]
    first = "kept: a question of some length"
    roomy.chat(first, max_tokens=60)
    kept = roomy.chat(first, REPLY, "b?", max_tokens=60, mmkv={"rewrites": "keep"})
    used = kept.json()["usage"]
    assert "as wanted" in used["mmkv"]["differs"] and used["mmkv"]["resumed"] > len(REPLY)
    fresh = roomy.chat(first, REPLY, "c?", max_tokens=60, mmkv={"resume": "never"})
    used = fresh.json()["usage"]
    assert used["mmkv"]["differs"] is None
    assert used["prompt_tokens"] == len(rendered(first, REPLY, "c?"))
