"""The page at ``/docs``: a list of the routes, without a script."""

from __future__ import annotations

from html import escape
from typing import Any

from fastapi import FastAPI, Response

from mmkv.server.page import HEADERS

_PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>mmkv: routes</title></head>
<body>
<h1>Routes</h1>
<p>Their fields are in <a href="/openapi.json">/openapi.json</a>.</p>
<table>
{rows}
</table>
</body>
</html>
"""
_ROW = "<tr><td>{}</td><td><code>{}</code></td><td>{}</td></tr>"


def add_routes_page(app: FastAPI) -> None:
    """Add the page to an application."""

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return Response(_page(app.openapi()), headers=HEADERS, media_type="text/html")


def _page(schema: dict[str, Any]) -> str:
    rows = [
        _ROW.format(method.upper(), escape(path), escape(route.get("summary", "")))
        for path, methods in schema["paths"].items()
        for method, route in methods.items()
    ]
    return _PAGE.format(rows="\n".join(rows))
