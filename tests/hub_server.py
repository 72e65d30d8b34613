"""A small HTTP server with the Hub's endpoints, for one repository in a directory; nothing leaves this machine."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

REPO = "demo-org/tiny-hybrid"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubServer:
    """Serves `directory` as REPO at every revision in `revisions`. `requests` notes (method, path, Range header).

    `cut_after` says for a file's name after how many of its bytes the connection is lost; `cuts` how often that happens.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.revisions = {"main": COMMIT, COMMIT: COMMIT}
        self.requests: list[tuple[str, str, str | None]] = []
        self.cut_after: dict[str, int] = {}
        self.cuts = 1_000_000
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                server.answer(self, body=False)

            def do_GET(self) -> None:
                server.answer(self, body=True)

            def log_message(self, *args: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def downloaded(self) -> list[str]:
        """Names of the files whose bodies were asked for, in order."""
        return [path.rsplit("/", 1)[-1] for method, path, _ in self.requests if method == "GET" and "/resolve/" in path]

    def answer(self, handler: BaseHTTPRequestHandler, *, body: bool) -> None:
        path = unquote(urlsplit(handler.path).path)
        self.requests.append((handler.command, path, handler.headers.get("Range")))
        if found := re.fullmatch(rf"/api/models/{REPO}(?:/revision/([^/]+))?", path):
            self._json(handler, found[1] or "main", lambda commit: {"id": REPO, "sha": commit, "siblings": self._siblings()})
        elif found := re.fullmatch(rf"/api/models/{REPO}/tree/([^/]+)", path):
            self._json(handler, found[1], lambda commit: self._tree())
        elif found := re.fullmatch(rf"/{REPO}/resolve/([^/]+)/(.+)", path):
            self._file(handler, found[1], found[2], body)
        else:
            self._missing(handler, "RepoNotFound")

    def _files(self) -> list[Path]:
        return sorted(path for path in self.directory.iterdir() if path.is_file())

    def _siblings(self) -> list[dict[str, object]]:
        return [{"rfilename": path.name, "size": path.stat().st_size} for path in self._files()]

    def _tree(self) -> list[dict[str, object]]:
        return [{"type": "file", "path": p.name, "size": p.stat().st_size, "oid": _etag(p)} for p in self._files()]

    def _json(self, handler, revision, make) -> None:
        commit = self.revisions.get(revision)
        if commit is None:
            self._missing(handler, "RevisionNotFound")
            return
        data = json.dumps(make(commit)).encode()
        handler.send_response(200)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    def _file(self, handler, revision: str, name: str, body: bool) -> None:
        path = self.directory / name
        if revision not in self.revisions or not path.is_file():
            self._missing(handler, "EntryNotFound" if revision in self.revisions else "RevisionNotFound")
            return
        data, start = path.read_bytes(), 0
        if found := re.fullmatch(r"bytes=(\d+)-(\d*)", handler.headers.get("Range") or ""):
            start = int(found[1])
        handler.send_response(206 if start else 200)
        if start:
            handler.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        handler.send_header("Content-Length", str(len(data) - start))
        handler.send_header("ETag", f'"{_etag(path)}"')
        handler.send_header("X-Repo-Commit", self.revisions[revision])
        handler.send_header("Accept-Ranges", "bytes")
        handler.end_headers()
        if body and name in self.cut_after and self.cuts > 0:
            self.cuts -= 1
            handler.wfile.write(data[start : max(start, self.cut_after[name])])
            handler.close_connection = True
        elif body:
            handler.wfile.write(data[start:])

    def _missing(self, handler, code: str) -> None:
        handler.send_response(404)
        handler.send_header("X-Error-Code", code)
        handler.send_header("Content-Length", "0")
        handler.end_headers()


def _etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()
