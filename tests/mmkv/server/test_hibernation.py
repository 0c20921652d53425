"""What a killed server left in its folder goes with the next start, and nothing else does."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mmkv import Engine
from mmkv.engine.errors import SessionError
from mmkv.sampling import Sampling
from mmkv.server.job import ChatWork
from mmkv.server.store import HibernationFolder
from tests.support.chat_models import save_qwen3_vl
from tests.support.servers import MODEL, Server, asked, serving

CHILD = """
import pathlib, sys
from mmkv.server.store import HibernationFolder
made = HibernationFolder(pathlib.Path(sys.argv[1]))
(made.path / "memory.mmkv").write_text("idle")
print(made.path, flush=True)
sys.stdin.read()
"""


def test_what_a_killed_server_left_goes_with_the_next_start(tmp_path: Path) -> None:
    here = HibernationFolder(tmp_path)
    saved = tmp_path / "public"
    saved.mkdir()
    (tmp_path / ".hibernated-link").symlink_to(saved)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stdout is not None
        other = Path(child.stdout.readline().strip())
        assert other.is_dir() and other != here.path and here.path.is_dir()
        HibernationFolder(tmp_path).close()
        assert (other / "memory.mmkv").exists(), "of a server that lives"
        child.send_signal(signal.SIGKILL)
    third = HibernationFolder(tmp_path)
    assert not other.exists() and here.path.is_dir() and saved.is_dir()
    for one in (third, here):
        one.close()
        assert not one.path.exists()


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SessionError, match="name another --session-folder"):
        HibernationFolder(tmp_path / "file")


def test_a_folder_that_is_gone_is_made_anew_and_stays_ours(tmp_path: Path) -> None:
    here = HibernationFolder(tmp_path / "within")
    for _ in range(2):
        shutil.rmtree(tmp_path / "within")
        with here.writing():
            (here.path / "memory.mmkv").write_text("idle")
    found = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path / "within")],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout and (here.path / "memory.mmkv").exists(), "another one took it for nobody's"
    here.close()
    assert not here.path.exists()


@pytest.fixture
def small(tmp_path: Path) -> Any:
    """Return what loads an engine with room for a request and a few idle memories."""
    folder = save_qwen3_vl(tmp_path / "model")

    def load(**fields: Any) -> Engine:
        options = {
            "policy": "streamingllm",
            "budget": 24,
            "dtype": "float32",
            "prefill_chunk": 16,
        } | fields
        return Engine.from_pretrained(folder, **options)

    with serving(load) as measured:
        pages = measured.inside(
            lambda core: core.job(ChatWork([], "", Sampling()), lambda: None).reservation().total
        )
        size = measured.inside(lambda core: core.engine.cache.pool.page_bytes)
    return lambda: load(kv_limit=3 * pages * size)


def respond(server: Server, **fields: Any) -> Any:
    body = {"model": MODEL, "input": "what is red?", "max_output_tokens": 2, "temperature": 0}
    return server.client.post("/v1/responses", json=body | fields)


def stands(server: Server, name: str) -> bool:
    return server.client.get(f"/v1/responses/{name}").status_code == 200


def test_stored_responses_make_way_where_they_cannot_be_written(
    small: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The folder is gone and something else stands there: nobody is locked out."""
    place = tmp_path / "sessions"
    with serving(small, session_folder=place, snapshot_bytes=0) as server:
        session = server.client.post("/v1/sessions", json={}).json()["id"]
        turn = f"/v1/sessions/{session}/chat/completions"
        assert server.client.post(turn, json=asked("hello")).status_code == 200
        shutil.rmtree(place)
        place.write_text("in the way")
        names = [respond(server).json()["id"] for _ in range(14)]
        standing = [name for name in names if stands(server, name)]
        assert standing and standing == names[-len(standing) :] and len(standing) < len(names)
        again = respond(server, previous_response_id=names[0])
        assert again.status_code == 400
        assert again.json()["error"]["code"] == "previous_response_not_found"
        after = respond(server, previous_response_id=names[-1])
        assert after.status_code == 200, after.text
        for _ in range(3):
            assert server.chat("what?").status_code == 200
        (said,) = server.client.get("/health").json()["warnings"]
        assert "moved to files" in said and str(tmp_path) not in said
        assert [one.levelname for one in caplog.records if one.name == "mmkv.server"] == ["ERROR"]
        assert server.client.post(turn, json=asked("again")).status_code == 200, "a session stays"
        place.unlink()
        names = [respond(server).json()["id"] for _ in range(14)]
        assert all(stands(server, name) for name in names)
        assert server.client.get("/health").json() == {"status": "ok"}
        shutil.rmtree(place)  # what lay there is gone, and is not claimed to stand
        assert 0 < sum(stands(server, name) for name in names) < len(names)
        assert server.chat("what?").status_code == 200
