"""Serve the bundled model, ask it about a picture as OpenAI's clients do, and stop it.

Run: python examples/serve.py [PORT]
Prints the streamed answers to two questions, "frog" the first, and the usage of each: the second
reads its own question alone.
Needs: pip install 'mmkv[serve]'; the package openai is used if it is there.
"""

import base64
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx

from mmkv.resources import asset

QUESTIONS = ("what is at row 2, column 3?", "what is at row 1, column 1?")


def events(url: str, messages: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the events of a streamed reply as OpenAI's API describes them."""
    asked = {"model": "tiny-vlm", "messages": messages, "temperature": 0, "stream": True}
    asked["stream_options"] = {"include_usage": True}
    try:
        from openai import OpenAI
    except ImportError:
        with httpx.stream("POST", f"{url}/chat/completions", json=asked, timeout=60) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line.removeprefix("data: "))
        return
    client = OpenAI(base_url=url, api_key="none")
    for event in client.chat.completions.create(**asked):  # type: ignore[call-overload]
        yield event.model_dump()


def main() -> None:
    """Start the server, ask, and stop it."""
    port = sys.argv[1] if len(sys.argv) > 1 else "8377"
    command = [sys.executable, "-m", "mmkv", "serve", "--port", port, "--budget", "64", "--memory"]
    server = subprocess.Popen([*command, "64MiB"])
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(server, f"{url}/health")
        picture = base64.b64encode(asset("scene.png").read_bytes()).decode()
        shown = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}
        messages: list[dict[str, Any]] = []
        for question in QUESTIONS:
            parts = [*([] if messages else [shown]), {"type": "text", "text": question}]
            messages.append({"role": "user", "content": parts})
            said = ""
            for event in events(f"{url}/v1", messages):
                for choice in event["choices"]:
                    said += choice["delta"].get("content") or ""
                    print(choice["delta"].get("content") or "", end="", flush=True)
                if event.get("usage"):
                    print(f"\n{json.dumps(event['usage'])}")
            messages.append({"role": "assistant", "content": said})
    finally:
        server.send_signal(signal.SIGTERM)
        print(f"the server ended with exit code {server.wait(timeout=60)}")


def wait_for(server: subprocess.Popen[bytes], url: str) -> None:
    """Wait until the server answers."""
    while True:
        if server.poll() is not None:
            raise SystemExit("the server did not start; see above")
        try:
            if httpx.get(url, trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.1)


if __name__ == "__main__":
    main()
