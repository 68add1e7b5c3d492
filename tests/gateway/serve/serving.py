"""`stretto serve` of a model that writes any bytes: in the test's own event loop, and as the real command."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from stretto.core.tasks import cancel_and_wait
from stretto.engine.config import EngineConfig
from stretto.engine.http.lifecycle import GracefulServer, run_app
from stretto.engine.http.server import run_server
from stretto.engine.native.engine import NativeEngine
from stretto.model.hf.tokenizer import Tokenizer, load_tokenizer
from stretto.processes.http.reach import bind
from stretto.store.lock import let_go, temporary_folder
from stretto_app.extensions.commands.serve import rule_of
from stretto_gateway.model import ServedModel
from stretto_gateway.serve.app import ServeApp
from stretto_gateway.serve.remote import RemoteEngine
from tests.asynchronous import until
from tests.engine.byte_policy import CONTEXT, NAME, VOCABULARY
from tests.engine.serving import Mailbox
from tests.launch.running import service
from tests.launch.warm import WarmCommand

ROOT = Path(__file__).parents[3]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def engine_of(folder: Path, slots: int = 8) -> NativeEngine:
    return NativeEngine.load(folder, EngineConfig(slots=slots), name="engine-0")


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": NAME, "prompt": "ab", "seed": 3, "max_tokens": 200, **fields}


def served_model(tokenizer: Tokenizer) -> ServedModel:
    """The model as ``stretto serve`` has it."""
    rule = rule_of(tokenizer, CONTEXT, grammars=True, seeds=True, vocabulary=VOCABULARY)
    return ServedModel(NAME, tokenizer, rule, reasoning=False)


@asynccontextmanager
async def remote_engine(
    engine: NativeEngine, mailbox: Mailbox | None = None
) -> AsyncIterator[tuple[RemoteEngine, str]]:
    """A client of the engine, which listens in the test's own event loop, and its address; the client does not run
    yet."""
    folder, held = temporary_folder()
    address = f"unix:{folder}/e.sock"
    listening = asyncio.create_task(run_server(engine, mailbox or Mailbox(), address))
    await until(lambda: os.path.exists(f"{folder}/e.sock"), 0)  # else the client would come a tenth of a second later
    try:
        yield RemoteEngine("engine-0", address), address
    finally:
        await cancel_and_wait([listening])
        let_go(folder, held)


@asynccontextmanager
async def running_engine(engine: NativeEngine) -> AsyncIterator[RemoteEngine]:
    """A client of the engine that receives tokens."""
    async with remote_engine(engine) as (remote, _):
        receiving = asyncio.create_task(remote.run())
        try:
            yield remote
        finally:
            await cancel_and_wait([receiving])


@asynccontextmanager
async def served_engine(
    engine: NativeEngine, folder: Path, mailbox: Mailbox | None = None, patience: float = 0.0, api_key: str = ""
) -> AsyncIterator[tuple[httpx.AsyncClient, GracefulServer]]:
    """An HTTP client of a running server, and that server."""
    async with remote_engine(engine, mailbox) as (remote, _):
        app = ServeApp(remote, served_model(load_tokenizer(folder)), remote.pass_on, api_key=api_key)
        server = GracefulServer(app, remote, patience=patience)
        listening = bind("127.0.0.1", 0, ("--host", "--port"))
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        running = asyncio.create_task(run_app(server, [listening], remote.run))
        try:
            while not server.started:
                await asyncio.sleep(0)
            async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False, verify=False) as client:
                yield client, server
        finally:
            server.should_exit = True
            await asyncio.wait([running], timeout=20)
    engine.check_integrity()


@dataclass(frozen=True)
class Serving:
    """A process of ``stretto serve``."""

    process: subprocess.Popen[str] | WarmCommand
    url: str
    said: list[str]  # before it served

    def post(self, path: str, body: Any) -> httpx.Response:
        """`body` as JSON, or as it is if it is bytes."""
        content = {"content": body} if isinstance(body, bytes) else {"json": body}
        # Nothing is encrypted here; to read the certificates would take ten times as long as the request.
        return httpx.post(self.url + path, timeout=30, trust_env=False, verify=False, **content)


@contextmanager
def serve_process(folder: Path, *arguments: str, poor: Sequence[str] = ()) -> Iterator[Serving]:
    """``stretto serve FOLDER --port 0 ARGUMENTS``, once it listens."""
    with service("serve", folder, "--port", "0", *arguments, serving="serving at ", poor=poor) as (process, said):
        yield Serving(process, said[-1].split()[-1].removesuffix("/v1"), said)


@contextmanager
def serve_cold(folder: Path, *arguments: str, before: Sequence[str] = ()) -> Iterator[Serving]:
    """The same, in an interpreter of its own: ``BEFORE python -m ...``."""
    command = [*before, sys.executable, "-m", "stretto_app.cli.main", "serve", str(folder), "--port", "0", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    try:
        lines = iter(process.stdout.readline, "")
        said = list[str]()
        while not (said and said[-1].startswith("serving at ")):
            if not (line := next(lines, "")):
                raise AssertionError(process.communicate(timeout=30)[1])
            said.append(line)
        yield Serving(process, said[-1].split()[-1].removesuffix("/v1"), said)
    finally:
        process.kill()
        process.communicate(timeout=30)
