"""The page at /: its files, headers and switch, and what it does in headless Chromium."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mmkv import Engine
from mmkv.server.page import FILES, POLICY
from tests.support.browser import browsing
from tests.support.chat_models import picture
from tests.support.servers import Server, paused_in_a_reply, serving

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


def test_the_files_come_without_a_key_and_fenced_in(server: Server) -> None:
    for path, (_, kind) in FILES.items():
        answer = server.client.get(path, headers={"Authorization": ""})
        assert answer.status_code == 200
        assert answer.headers["Content-Type"] == f"{kind}; charset=utf-8"
        rules = dict(
            rule.strip().split(" ", 1)
            for rule in answer.headers["Content-Security-Policy"].split(";")
        )
        assert rules["default-src"] == "'none'" and rules["script-src"] == "'self'"
        assert not any("unsafe" in rule or "http" in rule for rule in rules.values())
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        # Nothing from elsewhere, nothing inline, no text read as HTML.
        assert not re.search(r"https?://|//cdn|innerHTML|\son\w+=|style=", answer.text)
    html = server.client.get("/").text
    named = re.findall(r'(?:src|href)="([^"#]+)"', html)
    assert {f"/{one}" for one in named if not one.startswith("data:")} == set(FILES) - {"/"}
    wanted = set(re.findall(r'\$\("([\w-]+)"\)', server.client.get("/page.js").text))
    assert wanted <= set(re.findall(r'id="([\w-]+)"', html))


def test_the_page_can_be_switched_off(folder: Path) -> None:
    with serving(lambda: load(folder), page=False) as made:
        assert [made.client.get(path).status_code for path in FILES] == [404] * len(FILES)
        assert made.client.get("/health").status_code == 200


def test_the_messages_of_a_session_are_told(server: Server) -> None:
    name = server.client.post("/v1/sessions", json={}).json()["id"]
    path = f"/v1/sessions/{name}"
    assert server.client.get(f"{path}/messages").json() == {"object": "list", "data": []}
    asked = {"role": "user", "content": "what is red?"}
    body = {"model": "small", "messages": [asked], "max_tokens": 4, "temperature": 0}
    said = server.client.post(f"{path}/chat/completions", json=body).json()["choices"][0]["message"]
    parts = [[{"type": "text", "text": text}] for text in (asked["content"], said["content"])]
    data = server.client.get(f"{path}/messages").json()["data"]
    assert data == [
        {"role": "user", "content": parts[0]},
        {"role": "assistant", "content": parts[1]},
    ]
    server.client.delete(path)


@pytest.fixture(scope="module")
def context() -> Iterator[Any]:
    """Return a browser's context, or skip."""
    with browsing() as made:
        yield made


@pytest.fixture
def page(context: Any, server: Server) -> Iterator[Any]:
    """Return the page with its key given; in the end it has met no error and asked nobody else."""
    from playwright.sync_api import expect

    expect.set_options(timeout=30_000)
    made, wrong, elsewhere = context.new_page(), [], []
    made.on("pageerror", lambda error: wrong.append(str(error)))
    made.on("console", lambda line: wrong.append(line.text) if "Security" in line.text else None)
    made.on(
        "request",
        lambda one: None if one.url.startswith((server.url, "data:")) else elsewhere.append(one),
    )
    made.goto(server.url)
    expect(made.locator("#status")).to_contain_text("no valid API key")
    made.locator("#key").fill(KEY)
    made.locator("#key").press("Enter")
    expect(made.locator("#model")).to_contain_text("dbtrimkv")
    yield made
    made.close()
    assert not wrong and not elsewhere
    for one in server.client.get("/v1/sessions").json()["data"]:
        server.client.delete(f"/v1/sessions/{one['id']}")


def png(colour: str) -> bytes:
    file = io.BytesIO()
    picture(colour, (48, 40)).save(file, "PNG")
    return file.getvalue()


def give(page: Any, kind: str, content: bytes) -> None:
    """Paste or drop a picture."""
    page.evaluate(
        """([kind, encoded]) => {
            const bytes = Uint8Array.from(atob(encoded), (one) => one.charCodeAt(0));
            const data = new DataTransfer();
            data.items.add(new File([bytes], "picture.png", { type: "image/png" }));
            const event = kind === "paste"
                ? new ClipboardEvent("paste", { clipboardData: data, bubbles: true })
                : new DragEvent("drop", { dataTransfer: data, bubbles: true });
            document.getElementById("text").dispatchEvent(event);
        }""",
        [kind, base64.b64encode(content).decode()],
    )


