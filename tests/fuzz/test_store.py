"""Chats, responses and sessions while the folder of idle memories comes to harm.

Chats and responses are answered as long as sessions leave room, whatever happens to the folder; a
memory that is gone is refused in mmkv's own words.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from tests.fuzz.server import MODEL, Service, check_answer, service
from tests.fuzz.trial import Wrong, examples
from tests.support.chat_models import save_qwen3_vl

_numbers = st.integers(0, 3)


class StoreFaults(RuleBasedStateMachine):
    """A client of a server, and somebody who harms its folder."""

    def __init__(self, server: Service, folder: Path) -> None:
        super().__init__()
        self._server, self._folder = server, folder
        self._names: list[str] = []
        self._sessions: list[str] = []

    def _ask(self, path: str, lost: bool = False, **body: Any) -> Any:
        """Post a body; return the answer's id, None where it is refused as it may be."""
        found: list[httpx.Response] = []

        async def ask(client: httpx.AsyncClient) -> None:
            found.append(await client.post(path, json=body))
            if (await client.get("/health")).status_code != 200:
                raise Wrong("the engine has stopped")

        self._server.run(ask, pages=False)  # that would write to the folder
        (answer,) = found
        check_answer(answer)
        if str(self._folder) in answer.text:
            raise Wrong(f"it says where files lie: {answer.text[:300]}")
        if answer.status_code == 200:
            return answer.json()["id"]
        full = answer.status_code == 503 and self._sessions
        if not full and not (lost and answer.status_code in (400, 409)):
            raise Wrong(f"{path}: {answer.status_code} {answer.text[:200]}")
        return None

    def _delete(self, *paths: str, pages: bool = False) -> None:
        async def delete(client: httpx.AsyncClient) -> None:
            for path in paths:
                check_answer(await client.delete(path))

        self._server.run(delete, pages)

    @rule(number=_numbers, earlier=st.booleans())
    def respond(self, number: int, earlier: bool) -> None:
        body: dict[str, Any] = {"model": MODEL, "input": f"what is {number}?"}
        goes_on = earlier and bool(self._names)
        if goes_on:
            body["previous_response_id"] = self._names[number % len(self._names)]
        if made := self._ask("/v1/responses", goes_on, **body, max_output_tokens=2):
            self._names.append(made)

    @rule(number=_numbers, within=st.booleans())
    def chat(self, number: int, within: bool) -> None:
        said = [{"role": "user", "content": f"what is {number}?"}]
        within = within and bool(self._sessions)
        path = ""
        if within:
            path = f"/sessions/{self._sessions[number % len(self._sessions)]}"
        self._ask(f"/v1{path}/chat/completions", within, model=MODEL, messages=said, max_tokens=2)

    @rule()
    def open_session(self) -> None:
        if made := self._ask("/v1/sessions"):
            self._sessions.append(made)

    @rule()
    def close_session(self) -> None:
        if self._sessions:
            self._delete(f"/v1/sessions/{self._sessions.pop()}")

    @rule()
    def clear(self) -> None:
        if self._folder.is_file():
            self._folder.unlink()

    @rule(blocked=st.booleans())
    def remove(self, blocked: bool) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        if blocked and not self._folder.exists():
            self._folder.write_text("in the way")

    @rule(number=_numbers, gone=st.booleans())
    def damage(self, number: int, gone: bool) -> None:
        if files := sorted(self._folder.glob(".hibernated-*/*.mmkv")):
            file = files[number % len(files)]
            file.unlink() if gone else os.truncate(file, 100 * number)

    def teardown(self) -> None:
        self.clear()
        self._delete(
            *(f"/v1/sessions/{one}" for one in self._sessions),
            *(f"/v1/responses/{one}" for one in self._names),
            pages=True,
        )


@pytest.fixture
def machine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    model, folder = (
        save_qwen3_vl(tmp_path_factory.mktemp("model")),
        tmp_path_factory.mktemp("saved"),
    )
    with service(model, folder, 700 * 2**10) as server:  # an eighth is for pictures' features
        yield lambda: StoreFaults(server, folder)


def test_a_folder_that_comes_to_harm(machine: Callable[[], StoreFaults]) -> None:
    run_state_machine_as_test(machine, settings=examples(3))
