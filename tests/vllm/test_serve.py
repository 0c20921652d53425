"""``vllm serve`` with mmkv's settings, asked by the openai package."""

from __future__ import annotations

import base64
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

import pytest

from mmkv.resources import asset, bundled_model
from tests.vllm import reads_pictures

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")
pytestmark = reads_pictures
ENVIRONMENT = {
    **os.environ,
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
}


def command(settings: dict[str, object], *more: str) -> list[str]:
    return [
        sys.executable,  # `vllm serve`, whose script looks for a package that vllm-cpu is not
        "-m",
        "vllm.entrypoints.openai.api_server",
        f"--model={bundled_model()}",
        "--dtype=float32",
        "--enforce-eager",
        "--max-model-len=2048",
        "--max-num-batched-tokens=256",
        "--block-size=16",
        f"--additional-config={json.dumps({'mmkv': settings})}",
        *more,
    ]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("serve") / "log"
    given = command(
        {"budget": 48}, "--host=127.0.0.1", f"--port={port}", "--served-model-name=tiny"
    )
    with log.open("w") as out:
        server = subprocess.Popen(given, env=ENVIRONMENT, stdout=out, stderr=out)
    try:
        until = time.monotonic() + 300
        while time.monotonic() < until and server.poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.5)
        else:
            pytest.fail(log.read_text()[-3000:])
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(60)


def test_the_openai_package_asks_about_a_picture(address: str) -> None:
    import openai

    picture = base64.b64encode(asset("scene.png").read_bytes()).decode()
    content = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}},
        {"type": "text", "text": "what is at row 2, column 3?"},
    ]
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none") as client:
        reply = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": content}], temperature=0
        )
    assert reply.choices[0].message.content == "frog"


def test_metrics_tell_how_full_the_cache_is(address: str) -> None:
    with urllib.request.urlopen(f"{address}/metrics", timeout=30) as got:
        text = got.read().decode()
    (used,) = re.findall(r"^vllm:kv_cache_usage_perc{.*} (\S+)$", text, re.MULTILINE)
    (blocks,) = re.findall(r'num_gpu_blocks="(\d+)"', text)
    assert float(used) * (int(blocks) - 1) == pytest.approx(16, abs=0.5)  # those of a pass


def test_a_wrong_setting_ends_at_start_and_says_why() -> None:
    ran = subprocess.run(
        command({"budget": 48, "policy": "nosuch"}),
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode
    assert "unknown policy 'nosuch'; choose one of" in ran.stderr + ran.stdout
