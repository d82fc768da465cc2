"""A small Hub on localhost: repositories at commits, redirects to blobs, ETags, ranges, and failures on demand."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

LARGE_BYTES = 1000  # files from here on lie behind a redirect, as large ones do on the Hub


@dataclass
class Repository:
    files: dict[str, bytes]
    gated: bool = False
    commit: str = ""

    def __post_init__(self) -> None:
        self.commit = self.commit or hashlib.sha1(repr(sorted(self.files.items())).encode()).hexdigest()


@dataclass
class SmallHub:
    """`failing` answers every request with this status; `cuts` ends the connection after so many bytes, once each."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    token: str = "hf_good"
    failing: int | None = None
    cuts: dict[str, int] = field(default_factory=dict)
    requests: Counter[str] = field(default_factory=Counter)
    ranges: list[str] = field(default_factory=list)
    sent_bytes: int = 0
    url: str = ""

    def add(self, name: str, files: dict[str, bytes], **about: object) -> Repository:
        self.repositories[name] = Repository(files, **about)  # type: ignore[arg-type]
        return self.repositories[name]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: SmallHub

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, body: bool) -> None:
        hub, path = self.hub, urlsplit(self.path).path
        hub.requests[f"{self.command} {path}"] += 1
        if hub.failing is not None:
            self._send(hub.failing, b"{}")
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+?)(?:/revision/(.+))?", path):
            self._info(match[1], match[2] or "main")
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._file(match[1], match[2], match[3], body)
        elif match := re.fullmatch(r"/blobs/([^/]+/[^/]+)/(.+)", path):
            self._bytes(hub.repositories[match[1]].files[match[2]], match[2], {}, body)
        else:
            self._send(404, b"")

    def _repository(self, name: str, revision: str) -> Repository | None:
        repository = self.hub.repositories.get(name)
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if given and given != self.hub.token:
            self._send(401, b'{"error": "Invalid credentials"}')
        elif repository is None:
            self._send(401 if not given else 404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif repository.gated and not given:
            self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif revision not in ("main", repository.commit):
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        else:
            return repository
        return None

    def _info(self, name: str, revision: str) -> None:
        if repository := self._repository(name, revision):
            siblings = [{"rfilename": file, "size": len(data)} for file, data in repository.files.items()]
            about = {"id": name, "modelId": name, "sha": repository.commit, "siblings": siblings, "tags": []}
            self._send(200, json.dumps(about | {"private": False, "downloads": 0, "likes": 0}).encode())

    def _file(self, name: str, revision: str, file: str, body: bool) -> None:
        repository = self._repository(name, revision)
        if repository is None:
            return
        commit = {"X-Repo-Commit": repository.commit}
        if file not in repository.files:
            self._send(404, b"{}", {**commit, "X-Error-Code": "EntryNotFound"})
            return
        data = repository.files[file]
        etag = f'"{hashlib.sha256(data).hexdigest()}"'
        if len(data) < LARGE_BYTES:
            self._bytes(data, file, {**commit, "ETag": etag}, body)
            return
        # Blobs lie on another host, as the Hub's do; the headers that count are then those of the redirect.
        blobs = self.hub.url.replace("127.0.0.1", "localhost")
        linked = {
            "X-Linked-Etag": etag,
            "X-Linked-Size": str(len(data)),
            "Location": f"{blobs}/blobs/{name}/{file}",
        }
        self._send(302, b"", {**commit, **linked})

    def _bytes(self, data: bytes, file: str, headers: dict[str, str], body: bool) -> None:
        status, start, end = 200, 0, len(data)
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            self.hub.ranges.append(wanted[0])
            start, end = int(wanted[1]), min(int(wanted[2] or len(data) - 1) + 1, len(data))
            status, headers = 206, {**headers, "Content-Range": f"bytes {start}-{end - 1}/{len(data)}"}
        part = data[start:end]
        self.send_response(status)
        for name, value in {"Accept-Ranges": "bytes", **headers, "Content-Length": str(len(part))}.items():
            self.send_header(name, value)
        self.end_headers()
        if not body:
            return
        cut = self.hub.cuts.pop(file, None)
        part = part if cut is None else part[:cut]
        self.hub.sent_bytes += len(part)
        self.wfile.write(part)
        if cut is not None:
            self.wfile.flush()
            self.connection.close()

    def _send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


@contextmanager
def small_hub() -> Iterator[SmallHub]:
    hub = SmallHub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
