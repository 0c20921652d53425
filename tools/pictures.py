"""Make the pictures of the pages: ``python -m tools.pictures [explain] [chat] [tour]``.

``explain`` writes docs/figures/explain.webp and explain-compare.webp, ``chat`` chat.webp, ``tour``
runs examples/tour.ipynb and writes its outputs into it, so that a viewer of repositories shows
them; without a name all three. Each opens the page of the bundled model in headless Chromium
(apt-get install chromium; pip install playwright).
"""

from __future__ import annotations

import argparse
import ast
import base64
import contextlib
import hashlib
import io
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from PIL import Image

import mmkv
from mmkv.explain import Trace
from mmkv.resources import asset

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "docs" / "figures"
TOUR = ROOT / "examples" / "tour.ipynb"
QUESTION = "what is at row 2, column 3?"
MORE = [f"what is at row {row}, column {column}?" for row, column in ((4, 4), (1, 1), (3, 2))]
WIDTH, MOST_BYTES = 1200, 200_000


@contextlib.contextmanager
def window(height: int) -> Iterator[Any]:
    """Yield an empty page of headless Chromium, in light colours."""
    from playwright.sync_api import sync_playwright

    found = shutil.which("chromium") or shutil.which("google-chrome")
    if found is None:
        raise SystemExit("no Chromium here; apt-get install chromium")
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=found, args=["--no-sandbox"])
        size = {"width": WIDTH, "height": height}
        yield browser.new_page(viewport=size, color_scheme="light", reduced_motion="reduce")
        browser.close()


def shot(page: Path, height: int) -> bytes:
    """Return the first screenful of a page of a trace, as PNG."""
    with window(height) as tab:
        tab.goto(page.as_uri())
        tab.locator("html[data-ready]").wait_for(state="attached")
        return tab.screenshot()


def save(png: bytes, name: str) -> None:
    """Write a picture of the documents."""
    made = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").save(made, "WEBP", quality=85, method=6)
    if len(made.getvalue()) > MOST_BYTES:
        raise SystemExit(f"{name} takes {len(made.getvalue()):,} bytes, more than {MOST_BYTES:,}")
    (FIGURES / name).write_bytes(made.getvalue())
    print(f"wrote docs/figures/{name} ({len(made.getvalue()):,} bytes)")


def asked(path: Path, compare: Path | None = None, **options: Any) -> None:
    """Write the page of README's question."""
    scene = asset("scene.png")
    engine = mmkv.Engine.from_pretrained(mmkv.bundled_model(), prefill_chunk=12, **options)
    parts = [{"type": "image", "image": scene}, {"type": "text", "text": QUESTION}]
    with engine.session() as session, session.trace() as trace:
        list(session.send(QUESTION, images=[scene]))
        trace.measure_attention(engine.inputs([{"role": "user", "content": parts}]))
        trace.report(path, compare)


def explain(folder: Path) -> None:
    """Draw the page of mmkv explain, alone and beside another policy's."""
    alone, other, both = (folder / f"{name}.html" for name in ("alone", "other", "both"))
    asked(alone, budget=8)
    asked(other, budget=8, policy="snapkv")
    asked(both, other, budget=8)
    save(shot(alone, 720), "explain.webp")
    save(shot(both, 860), "explain-compare.webp")


def chat(_: Path) -> None:
    """Draw the chat of mmkv serve after a few answers about a picture."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}/"
    command = [str(Path(sys.executable).parent / "mmkv"), "serve", "--port", str(port)]
    server = subprocess.Popen([*command, "--budget", "16"], cwd=ROOT)
    try:
        _until(lambda: _answers(f"{address}health"), server)
        with window(850) as tab:
            tab.goto(address)
            _replied(tab, tab.locator(".example").click)
            for question in MORE[:2]:
                _say(tab, question)
            tab.get_by_role("button", name="Edit as another version").last.click()
            _say(tab, MORE[2])
            tab.mouse.move(0, 0)
            tab.wait_for_timeout(500)
            save(tab.screenshot(), "chat.webp")
    finally:
        server.terminate()
        server.wait()


def _say(tab: Any, text: str) -> None:
    tab.locator("#text").fill(text)
    _replied(tab, lambda: tab.locator("#text").press("Enter"))


def _replied(tab: Any, ask: Callable[[], None]) -> None:
    """Wait for a reply, and for what the page says of its memory afterwards."""
    with tab.expect_response("**/memory"):
        ask()


def _answers(address: str) -> bool:
    try:
        return urllib.request.urlopen(address, timeout=5).status == 200
    except (urllib.error.URLError, OSError):
        return False


def _until(true: Callable[[], bool], server: subprocess.Popen[bytes]) -> None:
    end = monotonic() + 120
    while not true():
        if server.poll() is not None or monotonic() > end:
            raise SystemExit("mmkv serve does not answer; what it wrote says why")
        sleep(0.2)


def tour(folder: Path) -> None:
    """Run the notebook from top to bottom and put into it what its cells print and show."""
    notebook = json.loads(TOUR.read_text("utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    names: dict[str, Any] = {}
    for number, cell in enumerate(cells, 1):
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        printed, value = io.StringIO(), None
        with contextlib.redirect_stdout(printed):
            exec(compile(tree, TOUR.name, "exec"), names)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), TOUR.name, "eval"), names)
        cell["execution_count"], cell["outputs"] = number, []
        if printed.getvalue():
            lines = printed.getvalue().splitlines(keepends=True)
            cell["outputs"].append({"name": "stdout", "output_type": "stream", "text": lines})
        if value is not None:
            cell["outputs"].append(_shown(value, number, folder))
    notebook["metadata"]["outputs_of"] = digest(notebook)
    TOUR.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", "utf-8")
    print(f"wrote {TOUR.relative_to(ROOT)} ({TOUR.stat().st_size:,} bytes)")


def digest(notebook: dict[str, Any]) -> str:
    """Identify the code of a notebook; its outputs are of that code."""
    code = [cell["source"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return hashlib.sha256(json.dumps(code).encode()).hexdigest()[:16]


def _shown(value: Any, number: int, folder: Path) -> dict[str, Any]:
    """Return a cell's result: pictures as PNG, a trace as its page looks like."""
    data: dict[str, Any] = {"text/plain": [type(value).__name__]}
    png = None
    if isinstance(value, Trace):
        whole = shot(value.report(folder / "tour.html"), 720)
        picture, small = Image.open(io.BytesIO(whole)).convert("RGB"), io.BytesIO()
        picture.quantize(128).save(small, "PNG", optimize=True)
        png = small.getvalue()
    elif hasattr(value, "_repr_png_"):
        png = value._repr_png_()
    if png is not None:
        data["image/png"] = base64.b64encode(png).decode()
    return {
        "data": data,
        "execution_count": number,
        "metadata": {},
        "output_type": "execute_result",
    }


def main() -> None:
    """Run the program."""
    makers = {"explain": explain, "chat": chat, "tour": tour}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *makers], metavar="explain|chat|tour")
    chosen = parser.parse_args().names or list(makers)
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen:
            makers[name](Path(folder))


if __name__ == "__main__":
    main()
