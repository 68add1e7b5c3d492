"""A model that writes any bytes, the OpenAI server on it in the test's own event loop, and the real command."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from stretto.core.records import Completion, GenerateRequest
from stretto.engine.http.lifecycle import GracefulServer, bind, run_app
from stretto.engine.http.server import EngineApp
from stretto.engine.native.engine import NativeEngine
from stretto.engine.native.generation import Generation, SharedGeneration
from stretto.engine.openai.app import OpenAIApp
from stretto.engine.openai.translate import ServedModel
from stretto.model.hf.folder import quiet_transformers
from stretto.model.hf.tokenizer import load_tokenizer
from tests.engine.serving import Mailbox
from tests.launch.running import service
from tests.launch.warm import WarmCommand

ROOT = Path(__file__).parents[2]
NAME = "bytes"
CONTEXT = 256
VOCABULARY = 261
MODEL = ServedModel(NAME, CONTEXT, VOCABULARY)
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
)


def build_byte_policy(folder: Path) -> Path:
    """A tiny Llama over bytes: pieces of characters, whole words never."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: at for at, token in enumerate(["<pad>", "<s>", "</s>", *alphabet, "th", "the"])}
    backend = Backend(models.BPE(vocabulary, [("t", "h"), ("th", "e")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = CHAT_TEMPLATE
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=()), quiet_transformers():
        torch.manual_seed(5)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def generated(engine: NativeEngine, request: GenerateRequest) -> list[Completion]:
    """What the engine makes of a request by itself."""
    engine.add(request)
    ended: list[Completion] = []
    while not engine.idle:
        ended += engine.step()
    return sorted(ended, key=lambda completion: completion.member)


@asynccontextmanager
async def openai_served(
    engine: NativeEngine,
    folder: Path,
    mailbox: Mailbox | None = None,
    patience: float = 0.0,
    kind: type[Generation] = SharedGeneration,
    api_key: str = "",
) -> AsyncIterator[tuple[httpx.AsyncClient, GracefulServer]]:
    """An HTTP client of a running server, and that server."""
    generation = kind(engine, mailbox or Mailbox())
    tokens = EngineApp(generation)
    app = OpenAIApp(generation, MODEL, load_tokenizer(folder), tokens, api_key)
    server = GracefulServer(app, generation, keep_alive_seconds=60, patience=patience)
    listening = bind("127.0.0.1", 0, "--port")
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    running = asyncio.create_task(run_app(server, [listening], generation))
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
def serve_process(folder: Path, *arguments: str) -> Iterator[Serving]:
    """``stretto serve FOLDER --port 0 ARGUMENTS``, once it listens."""
    with service("serve", folder, "--port", "0", *arguments, serving="serving at ") as (process, said):
        yield Serving(process, said[-1].split()[-1].removesuffix("/v1"), said)


@contextmanager
def serve_cold(folder: Path, *arguments: str) -> Iterator[Serving]:
    """The same, in an interpreter of its own."""
    command = [sys.executable, "-m", "stretto.cli.main", "serve", str(folder), "--port", "0", *arguments]
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
