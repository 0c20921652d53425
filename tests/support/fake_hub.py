"""A model hub on this machine: enough of its interface for listing and fetching a repository."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

Repositories = dict[str, dict[str, bytes] | int]


@contextmanager
def serve(repositories: Repositories) -> Iterator[tuple[str, list[str]]]:
    """Serve repositories: id -> its files, or the status of a refusal (401, 403 gated, 500).

    Yields:
        The address, and the paths of files that were fetched.
    """
    fetched: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, body: bool) -> None:
            parts = unquote(urlsplit(self.path).path).strip("/").split("/")
            listing = parts[:2] == ["api", "models"]
            name = "/".join(parts[2:4] if listing else parts[:2])
            files = repositories.get(name, 404)
            if isinstance(files, int):
                codes = {401: "RepoNotFound", 404: "RepoNotFound", 403: "GatedRepo"}
                self._send(files, b"", {"X-Error-Code": codes.get(files, "")}, body)
            elif listing:
                siblings = [{"rfilename": file, "size": len(files[file])} for file in files]
                tree = [
                    {"type": "file", "path": path, "size": len(content), "oid": _digest(content)}
                    for path, content in files.items()
                ]
                found: object = {"id": name, "sha": _commit(name), "siblings": siblings}
                self._send(200, json.dumps(tree if "tree" in parts else found).encode(), {}, body)
            else:
                path = "/".join(parts[4:])
                content = files[path]
                if body:
                    fetched.append(path)
                headers = {"ETag": f'"{_digest(content)}"', "X-Repo-Commit": _commit(name)}
                self._send(200, content, headers, body)

        def _send(self, status: int, content: bytes, headers: dict[str, str], body: bool) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(key, value)
            self.end_headers()
            if body:
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Stay silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", fetched
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _commit(name: str) -> str:
    return _digest(name.encode())


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
