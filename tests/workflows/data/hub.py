"""A hub of datasets on this machine: what Hugging Face `datasets` asks of one over HTTP, of files in a folder."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "c0ffee" + "0" * 34
_INFO = re.compile(r"/api/datasets/(?P<repo>[^/]+/[^/]+)(/revision/[^/]+)?")
_TREE = re.compile(r"/api/datasets/(?P<repo>[^/]+/[^/]+)/tree/[^/]+(?P<under>/.*)?")
_PATHS = re.compile(r"/api/datasets/(?P<repo>[^/]+/[^/]+)/paths-info/[^/]+")
_FILE = re.compile(r"/datasets/(?P<repo>[^/]+/[^/]+)/resolve/[^/]+/(?P<path>.+)")


class _Hub(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    folder: Path

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if found := _FILE.fullmatch(path):
            self._file(self.folder / found["repo"] / found["path"])
        elif found := _TREE.fullmatch(path):
            here = self.folder / found["repo"] / (found["under"] or "").strip("/")
            self._tell([self._entry(found["repo"], path) for path in sorted(here.glob("*"))])
        elif (found := _INFO.fullmatch(path)) and (self.folder / found["repo"]).is_dir():
            names = [entry["path"] for entry in self._entries(found["repo"])]
            siblings = [{"rfilename": name} for name in names]
            self._tell({"id": found["repo"], "sha": COMMIT, "private": False, "tags": [], "siblings": siblings})
        else:
            self._absent()

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if found := _PATHS.fullmatch(self.path):
            paths = asked["paths"] if isinstance(asked["paths"], list) else [asked["paths"]]
            self._tell([entry for entry in self._entries(found["repo"]) if entry["path"] in paths])
        else:
            self._absent()

    def log_message(self, format: str, *words: object) -> None:
        """Nothing."""

    def _entries(self, repo: str) -> list[dict[str, object]]:
        return [self._entry(repo, path) for path in sorted((self.folder / repo).rglob("*")) if path.is_file()]

    def _entry(self, repo: str, path: Path) -> dict[str, object]:
        name = str(path.relative_to(self.folder / repo))
        if path.is_dir():
            return {"type": "directory", "path": name, "size": 0, "oid": COMMIT}
        return {"type": "file", "path": name, "size": path.stat().st_size, "oid": _digest(path)}

    def _file(self, path: Path) -> None:
        if not path.is_file():
            self._absent()
            return
        content = path.read_bytes()
        status, begin, end = 200, 0, len(content)
        if found := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("range", "")):
            status, begin = 206, int(found[1])
            end = min(end, int(found[2]) + 1) if found[2] else end
        self.send_response(status)
        self.send_header("etag", f'"{_digest(path)}"')
        self.send_header("x-repo-commit", COMMIT)
        self.send_header("accept-ranges", "bytes")
        if status == 206:
            self.send_header("content-range", f"bytes {begin}-{end - 1}/{len(content)}")
        self._end(content[begin:end])

    def _tell(self, told: object) -> None:
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self._end(json.dumps(told).encode())

    def _absent(self) -> None:
        self.send_response(404)
        self.send_header("x-error-code", "RepoNotFound" if "/api/" in self.path else "EntryNotFound")
        self._end(b"{}")

    def _end(self, body: bytes) -> None:
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _digest(path: Path) -> str:
    return hashlib.sha1(path.read_bytes(), usedforsecurity=False).hexdigest()


@contextmanager
def hub(folder: Path) -> Iterator[str]:
    """Its address, while it serves the datasets ``folder/OWNER/NAME``."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Hub", (_Hub,), {"folder": folder}))
    serving = threading.Thread(target=server.serve_forever, daemon=True)
    serving.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        serving.join()
        server.server_close()
