"""A real server that gives written replies over HTTP, for the rewards that ask an address."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Question = Mapping[str, Any]
Reply = tuple[int, str | bytes]  # a status and what is said; bytes are the whole body


class ReplyServer(ThreadingHTTPServer):
    """Answers the n-th question with the n-th reply, and all further ones with the last."""

    daemon_threads = True

    def __init__(self, body: Callable[[Question, str], bytes], first: Reply) -> None:
        """`body` of what a reply says, to a question."""
        super().__init__(("127.0.0.1", 0), _Handler)
        self.body = body
        self.replies = [first]
        self.headers: dict[str, str] = {}
        self.requests = 0  # of any method
        self.seen: list[tuple[str, dict[str, Any]]] = []  # path and question
        self.keys: list[str | None] = []
        self.drip = 0.0  # seconds between two bytes
        self.drips_all = False  # those of the headers, too
        self.dripped = 0

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: ReplyServer

    def parse_request(self) -> bool:
        self.server.requests += 1
        return super().parse_request()

    def do_POST(self) -> None:
        server, question = self.server, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.seen.append((self.path, question))
        server.keys.append(self.headers["Authorization"])
        status, said = server.replies[min(len(server.seen), len(server.replies)) - 1]
        body = said if isinstance(said, bytes) else server.body(question, said)
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **server.headers}.items():
            self.send_header(name, value)
        if server.drips_all:
            body = b"HTTP/1.0 200 OK\r\nContent-Length: 40\r\n" + b"X-Padding: much\r\n" * 8
        else:
            self.end_headers()
        with suppress(ConnectionError):  # the client has gone
            for at in range(len(body)) if server.drip else ():
                time.sleep(server.drip)
                self.wfile.write(body[at : at + 1])
                server.dripped += 1
        if not server.drip:
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing."""


@contextmanager
def serving(body: Callable[[Question, str], bytes], first: Reply) -> Iterator[ReplyServer]:
    server = ReplyServer(body, first)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
