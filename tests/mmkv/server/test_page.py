"""The chat at /: its files, headers and switch, and what it does in headless Chromium."""

from __future__ import annotations

import base64
import io
import json
import logging
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import mmkv.server.page
from mmkv import Engine
from mmkv.resources import asset
from mmkv.server.media.limits import FORMATS
from mmkv.server.page import FILES, POLICY
from mmkv.web import web_file
from tests.support.browser import browsing
from tests.support.chat_models import picture
from tests.support.media import write_clip
from tests.support.servers import Server, paused_in_a_reply, serving, stopped, until
from tests.support.tiers import BROWSER

KEY = "a-key-of-the-test"


def load(folder: Path) -> Engine:
    options = {"gates": "random", "policy": "dbtrimkv", "budget": 24, "dtype": "float32"}
    return Engine.from_pretrained(folder, kv_limit=8 * 2**20, prefill_chunk=64, **options)


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    saved = tmp_path_factory.mktemp("saved")
    with serving(lambda: load(folder), session_folder=saved, api_keys=(KEY,)) as made:
        made.client.headers["Authorization"] = f"Bearer {KEY}"
        yield made


def test_the_list_of_routes_loads_nothing(server: Server) -> None:
    answer = server.client.get("/docs", headers={"Authorization": ""})
    assert answer.status_code == 200
    assert answer.headers["Content-Type"].startswith("text/html")
    assert answer.headers["Content-Security-Policy"] == POLICY
    assert not re.search(r"https?:|<script|<link|src=", answer.text)
    for path in ("/v1/chat/completions", "/v1/responses/{name}", "/v1/sessions/{name}/fork"):
        assert f"<code>{path}</code>" in answer.text
    assert "<td>DELETE</td>" in answer.text and 'href="/openapi.json"' in answer.text
    for gone in ("/redoc", "/docs/oauth2-redirect"):
        assert server.client.get(gone).status_code == 404