def say(page: Any, text: str, tokens: int = 6) -> str:
    """Send a message, wait for the reply's end, and return it."""
    from playwright.sync_api import expect

    page.locator("#tokens").fill(str(tokens))
    page.locator("#text").fill(text)
    page.locator("#text").press("Enter")
    expect(page.locator("#status")).to_contain_text("tokens read")
    expect(page.locator("#stop")).to_be_hidden()
    return page.locator("#log li.assistant").last.inner_text()


def told(page: Any, what: str) -> Callable[[], str]:
    return page.locator(f'#numbers dd[data-of="{what}"]')


def test_a_chat_with_pictures_and_its_memory(page: Any, server: Server) -> None:
    from playwright.sync_api import expect

    page.locator("#picture").set_input_files(
        {"name": "a.png", "mimeType": "image/png", "buffer": png("red")}
    )
    give(page, "paste", png("blue"))
    give(page, "drop", png("green"))
    expect(page.locator("#pictures img")).to_have_count(3)
    page.get_by_role("button", name="Remove picture 2").click()
    expect(page.locator("#pictures img")).to_have_count(2)
    reply = say(page, "<b>what</b> is red?")
    (record,) = server.client.get("/v1/sessions").json()["data"]
    path = f"/v1/sessions/{record['id']}"
    first, second = server.client.get(f"{path}/messages").json()["data"]
    assert [part["type"] for part in first["content"]] == ["image", "image", "text"]
    assert first["content"][2]["text"] == "<b>what</b> is red?"
    assert "".join(part["text"] for part in second["content"]).strip() == reply.strip()
    expect(page.locator("#log img")).to_have_count(2)
    memory = server.client.get(f"{path}/memory").json()
    expect(told(page, "kept")).to_have_text(f"{memory['entries']:,}")
    expect(told(page, "budget")).to_have_text(record["budget"])
    for name in ("text", "image"):
        bar = page.locator(f'.bar[data-modality="{name}"]')
        expect(bar).to_contain_text(f"{name}: {memory['by_modality'][name]:,} of")
    # Nothing of the page outlives the tab but what the server keeps.
    assert page.evaluate("localStorage.length") == 0
    assert page.evaluate("document.cookie") == ""
    assert page.evaluate("Object.values(sessionStorage)") == [KEY]
    page.reload()
    expect(page.locator("#log li")).to_have_count(2)
    expect(page.locator("#log li.assistant")).to_have_text(reply)


def test_forks_files_and_stopped_replies_by_the_keyboard_alone(page: Any, server: Server) -> None:
    from playwright.sync_api import expect

    def press(name: str) -> None:
        button = page.get_by_role("button", name=name, exact=True)
        button.focus()
        button.press("Enter")

    say(page, "one")
    press("Fork")
    expect(page.locator("#sessions li")).to_have_count(2)
    say(page, "and two")
    turns = [one["turns"] for one in server.client.get("/v1/sessions").json()["data"]]
    assert turns == [1, 2]
    page.locator("#name").fill("of.the.page")
    page.locator("#name").press("Enter")
    expect(page.locator("#status")).to_have_text("saved as of.the.page")
    page.locator("#name").press("Enter")
    expect(page.locator("#status")).to_contain_text("set overwrite")
    page.locator("#file").fill("of.the.page")
    page.locator("#file").press("Enter")
    expect(page.locator("#sessions li")).to_have_count(3)
    expect(page.locator("#log li")).to_have_count(4)
    press("Delete")
    expect(page.locator("#sessions li")).to_have_count(2)
    expect(page.locator("#log li")).to_have_count(4)
    with paused_in_a_reply(server) as reached:
        page.locator("#text").fill("a long one")
        page.locator("#tokens").fill("200")
        page.locator("#text").press("Enter")
        assert reached.wait(60)
        expect(page.locator("#stop")).to_be_visible()
        press("New")
        expect(page.locator("#status")).to_contain_text("under way")
        page.locator("#text").press("Escape")
    expect(page.locator("#status")).to_contain_text("taken back")
    expect(page.locator("#log li")).to_have_count(4)
    assert len(server.client.get("/v1/sessions").json()["data"]) == 2
    assert page.locator("#text").input_value() == "a long one"
    # Every control has a name that a screen reader can say.
    nameless = """() => [...document.querySelectorAll("input, textarea, button, select")].filter(
        (one) => !one.labels?.length && !one.textContent.trim() && !one.ariaLabel)
        .map((one) => one.id)"""
    assert page.evaluate(nameless) == []
