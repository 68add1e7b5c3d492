"""The part of W&B's server that `wandb sync` talks to, on loopback: GraphQL about runs, and the streams of their files.

A line of history has the place that the client gives it, as in W&B: a client that does not know what is there already
writes over it.
"""

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ENTITY = "someone"
_HISTORY = "wandb-history.jsonl"


@dataclass
class StoredRun:
    """What the server has of a run."""

    name: str
    project: str
    display_name: str = ""
    tags: list[str] = field(default_factory=list)
    config: str = "{}"
    summary: str = "{}"
    files: dict[str, dict[int, str]] = field(default_factory=dict)  # the lines of each by their places
    uploads: set[str] = field(default_factory=set)
    alerts: list[str] = field(default_factory=list)  # their titles

    @property
    def history(self) -> list[dict[str, Any]]:
        """Its lines, in their order."""
        return [json.loads(line) for _, line in sorted(self.files.get(_HISTORY, {}).items())]


class WandbServer(ThreadingHTTPServer):
    """Its runs, by their ids."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.runs: dict[str, StoredRun] = {}
        self.lock = threading.Lock()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, query: str, asked: dict[str, Any]) -> dict[str, Any]:
        """Of the questions of GraphQL those about runs; of all others nothing is known."""
        name = str(asked.get("name") or "")
        with self.lock:
            if "upsertBucket" in query:
                inserted = name not in self.runs
                run = self.runs.setdefault(name, StoredRun(name, str(asked.get("project"))))
                run.display_name = asked.get("displayName") or run.display_name
                run.tags = asked.get("tags") or run.tags
                run.config = asked.get("config") or run.config
                run.summary = asked.get("summaryMetrics") or run.summary
                return {"upsertBucket": {"bucket": _bucket(run), "inserted": inserted}}
            if "RunResumeStatus" in query:
                found = self.runs.get(name)
                owner = {"id": "model", "name": asked.get("project"), "entity": {"id": "entity", "name": ENTITY}}
                return {"model": {**owner, "bucket": found and _resumed(found)}}
            if "notifyScriptableRunAlert" in query:
                self.runs[str(asked["runName"])].alerts.append(str(asked["title"]))
                return {"notifyScriptableRunAlert": {"success": True}}
            if "createRunFiles" in query:
                host = f"{self.address}/upload/{asked['run']}"
                files = [{"name": one, "uploadUrl": f"{host}/{one}"} for one in asked["files"]]
                return {"createRunFiles": {"runID": asked["run"], "uploadHeaders": [], "files": files}}
        if "createArtifact" in query:  # of a table, whose file is uploaded as one of the run, too
            artifact = {"id": "artifact", "state": "COMMITTED", "artifactSequence": {"latestArtifact": None}}
            return {"createArtifact": {"artifact": artifact}}
        if "viewer" in query:
            return {"viewer": {"id": "viewer", "entity": ENTITY, "username": ENTITY, "flags": "{}", "teams": None}}
        return {}

    def streamed(self, run: str, sent: dict[str, Any]) -> None:
        """Take a piece of the stream of a run's files."""
        with self.lock:
            stored = self.runs[run]
            for name, piece in sent.get("files", {}).items():
                stored.files.setdefault(name, {}).update(enumerate(piece["content"], piece["offset"]))


def _bucket(run: StoredRun) -> dict[str, Any]:
    project = {"id": "project", "name": run.project, "entity": {"id": "entity", "name": ENTITY}}
    count = len(run.files.get(_HISTORY, {}))
    known = {"id": run.name, "name": run.name, "displayName": run.display_name, "config": run.config}
    return {**known, "description": "", "sweepName": None, "project": project, "historyLineCount": count}


def _resumed(run: StoredRun) -> dict[str, Any]:
    """A run as one that goes on with it has to know it."""

    def lines(name: str) -> list[str]:
        return [line for _, line in sorted(run.files.get(name, {}).items())]

    counts = {
        "history": len(lines(_HISTORY)),
        "events": len(lines("wandb-events.jsonl")),
        "log": len(lines("output.log")),
    }
    return {
        **_bucket(run),
        **{f"{name}LineCount": count for name, count in counts.items()},
        "historyTail": json.dumps(lines(_HISTORY)[-1:]),
        "eventsTail": json.dumps(lines("wandb-events.jsonl")[-1:]),
        "summaryMetrics": run.summary,
        "tags": run.tags,
        "notes": None,
        "wandbConfig": json.dumps({"t": 1}),
    }


class _Request(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: WandbServer

    def do_GET(self) -> None:
        self._reply({})

    def do_PUT(self) -> None:
        self._body()
        _, _, run, name = self.path.split("/", 3)
        with self.server.lock:
            self.server.runs[run].uploads.add(name)
        self._reply({})

    def do_POST(self) -> None:
        body = self._body()
        if self.path == "/graphql":
            sent = json.loads(body)
            self._reply({"data": self.server.answer(sent["query"], sent.get("variables") or {})})
        elif self.path.endswith("/file_stream"):
            self.server.streamed(self.path.split("/")[-2], json.loads(body))
            self._reply({"exitcode": None, "limits": {}})
        else:
            self._reply({})

    def _body(self) -> bytes:
        data = self.rfile.read(int(self.headers.get("content-length") or 0))
        return gzip.decompress(data) if self.headers.get("content-encoding") == "gzip" else data

    def _reply(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """A request is no news."""


@contextmanager
def wandb_server() -> Iterator[WandbServer]:
    """A server that has no run yet."""
    with WandbServer() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
