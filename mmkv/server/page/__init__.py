"""The page at ``/``: three files without a build step, and the headers that fence it in."""

from __future__ import annotations

from importlib import resources

from fastapi import APIRouter, Response

# Nothing inline, nothing from elsewhere; pictures are those that the user gave.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
FILES = {
    "/": ("index.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
}


def page_router() -> APIRouter:
    """Return the routes of the page; it asks for a key itself, so they want none."""
    router = APIRouter(include_in_schema=False)
    folder = resources.files(__name__)
    for path, (name, kind) in FILES.items():
        _add(router, path, (folder / name).read_bytes(), kind)
    return router


def _add(router: APIRouter, path: str, content: bytes, kind: str) -> None:
    @router.get(path)
    async def file() -> Response:
        return Response(content, headers=HEADERS, media_type=f"{kind}; charset=utf-8")
