"""A conversation in memory and in its file: the session itself, copies, and what is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmkv import Engine
from mmkv.engine.errors import SessionError
from mmkv.scheduler.conversation import CachedConversation
from tests.support.replies import REPLY
from tests.support.sessions import assert_same_rows


def test_copies_are_what_the_session_was_wherever_it_lies(engine: Engine, tmp_path: Path) -> None:
    held = CachedConversation(engine, folder=tmp_path)
    assert not held.resident and held.pages == 0
    list(held.wake().send("first", sampling=REPLY))
    with engine.session() as reference:
        list(reference.send("first", sampling=REPLY))
        pages = held.pages
        for resident in (True, False, False):  # a copy leaves the file where it is
            assert held.resident == resident
            with held.fork() as copy:
                list(copy.send("second", sampling=REPLY))
            with held.fork() as copy:
                assert_same_rows(copy, reference)
            held.hibernate()
            assert held.pages == pages
        assert [path.name for path in tmp_path.iterdir()] == [held.path and held.path.name]
        assert_same_rows(held.wake(), reference)
    assert held.resident and not list(tmp_path.iterdir())
    held.close()


def test_a_conversation_whose_file_is_removed_is_lost(engine: Engine, tmp_path: Path) -> None:
    held = CachedConversation(engine, folder=tmp_path)
    list(held.wake().send("first", sampling=REPLY))
    held.hibernate()
    assert held.path is not None and not held.lost
    held.path.write_bytes(b"no session")
    with pytest.raises(SessionError) as damaged:
        held.fork()
    assert str(tmp_path) not in str(damaged.value)
    held.path.unlink()
    assert held.lost
    with pytest.raises(SessionError, match="begin a new one"):
        held.fork()
    held.close()


def test_without_a_folder_it_stays_in_memory(engine: Engine) -> None:
    held = CachedConversation(engine)
    held.wake()
    with pytest.raises(SessionError, match="name one"):
        held.hibernate()
    assert held.resident
    held.close()