# Texts that marked took a time for that grew with the square of their length, n characters each.
SLOW = {
    "a*n @": lambda n: "a" * n + "@",
    "a.*n @": lambda n: "a." * (n // 2) + "@",
    "emphasis": lambda n: "_a." * (n // 3),
    "both": lambda n: "_**a" * (n // 4),
    "addresses": lambda n: "_a@" * (n // 3),
    "spaces": lambda n: "a" + " " * n + "b",
    "brackets": lambda n: "[a](" * (n // 4),
    "underscores": lambda n: "a_" * (n // 2),
}


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_markdown_takes_no_time_that_grows_with_the_square(tmp_path: Path) -> None:
    """Such a text is shown as it was written, and others as before."""
    page = Path(mmkv.server.page.__file__).parent
    (tmp_path / "markdown.mjs").write_text((page / "markdown.js").read_text())
    (tmp_path / "marked.cjs").write_bytes(web_file("vendor/marked.js"))
    (tmp_path / "test.mjs").write_text("""
import marked from "./marked.cjs";
import { readFileSync } from "node:fs";
globalThis.marked = marked;
globalThis.DOMPurify = { addHook() {} };
await import("./markdown.mjs");
const parser = new marked.Marked({ gfm: true, breaks: true });
const told = JSON.parse(readFileSync(0, "utf8")).map((text) => {
  const begun = process.cpuUsage();
  const html = parser.parse(text);
  return { html, seconds: process.cpuUsage(begun).user / 1e6 };
});
console.log(JSON.stringify(told));
""")
    usual = "**bold** and `code`, see https://a.example/x, ann@b.example " + "word " * 1000
    texts = [usual, *(make(32_000) for make in SLOW.values())]
    run = subprocess.run(
        ["node", "test.mjs"],
        cwd=tmp_path,
        input=json.dumps(texts),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    first, *others = json.loads(run.stdout)
    assert (
        "<strong>bold</strong>" in first["html"] and 'href="https://a.example/x"' in first["html"]
    )
    assert 'href="mailto:ann@b.example"' in first["html"]
    for (name, make), one in zip(SLOW.items(), others, strict=True):
        assert one["seconds"] < 0.5, name  # 0.8 to 30 before
        assert re.sub(r"</?p>|\n$", "", one["html"]) == make(32_000)


def test_the_files_come_without_a_key_and_fenced_in(server: Server) -> None:
    for path, (_, kind) in FILES.items():
        answer = server.client.get(path, headers={"Authorization": ""})
        assert answer.status_code == 200
        charset = "; charset=utf-8" if kind.startswith("text/") else ""
        assert answer.headers["Content-Type"] == kind + charset
        rules = dict(
            rule.strip().split(" ", 1)
            for rule in answer.headers["Content-Security-Policy"].split(";")
        )
        assert rules["default-src"] == "'none'" and rules["script-src"] == "'self'"
        assert not any("unsafe" in rule or "http" in rule for rule in rules.values())
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        if path.startswith("/web/vendor/") or not charset:
            continue  # as published, with licences that name addresses; the policy above binds them
        # Nothing from elsewhere, nothing inline, no text read as HTML.
        assert not re.search(r"https?://|//cdn|nnerHTML|\son\w+=[\"']|style=[\"']", answer.text)
    html = server.client.get("/").text
    assert "<html data-key " in html  # it asks for a key before anything is refused
    named = set(re.findall(r'(?:src|href)="([^"#]+)"', html)) - {"data:,", "docs"}
    assert {f"/{one}" for one in named} <= set(FILES)
    own = [path for path, (_, kind) in FILES.items() if path.count("/") == 1 and "text/" in kind]
    scripts = "".join(server.client.get(path).text for path in own)
    imported = set(re.findall(r'(?:from|import\() ?"\./([^"]+)"', scripts))
    fetched = set(re.findall(r'fetch\("([^"]+)"', scripts))
    assert {f"/{one}" for one in imported | fetched} <= set(FILES) and fetched == {"scene.png"}
    assert server.client.get("/scene.png").content == asset("scene.png").read_bytes()
    # Text becomes nodes through DOMPurify alone: the browser refuses every other way.
    assert "require-trusted-types-for 'script'; trusted-types dompurify" in POLICY


def test_the_page_can_be_switched_off(folder: Path) -> None:
    with serving(lambda: load(folder), page=False) as made:
        assert [made.client.get(path).status_code for path in FILES] == [404] * len(FILES)
        assert made.client.get("/health").status_code == 200


def test_the_page_is_told_what_the_server_can(server: Server, folder: Path) -> None:
    """So that it asks for nothing that would be refused."""

    def told(made: Server) -> Any:
        return made.client.get("/v1/models").json()["data"][0]["mmkv"]

    assert told(server)["saved_sessions"] and told(server)["note"] is None
    assert told(server)["picture_formats"] == FORMATS
    with serving(lambda: load(folder)) as other:
        assert not told(other)["saved_sessions"] and "data-key" not in other.client.get("/").text


SETTINGS = {"tokens": 24, "temperature": "0", "system": "", "budget": ""}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Return a browser, or skip."""
    with browsing() as made:
        from playwright.sync_api import expect

        expect.set_options(timeout=30_000)
        yield made.browser


class Visit:
    """A page in a browser of its own; in the end it has met no error and asked nobody else."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.url, self.wrong, self.elsewhere = url, [], []
        self.refusals: list[str] = []  # what a browser says of an answer that is an error
        self.context = browser.new_context(**options)
        self.context.set_default_timeout(30_000)
        settings = json.dumps(json.dumps(SETTINGS))
        script = "sessionStorage.getItem('mmkv-settings') ?? "
        script += f"sessionStorage.setItem('mmkv-settings', {settings})"
        self.context.add_init_script(script)
        self.page = self.open()

    def open(self) -> Any:
        page = self.context.new_page()
        page.on("pageerror", lambda error: self.wrong.append(str(error)))
        page.on("console", self._said)
        page.on("request", self._asked)
        page.goto(self.url)
        return page

    def _said(self, line: Any) -> None:
        refused = "Failed to load resource" in line.text
        if line.type in ("error", "warning"):
            (self.refusals if refused else self.wrong).append(line.text)

    def _asked(self, request: Any) -> None:
        if not request.url.startswith((self.url, "data:", "blob:")):
            self.elsewhere.append(request.url)


@pytest.fixture
def visits(
    browser: Any, server: Server, caplog: pytest.LogCaptureFixture
) -> Iterator[Callable[..., Visit]]:
    """Return what opens the page, with its key given.

    A visit leaves no error in the console or the server's log, but for the answers that a test
    ``provokes``.
    """
    from playwright.sync_api import expect

    made: list[Visit] = []

    def visit(url: str = server.url, key: str | None = KEY, **options: Any) -> Visit:
        made.append(Visit(browser, url, **options))
        if key is not None:
            page = made[-1].page
            page.locator("#key").fill(key)
            page.locator("#key").press("Enter")
            expect(page.locator(".welcome")).to_contain_text("dbtrimkv")
        return made[-1]

    visit.provokes = False
    yield visit
    for one in made:
        one.context.close()
        assert not one.wrong and not one.elsewhere
        assert not one.refusals or visit.provokes
    logged = [one for one in caplog.get_records("call") if one.levelno >= logging.WARNING]
    assert not [one.getMessage() for one in logged if one.name.startswith(("mmkv", "uvicorn"))]
    for one in server.client.get("/v1/sessions").json()["data"]:
        server.client.delete(f"/v1/sessions/{one['id']}")


@pytest.fixture
def page(visits: Callable[..., Visit]) -> Any:
    return visits().page


def png(colour: str, size: tuple[int, int] = (48, 40)) -> dict[str, Any]:
    file = io.BytesIO()
    picture(colour, size).save(file, "PNG")
    return {"name": f"{colour}.png", "mimeType": "image/png", "buffer": file.getvalue()}


def give(page: Any, kind: str, file: dict[str, Any]) -> None:
    """Paste or drop a picture."""
    page.evaluate(
        """([kind, name, encoded]) => {
            const bytes = Uint8Array.from(atob(encoded), (one) => one.charCodeAt(0));
            const data = new DataTransfer();
            data.items.add(new File([bytes], name, { type: "image/png" }));
            const event = kind === "paste"
                ? new ClipboardEvent("paste", { clipboardData: data, bubbles: true })
                : new DragEvent("drop", { dataTransfer: data, bubbles: true });
            document.getElementById("text").dispatchEvent(event);
        }""",
        [kind, file["name"], base64.b64encode(file["buffer"]).decode()],
    )


def say(page: Any, text: str) -> None:
    """Send a message and wait for the reply's end."""
    from playwright.sync_api import expect

    count = page.locator(".message.assistant").count()
    page.locator("#text").fill(text)
    page.locator("#text").press("Enter")
    expect(page.locator(".message.assistant")).to_have_count(count + 1)
    ended(page)


def ended(page: Any) -> None:
    from playwright.sync_api import expect

    expect(page.locator("#stop")).to_have_count(0)
    expect(page.locator("[data-of=speed]")).to_contain_text("from memory")


def pick(page: Any, name: str) -> None:
    """Choose something of the menu of a conversation."""
    page.locator(".menu summary").click()
    page.locator(".menu").get_by_role("button", name=name).click()


def sessions_of(server: Server) -> list[dict[str, Any]]:
    return server.client.get("/v1/sessions").json()["data"]


def messages_of(server: Server, record: dict[str, Any]) -> list[dict[str, Any]]:
    return server.client.get(f"/v1/sessions/{record['id']}/messages").json()["data"]


def text_of(message: dict[str, Any]) -> str:
    return "".join(part.get("text", "") for part in message["content"])


SHADES = ".message .media img"
HEIC = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic"


def test_a_chat_with_pictures_that_survive_a_reload_and_a_fork(page: Any, server: Server) -> None:
    from playwright.sync_api import expect

    page.locator("#files").set_input_files(png("red"))
    give(page, "paste", png("blue"))
    give(page, "drop", png("green"))
    expect(page.locator(".queue img")).to_have_count(3)
    page.get_by_role("button", name="Remove blue.png").click()
    expect(page.locator(".queue img")).to_have_count(2)
    say(page, "<b>what</b> is red? " + "and " * 20)
    (record,) = sessions_of(server)
    assert record["metadata"]["title"] == "<b>what</b> is red? and and and and and and and…"
    expect(page.locator("#list li button")).to_have_text([record["metadata"]["title"]])
    first = messages_of(server, record)[0]
    assert [part["type"] for part in first["content"]] == ["image", "image", "text"]
    assert text_of(first).startswith("<b>what</b> is red?")
    shown = page.locator(".message.assistant .markdown").inner_text()
    memory = server.client.get(f"/v1/sessions/{record['id']}/memory").json()
    words = f"{memory['entries']:,} entries, {memory['most_entries']:,} allowed"
    expect(page.locator("#memory [data-of=entries]")).to_have_text(words)
    gone = memory["evicted"] / (memory["entries"] + memory["evicted"])
    expect(page.locator("[data-of=forgotten]")).to_contain_text(f"{gone * 100:.0f} %")
    shares = memory["kept_by_message"][0]["media"]
    assert shares == memory["pictures"] and min(shares) < 1
    # What is forgotten of a picture fades.
    styles = [page.locator(SHADES).nth(at).get_attribute("style") for at in range(2)]
    for style, share in zip(styles, shares, strict=True):
        found = re.search(r"opacity: ([\d.]+)", style)
        assert found and abs(float(found[1]) - (0.35 + 0.65 * share)) < 0.001
    expect(page.locator(".fading li")).to_have_count(2)
    sources = [page.locator(SHADES).nth(at).get_attribute("src") for at in range(2)]
    page.reload()
    expect(page.locator(SHADES)).to_have_count(2)
    assert [page.locator(SHADES).nth(at).get_attribute("src") for at in range(2)] == sources
    assert page.locator(".message.assistant .markdown").inner_text() == shown
    pick(page, "Fork")
    expect(page.locator("#list li")).to_have_count(2)
    expect(page.locator("#list [aria-current]")).to_contain_text("(copy)")
    expect(page.locator(SHADES)).to_have_count(2)
    assert [page.locator(SHADES).nth(at).get_attribute("src") for at in range(2)] == sources
    # What stays in the browser is whose conversations these are without a key.
    assert page.evaluate("Object.keys(localStorage)") == ["mmkv-browser"]
    assert KEY not in page.evaluate("JSON.stringify(localStorage) + document.cookie")


@BROWSER
def test_a_refused_picture_is_shown_with_its_reason_and_not_sent_again(
    page: Any, server: Server, visits: Any
) -> None:
    from playwright.sync_api import expect

    visits.provokes = True
    whole = png("red")["buffer"]
    cases = {
        "a.png": (b"hello", "a.png is neither a picture nor a video"),
        "b.png": (whole[:8] + bytes(60), "b.png is a damaged PNG picture"),
        "c.jpg": (b"", "c.jpg is empty"),
        "d.tif": (b"II*\0" + bytes(40), "d.tif is a TIFF picture; this server reads PNG, "),
        "e.heic": (HEIC, "e.heic is a HEIC picture; this server reads PNG, "),
    }
    if "HEIF" in FORMATS:
        del cases["e.heic"]
    files = [{"name": name, "mimeType": "", "buffer": one} for name, (one, _) in cases.items()]
    page.locator("#files").set_input_files([*files, png("blue")])  # which is read
    for _, says in cases.values():
        expect(page.locator(".notices")).to_contain_text(says)
    expect(page.locator(".queue img")).to_have_count(1)
    page.locator(".queue .remove").click()
    # What only the server can know has the file's name, too.
    Image.effect_noise((300, 200), 90).save(cut := io.BytesIO(), "JPEG")
    half = cut.getvalue()[: len(cut.getvalue()) // 2]
    page.locator("#files").set_input_files({"name": "cut é.jpg", "mimeType": "", "buffer": half})
    page.locator("#text").fill("what?")
    page.locator("#text").press("Enter")
    failed = page.locator(".message.failed")
    expect(failed.get_by_role("alert")).to_contain_text("cut é.jpg is damaged (image file is trunc")
    failed.get_by_role("button", name="Edit and send again").click()
    page.locator(".queue .remove").click()
    page.locator("#files").set_input_files(png("red", (20_000, 50)))
    expect(page.locator(".queue img")).to_have_count(1)
    say_failed = page.locator(".message.failed")
    page.locator("#text").fill("what?")
    page.locator("#text").press("Enter")
    expect(say_failed.get_by_role("alert")).to_contain_text("red.png: 20000 x 50 pixels are too")
    box = say_failed.locator("img").bounding_box()
    assert box and 40 <= box["height"] <= 230 and box["width"] <= 260
    expect(page.locator(".queue img")).to_have_count(0)
    say(page, "and without it?")
    (record,) = sessions_of(server)
    asked = messages_of(server, record)[0]
    assert [part["type"] for part in asked["content"]] == ["text"]
    # What is kept belongs to the messages that were sent: nothing of the refused one fades.
    expect(page.locator("#memory .turns li")).to_have_count(2)
    assert say_failed.locator("img").get_attribute("style") is None
    # Who wants can have it back, take the picture out, and send the rest.
    say_failed.get_by_role("button", name="Edit and send again").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#text")).to_have_value("what?")
    page.locator(".queue .remove").click()
    # Nor is one lost that never arrives.
    page.context.set_offline(True)
    page.locator("#text").press("Enter")
    expect(page.locator(".notices")).to_contain_text("The connection broke")
    page.context.set_offline(False)
    expect(say_failed.get_by_role("alert")).to_contain_text("the server cannot be reached")
    expect(say_failed.locator(".bubble")).to_have_text("what?")
    assert len(messages_of(server, record)) == 2


def test_a_reply_is_stopped_and_rejoined_after_a_reload(
    page: Any, server: Server, visits: Any
) -> None:
    from playwright.sync_api import expect

    visits.provokes = True

    with paused_in_a_reply(server) as reached:
        page.locator("#text").fill("one")
        page.locator("#text").press("Enter")
        assert reached.wait(60)
        page.reload()
        expect(page.locator(".message.user")).to_contain_text("one")
        expect(page.locator("#stop")).to_be_visible()
    ended(page)
    (record,) = sessions_of(server)
    expect(page.locator(".message.assistant")).to_have_count(1)
    whole = text_of(messages_of(server, record)[1])
    shown = page.locator(".message.assistant .acts button").first
    expect(shown).to_be_visible()
    page.evaluate("sessionStorage.setItem('mmkv-settings', JSON.stringify({ tokens: 400 }))")
    page.reload()
    expect(page.locator(".message.assistant")).to_have_count(1)
    assert len(whole) > 0
    with paused_in_a_reply(server) as reached:
        page.locator("#text").fill("a long one")
        page.locator("#text").press("Enter")
        assert reached.wait(60)
        early = {"status": 404, "json": {"error": {"code": "no_turn"}}}  # it has not arrived there
        page.route("**/turn", lambda route: route.fulfill(**early), times=1)
        with page.expect_request(lambda one: one.method == "DELETE"):
            page.locator("#text").press("Escape")
        with page.expect_request(lambda one: one.method == "DELETE"):
            expect(page.locator("#stop")).to_be_disabled()
    ended(page)
    expect(page.locator(".message.assistant")).to_have_count(2)
    expect(page.locator("[data-of=speed]")).to_contain_text("tokens/s")
    (record,) = sessions_of(server)
    said = messages_of(server, record)
    assert record["turns"] == 2 and [one["role"] for one in said] == ["user", "assistant"] * 2
    expect(page.locator(".message.assistant").last).to_contain_text("cut off")
    # One that is stopped before its reply is back in the box, pictures and all.
    with stopped(server):
        page.locator("#files").set_input_files(png("red"))
        page.locator("#text").fill("not yet")
        page.locator("#text").press("Enter")
        until(lambda: sessions_of(server)[0]["busy"])
        page.reload()
        expect(page.locator(SHADES)).to_have_count(1)
        page.locator("#stop").click()
        expect(page.locator("#text")).to_have_value("not yet")
        expect(page.locator(".queue img")).to_have_count(1)


def streamed(*deltas: dict[str, Any]) -> str:
    """Return a stream of made-up pieces of a reply."""
    usage = {"prompt_tokens": 3, "completion_tokens": 9, "mmkv": {"resumed": 1}}
    chunks = [{"choices": [{"delta": one, "finish_reason": None}]} for one in deltas]
    chunks += [{"choices": [{"delta": {}, "finish_reason": "stop"}]}]
    chunks += [{"choices": [], "usage": usage}]
    return "".join(f"data: {json.dumps(one)}\n\n" for one in chunks) + "data: [DONE]\n\n"


MARKDOWN = """# Title

**bold** and `code`, <img src=x onerror="window.hit=1"> [bad](javascript:window.hit=1)
![far](http://far.example/p.png) <script>window.hit=1</script> [good](https://good.example)

- one
- [x] two

| a | b |
|---|---|
| 1 | 2 |

```python
def f(x): return "<i>" + x
```
"""


def test_markdown_is_rendered_and_nothing_of_it_is_run(
    visits: Callable[..., Visit], server: Server
) -> None:
    from playwright.sync_api import expect

    visit = visits()
    page = visit.page
    visit.context.grant_permissions(["clipboard-read", "clipboard-write"])
    pieces = [MARKDOWN[at : at + 7] for at in range(0, len(MARKDOWN), 7)]
    call = {"index": 0, "id": "c1", "function": {"name": "look_up", "arguments": '{"of": "frogs"}'}}
    body = streamed(
        {"reasoning_content": "Let me think."},
        *({"content": one} for one in pieces),
        {"tool_calls": [call]},
    )
    kind = {"Content-Type": "text/event-stream"}
    page.route("**/chat/completions", lambda route: route.fulfill(body=body, headers=kind))
    say(page, "show me")
    reply = page.locator(".message.assistant")
    text = reply.locator(".markdown")
    expect(text.locator("h1")).to_have_text("Title")
    expect(text.locator("strong")).to_have_text("bold")
    expect(text.locator("li")).to_have_text(["one", "two"])
    expect(text.locator("li input")).to_be_checked()
    expect(text.locator("td")).to_have_text(["1", "2"])
    expect(text.locator(".code .hljs-keyword").first).to_have_text("def")
    expect(text).to_contain_text('<img src=x onerror="window.hit=1">')  # shown, not done
    expect(text.locator("img, script, [onerror]")).to_have_count(0)
    links = text.locator("a").evaluate_all("(all) => all.map((one) => one.getAttribute('href'))")
    assert links == [None, "http://far.example/p.png", "https://good.example"]
    assert page.evaluate("window.hit") is None
    text.get_by_role("button", name="Copy").click()
    assert page.evaluate("navigator.clipboard.readText()") == 'def f(x): return "<i>" + x'
    # Thoughts and calls are folded.
    thought, card = reply.locator(".thought"), reply.locator(".call")
    expect(thought.locator("p")).to_be_hidden()
    thought.locator("summary").click()
    expect(thought.locator("p")).to_have_text("Let me think.")
    expect(card.locator("summary")).to_contain_text("look_up")
    card.locator("summary").click()
    expect(card.locator("pre")).to_contain_text('"of": "frogs"')
    # What is nested deeper than a parser reaches is shown as it is.
    deep = streamed({"content": ">" * 20_000 + "deep"})
    page.route("**/chat/completions", lambda route: route.fulfill(body=deep, headers=kind))
    say(page, "deeper")
    expect(page.locator(".message.assistant .markdown").last).to_contain_text(">>deep")
    # The browser itself refuses what does not come through DOMPurify.
    refused = (
        "() => { try { document.body['inner' + 'HTML'] = '<p>' } catch (e) { return e.name } }"
    )
    assert page.evaluate(refused) == "TypeError"
    visit.wrong.clear()  # it says so
    accessible(page)


def version(page: Any, at: int) -> Any:
    """Return what says which version of a message is shown, and moves to others."""
    return page.locator(f"#message-{at} .versions")


@BROWSER
def test_edits_and_other_replies_are_versions_that_read_little_again(
    page: Any, server: Server, visits: Any
) -> None:
    from playwright.sync_api import expect

    visits.provokes = True
    page.get_by_role("button", name="Settings").click()
    page.locator("#system").fill("Be short.")
    page.locator("dialog").get_by_role("button", name="Keep").click()
    page.locator("#files").set_input_files(png("red"))
    say(page, "first " * 40)
    say(page, "second")
    expect(page.locator(".versions")).to_have_count(0)
    page.locator(".message.assistant").last.hover()
    page.get_by_role("button", name="Another reply").click()
    expect(version(page, 4)).to_have_text("2/2")
    ended(page)
    page.locator(".message.user").last.hover()
    page.get_by_role("button", name="Edit as another version").last.click()
    expect(page.locator("#text")).to_have_value("second")
    say_count = page.locator(".message.assistant")
    page.locator("#text").fill("third")
    page.locator("#text").press("Enter")
    expect(version(page, 3)).to_have_text("2/2")
    ended(page)
    expect(say_count).to_have_count(2)
    told = page.locator("[data-of=speed]").inner_text()
    read, known = (int(one) for one in re.findall(r"(\d+) (?:tokens? read|from memory)", told))
    assert known > 2 * read
    # One conversation in the list, and three sessions that say where they depart.
    expect(page.locator("#list li")).to_have_count(1)
    records = sessions_of(server)
    said = [[text_of(one).strip() for one in messages_of(server, record)] for record in records]
    assert [one[0] for one in said] == ["Be short."] * 3
    assert [one[3] for one in said] == ["second", "second", "third"]
    assert len({one[1] for one in said}) == 1
    for record in records:
        assert messages_of(server, record)[1]["content"][0]["type"] == "image"
    ids = [one["id"] for one in records]
    places = [(one["metadata"].get("from"), one["metadata"].get("at")) for one in records]
    assert places == [(None, None), (ids[0], "4"), (ids[1], "3")]
    # By the keyboard from one to the other, and through a reload.
    expect(version(page, 4)).to_have_count(0)
    version(page, 3).get_by_role("button", name="The version before").focus()
    page.keyboard.press("Enter")
    expect(version(page, 3)).to_have_text("1/2")
    expect(version(page, 4)).to_have_text("2/2")
    expect(version(page, 3).get_by_role("button", name="The next version")).to_be_focused()
    page.reload()
    version(page, 4).get_by_role("button", name="The version before").click()
    expect(version(page, 4)).to_have_text("1/2")
    shown = page.locator("#message-4 .markdown")
    expect(shown).to_have_text(" ".join(said[0][4].split()) or "The reply is empty.")
    version(page, 3).get_by_role("button", name="The next version").click()
    expect(page.locator("#message-3 .bubble")).to_have_text("third")
    # One that the server refuses keeps its earlier messages for the next try.
    refusal = {"error": {"message": "no room now", "code": "no_room"}}
    told = {"status": 503, "json": refusal}
    page.route("**/chat/completions", lambda route: route.fulfill(**told), times=1)
    page.locator(".message.assistant").last.hover()
    page.get_by_role("button", name="Another reply").click()
    expect(page.locator(".message.failed")).to_contain_text("no room now")
    page.locator("#text").fill("fourth")
    page.locator("#text").press("Enter")
    ended(page)
    (record,) = [one for one in sessions_of(server) if one["id"] not in ids and one["turns"]]
    again = [text_of(one).strip() for one in messages_of(server, record)]
    assert again[:3] == said[0][:3] and again[3] == "fourth" and len(again) == 5
    expect(page.locator(".versions")).to_have_text("3/3")
    # All of them have the title.
    pick(page, "Rename")
    expect(page.locator("#title")).to_have_value(re.compile("^first first"))
    page.locator("#title").fill("Numbers")
    page.locator("#title").press("Enter")
    expect(page.locator("main .title")).to_have_text("Numbers")
    page.get_by_role("button", name="New chat").click()
    say(page, "elsewhere")
    expect(page.locator("#list li")).to_have_text(["elsewhere", "Numbers"])
    # The search finds what was said, not the titles alone, in the version that has it.
    page.get_by_label("Search conversations").fill("third")
    expect(page.locator("#list li")).to_have_text(["Numbers"])
    page.locator("#list li button").click()
    expect(page.locator("#message-3 .bubble")).to_have_text("third")
    page.get_by_label("Search conversations").fill("nowhere")
    expect(page.locator("#list")).to_contain_text("Nothing found.")
    page.get_by_label("Search conversations").fill("")
    with page.expect_download() as loading:
        pick(page, "Export as JSON")
    data = json.loads(loading.value.path().read_text())
    roles = ["system", "user", "assistant", "user", "assistant"]
    assert [one["role"] for one in data["messages"]] == roles
    sent = data["messages"][1]["content"][0]["image_url"]["url"].partition(",")[2]
    assert base64.b64decode(sent) == png("red")["buffer"]
    with page.expect_download() as loading:
        pick(page, "Export as Markdown")
    text = loading.value.path().read_text()
    assert "## System\n\nBe short." in text and "## User\n\nthird" in text
    # They go together.
    pick(page, "Delete")
    expect(page.locator("dialog")).to_contain_text("in all 4 versions")
    page.locator("dialog").get_by_role("button", name="Delete").click()
    expect(page.locator("#list li")).to_have_text(["elsewhere"])
    assert [one["metadata"]["title"] for one in sessions_of(server)] == ["elsewhere"]


def test_no_conversation_is_lost_that_the_server_or_its_list_does_not_know(
    page: Any, server: Server, visits: Any
) -> None:
    from playwright.sync_api import expect

    visits.provokes = True

    page.locator("#files").set_input_files(png("red"))
    say(page, "first")
    server.client.delete(f"/v1/sessions/{sessions_of(server)[0]['id']}")
    say(page, "second")
    expect(page.locator(".message.assistant .acts")).to_have_count(2)
    expect(page.locator(".notices")).to_contain_text("had this conversation no more")
    (record,) = sessions_of(server)
    assert record["metadata"]["title"] == "first"
    said = messages_of(server, record)
    assert [one["role"] for one in said] == ["user", "assistant"] * 2
    assert [one["type"] for one in said[0]["content"]] == ["image", "text"]
    # The list may be older than the conversation: who leaves that takes nothing away.
    page.get_by_role("button", name="New chat").click()
    listed, asked = "**/v1/sessions", []

    def once(route: Any) -> None:
        """Let the conversation be made and listed, and nothing be listed after its reply."""
        asked.append(route.request.method)
        route.abort() if asked[:2] == ["POST", "GET"] and len(asked) > 2 else route.fallback()

    page.route(listed, once)
    say(page, "third")
    page.unroute(listed)
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".welcome")).to_be_visible()
    page.reload()
    titles = [one["metadata"]["title"] for one in sessions_of(server)]
    assert titles == ["first", "third"]
    # What was refused, and what is edited, stays where its conversation is read again.
    page.locator("#list li").first.get_by_role("button").click()
    expect(page.locator(".message")).to_have_count(2)
    refusal = {"status": 409, "json": {"error": {"message": "busy"}}}
    page.route("**/chat/completions", lambda route: route.fulfill(**refusal), times=1)
    page.locator("#text").fill("refused")
    page.locator("#text").press("Enter")
    expect(page.locator(".message.failed")).to_contain_text("busy")
    page.locator(".message.user").first.hover()
    page.get_by_role("button", name="Edit as another version").first.click()
    with page.expect_response("**/messages"):
        page.locator("#list [aria-current]").click()
    expect(page.locator(".message")).to_have_count(3)
    expect(page.locator(".message.failed")).to_contain_text("busy")
    page.get_by_role("button", name="Cancel").click()
    # A key that is no longer valid: the message waits for the next one.
    page.evaluate("sessionStorage.setItem('mmkv-key', 'of yesterday')")
    page.locator("#text").fill("fourth")
    page.locator("#text").press("Enter")
    for key in ("wrong", KEY):
        expect(page.locator("#key")).to_be_focused()
        page.locator("#key").fill(key)
        page.locator("#key").press("Enter")
        if key == "wrong":
            expect(page.get_by_role("alert")).to_have_text("This is no key of this server.")
    expect(page.locator("#text")).to_have_value("fourth")


@BROWSER
def test_saving_deleting_and_a_video_by_the_keyboard(
    visits: Callable[..., Visit], server: Server, folder: Path, tmp_path: Path
) -> None:
    from playwright.sync_api import expect

    page = visits().page

    def press(name: str, within: str = "#app") -> None:
        button = page.locator(within).get_by_role("button", name=name, exact=True)
        button.focus()
        button.press("Enter")

    clip = write_clip(tmp_path / "steps.mp4").read_bytes()
    video = {"name": "steps.mp4", "mimeType": "video/mp4", "buffer": clip}
    page.locator("#files").set_input_files(video)
    expect(page.locator(".queue .film")).to_contain_text("steps.mp4")
    say(page, "what moves?")
    (record,) = sessions_of(server)
    assert messages_of(server, record)[0]["content"][0]["type"] == "video"
    page.locator(".menu summary").press("Enter")
    press("Save on the server")
    page.locator("#name").fill("of.the.page")
    page.locator("#name").press("Enter")
    expect(page.locator(".notices")).to_contain_text("Saved on the server as of.the.page")
    page.locator("#list").get_by_role("button", name="of.the.page").press("Enter")
    expect(page.locator("#list [aria-current]")).to_have_text("of.the.page")
    expect(page.locator(".message")).to_have_count(2)
    page.locator(".menu summary").press("Enter")
    press("Delete")
    press("Delete", "dialog")
    expect(page.locator(".welcome")).to_be_visible()
    assert [one["id"] for one in sessions_of(server)] == [record["id"]]
    # Without a folder nothing can be saved, and nothing offers to; browsers are apart.
    with serving(lambda: load(folder)) as other:
        mine = visits(other.url, key=None).page
        say(mine, "mine")
        mine.locator(".menu summary").click()
        expect(mine.get_by_role("button", name="Export as JSON")).to_be_visible()
        expect(mine.get_by_role("button", name="Save on the server")).to_have_count(0)
        yours = visits(other.url, key=None).page
        expect(yours.locator(".welcome")).to_be_visible()
        expect(yours.locator("#list li")).to_have_count(0)
        expect(mine.locator("#list li")).to_have_count(1)
        assert other.client.get("/v1/sessions").json()["data"] == []


@BROWSER
def test_tabs_share_a_key_that_goes_with_the_last_one(visits: Callable[..., Visit]) -> None:
    from playwright.sync_api import expect

    visit = visits()
    first, second = visit.page, visit.open()
    for page in (first, second):
        expect(page.locator(".welcome")).to_contain_text("dbtrimkv")
    second.get_by_role("button", name="Forget the key").click()
    for page in (first, second):
        expect(page.locator("#key")).to_be_visible()
        assert page.evaluate("sessionStorage.getItem('mmkv-key')") is None
    first.locator("#key").fill(KEY)
    first.locator("#key").press("Enter")
    for page in (first, second):
        expect(page.locator(".welcome")).to_contain_text("dbtrimkv")
    assert KEY not in first.evaluate("JSON.stringify(localStorage) + document.cookie")
    first.close()
    second.close()
    expect(visit.open().locator("#key")).to_be_visible()


@BROWSER
def test_the_empty_page_has_a_picture_to_try_and_notes_are_shown(page: Any, server: Server) -> None:
    from playwright.sync_api import expect

    page.locator(".example").click()
    expect(page.locator(".message.user .bubble")).to_have_text("what is at row 2, column 3?")
    ended(page)
    (record,) = sessions_of(server)
    path = f"/v1/sessions/{record['id']}"
    (digest,) = [p["digest"] for p in messages_of(server, record)[0]["content"] if "digest" in p]
    kept = server.client.get(f"{path}/media/{digest}")
    assert kept.content == asset("scene.png").read_bytes()
    steps = [picture(colour, (32, 32)) for colour in ("red", "blue")]
    steps[0].save(file := io.BytesIO(), "GIF", save_all=True, append_images=steps[1:])
    moving = {"name": "a b.gif", "mimeType": "image/gif", "buffer": file.getvalue()}
    page.locator("#files").set_input_files(moving)
    say(page, "and this?")
    notes = server.client.get(f"{path}/memory").json()["notes"]
    assert notes[0].startswith("a b.gif is animated")
    for _ in range(2):
        expect(page.locator(".told li")).to_have_text(notes)
        page.reload()


AXE = Path(__file__).parents[2] / "support" / "vendor" / "axe.js"


def accessible(page: Any) -> None:
    """Require that axe-core has no serious finding."""
    page.evaluate(AXE.read_text())  # past the page's policy, as an extension would
    found = page.evaluate("async () => (await axe.run()).violations")
    worst = [one for one in found if one["impact"] in ("serious", "critical")]
    told = [(one["id"], [node["html"][:120] for node in one["nodes"]]) for one in worst]
    assert not told


@pytest.mark.parametrize(
    ("width", "scheme"), [(390, "dark"), pytest.param(1440, "light", marks=BROWSER)]
)
def test_it_is_accessible_and_all_of_it_is_in_reach(
    visits: Callable[..., Visit], width: int, scheme: str
) -> None:
    from playwright.sync_api import expect

    size = {"width": width, "height": 640}
    visit = visits(viewport=size, color_scheme=scheme, reduced_motion="reduce")
    page = visit.page

    def reachable(what: str) -> None:
        box = page.locator(what).bounding_box()
        assert box and box["x"] >= 0 and box["y"] >= 0
        assert box["x"] + box["width"] <= width and box["y"] + box["height"] <= size["height"]
        assert page.evaluate("document.documentElement.scrollWidth") <= width

    accessible(page)
    reachable(".example")
    reachable("#send")
    for colour in ("red", "blue"):
        page.locator("#files").set_input_files(png(colour))
        say(page, "what is this? " * 12)
        reachable("#send")
    page.get_by_role("button", name="Another reply").click()
    expect(page.locator(".versions")).to_have_text("2/2")
    ended(page)
    accessible(page)
    page.get_by_role("button", name="Settings").click()
    accessible(page)
    page.keyboard.press("Escape")
    if width == 390:
        for name, side in (("Memory", "#memory"), ("Conversations", "#list")):
            page.get_by_role("button", name=name).first.click()
            expect(page.locator(side)).to_have_class("side open")
            accessible(page)
            page.keyboard.press("Escape")
            expect(page.locator(side)).to_have_class("side")
    switch = page.locator("[data-theme-switch]")
    seen = []
    for _ in range(3):
        switch.evaluate("(one) => one.click()")
        seen.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert seen[0] != seen[1] and seen[2] in seen[:2]
