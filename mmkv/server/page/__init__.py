"""The page at ``/``: files without a build step, and the headers that fence it in."""

from __future__ import annotations

import json
from importlib import resources

from fastapi import APIRouter, Response

from mmkv.resources import asset
from mmkv.web import web_file

# Nothing inline, nothing from elsewhere; pictures are those that the user gave. Text becomes nodes
# through DOMPurify alone.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
OWN = ("page.js", "chat.js", "client.js", "files.js", "markdown.js", "page.css")
_KINDS = {"js": "text/javascript", "css": "text/css"}


def _shared() -> list[str]:
    """Return the files of :mod:`mmkv.web` that the page may load."""
    packages = json.loads(web_file("vendor.json"))
    files = [name for one in packages if "folder" not in one for name in one["files"]]
    libraries = [f"vendor/{name}" for name in files if name.endswith(".js")]
    return ["base.css", "theme.js", *libraries]


# The file at each path, and its type. The picture is one to try.
FILES = {"/": ("index.html", "text/html"), "/scene.png": ("scene.png", "image/png")}
FILES |= {f"/{name}": (name, _KINDS[name.rpartition(".")[2]]) for name in OWN}
FILES |= {f"/web/{name}": (name, _KINDS[name.rpartition(".")[2]]) for name in _shared()}


def page_router(keyed: bool) -> APIRouter:
    """Return the routes of the page; it asks for a key itself, so they want none.

    Args:
        keyed: whether requests need a key: the page asks for it before the server has to refuse.
    """
    router = APIRouter(include_in_schema=False)
    folder = resources.files(__name__)
    for path, (name, kind) in FILES.items():
        if path.startswith("/web/"):
            content = web_file(name)
        elif kind == "image/png":
            content = asset(name).read_bytes()
        else:
            content = (folder / name).read_bytes()
        if keyed and path == "/":
            content = content.replace(b"<html", b"<html data-key", 1)
        _add(router, path, content, kind)
    return router


def _add(router: APIRouter, path: str, content: bytes, kind: str) -> None:
    @router.get(path)
    async def file() -> Response:
        return Response(content, headers=HEADERS, media_type=kind)
