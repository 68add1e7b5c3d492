"""Cost of `stretto gateway` beside the engine: many agents at the same time, each with a conversation of several
turns.

    python -m benchmarks.gateway                       1, 32 and 256 sessions at once
    python -m benchmarks.gateway --sessions 256 --turns 8

Every agent opens a session and sends its next request as soon as it gets a reply, with its whole history, a system
prompt and three tools. Answers have 32 tokens, and every token is recorded in a file. It is measured twice: with a
model that answers at once, so that the process does only the gateway's work (*CPU*: CPU time of one call, which other
work on the machine disturbs less; *call*: time that a client waits); and with a Llama of two layers in an engine
process, as in `stretto gateway`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvloop
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from benchmarks.report import Table, save
from stretto.core.records import Completion, GenerateRequest, Segment, StopReason
from stretto.engine.http.connections import Connections
from stretto.model.hf.folder import quiet_transformers
from stretto.model.hf.tokenizer import load_tokenizer
from stretto.processes.tree import cpu_ticks
from stretto_app.extensions.commands.gateway import session_model
from stretto_gateway.app import serving_beside
from stretto_gateway.sessions.app import GatewayApp
from stretto_gateway.sessions.sessions import RecordedSessions, SessionTable
from stretto_workflows.session import WholeTurns

SESSIONS = (1, 32, 256)
TURNS, NEW_TOKENS, CONTEXT, SLOTS = 6, 32, 8192, 256
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>{{ '\\n' }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{{ '\\n' }}{% endif %}"
)
SYSTEM = "You are an agent that works with tools and answers in one sentence. " * 8
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} two numbers",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
    for name in ("add", "subtract", "multiply")
]


def build(folder: Path) -> Path:
    """Write a tiny Llama over bytes, with a chat template, to `folder`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({token: at for at, token in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<|im_start|>", "<|im_end|>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=()), quiet_transformers():
        torch.manual_seed(5)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class InstantModel:
    """Model that answers at once (implements `core.engine.Generate`)."""

    async def __call__(self, *requests: GenerateRequest) -> AsyncIterator[Completion]:
        for request in requests:
            tokens = tuple(97 + (request.seeds[0] + at) % 26 for at in range(NEW_TOKENS))
            yield Completion(
                request.id,
                0,
                Segment.of(
                    token_ids=tokens,
                    behavior_logprobs=(-1.0,) * NEW_TOKENS,
                    versions=(0,) * NEW_TOKENS,
                    stop_reason=StopReason.LENGTH,
                ),
            )


def serve_instantly(model: Path, folder: Path) -> None:
    """Run a gateway with `InstantModel` in this process."""
    served = session_model("tiny", load_tokenizer(model), CONTEXT)
    folder.mkdir()
    generate = InstantModel()
    host = RecordedSessions(folder, served, lambda name, record: WholeTurns(generate, record, name))
    app = GatewayApp(SessionTable(), host, served)

    async def serve() -> None:
        async with serving_beside(app, socket.create_server(("127.0.0.1", 0))) as address:
            print(f"gateway at {address}", flush=True)
            await asyncio.Event().wait()  # until the benchmark ends the process

    uvloop.run(serve())


@contextlib.contextmanager
def served(model: Path, sessions: Path, *, instantly: bool) -> Iterator[tuple[int, str]]:
    """Start a gateway process for the block; yields its pid and its address. `instantly`: with `InstantModel`, else
    with the engine."""
    ours = ["benchmarks.gateway", "--serve", str(model), str(sessions)]
    users = ["stretto_app.cli.main", "gateway", str(model), "--port", "0", "--folder", str(sessions)]
    command = [sys.executable, "-m", *(ours if instantly else [*users, f"engine.slots={SLOTS}"])]
    surroundings = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=surroundings) as process:
        assert process.stdout is not None
        try:
            address = next(line.split("//")[1].strip() for line in process.stdout if line.startswith("gateway at "))
            yield process.pid, address
        finally:
            process.terminate()


class Agents:
    """Clients of a gateway."""

    def __init__(self, address: str, model: str) -> None:
        self._connections, self._model = Connections("the gateway", address), model
        self.seconds: list[float] = []  # of each call

    async def run(self, count: int, turns: int) -> list[dict[str, Any]]:
        """Hold `count` conversations at the same time; return their sessions as the gateway shows them."""
        opened = [await self._exchange("POST", "/sessions", {"task": {}}) for _ in range(count)]
        self.seconds.clear()
        await asyncio.gather(*(self._converse(session, turns) for session in opened))
        return opened

    async def shown(self, opened: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Sessions with their nodes, as the gateway shows them."""
        return [await self._exchange("GET", f"/sessions/{session['id']}", None) for session in opened]

    async def _converse(self, session: dict[str, Any], turns: int) -> None:
        messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
        for turn in range(turns):
            messages.append({"role": "user", "content": f"{turn}: how much is it by now? " * 4})
            body = {"model": self._model, "messages": messages, "tools": TOOLS, "max_tokens": NEW_TOKENS}
            start = time.perf_counter()
            reply = await self._exchange("POST", f"/s/{session['api_key']}/v1/chat/completions", body)
            self.seconds.append(time.perf_counter() - start)
            messages.append(reply["choices"][0]["message"])

    async def _exchange(self, method: str, path: str, body: Any) -> Any:
        async with self._connections.one() as connection:
            connection.send(method, path, b"" if body is None else json.dumps(body).encode())
            parts = []
            while part := await connection.read():
                parts.append(part)
            assert connection.status == 200, b"".join(parts)
            return json.loads(b"".join(parts))


def measure(sessions: Sequence[int], turns: int) -> list[dict[str, Any]]:
    """One row for each number of sessions, with each model."""
    rows: list[dict[str, Any]] = []
    table = Table("model", "sessions", "calls", "calls/s", "CPU ms", "call p50 ms", "call p99 ms")
    with tempfile.TemporaryDirectory(prefix="stretto-benchmark-") as place:
        model = build(Path(place) / "tiny")
        for kind in ("instant", "two layers"):
            with served(model, Path(place) / kind, instantly=kind == "instant") as (pid, address):
                asyncio.run(Agents(address, "tiny").run(8, 3))
                for count in sessions:
                    rows.append({"model": kind, **row(Agents(address, "tiny"), pid, count, turns)})
                    table.add(*rows[-1].values())
                    table.show_last()
    return rows


def row(agents: Agents, pid: int, count: int, turns: int) -> dict[str, Any]:
    """Measure one number of sessions."""

    async def run() -> tuple[list[dict[str, Any]], float, int]:
        cpu, start = cpu_ticks(pid), time.perf_counter()
        opened = await agents.run(count, turns)
        wall, cpu = time.perf_counter() - start, cpu_ticks(pid) - cpu
        return await agents.shown(opened), wall, cpu

    shown, wall, ticks = asyncio.run(run())
    calls, milliseconds = count * turns, [1000 * seconds for seconds in agents.seconds]
    assert all(session["samples"] == [list(range(2 * turns))] for session in shown)
    return {
        "sessions": count,
        "calls": calls,
        "calls_per_second": round(calls / wall, 1),
        "cpu_ms": round(10 * ticks / calls, 3),
        "call_ms_p50": round(float(np.percentile(milliseconds, 50)), 2),
        "call_ms_p99": round(float(np.percentile(milliseconds, 99)), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", nargs="+", type=int, default=SESSIONS, help="at once")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--serve", nargs=2, type=Path, help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.serve:
        serve_instantly(*words.serve)
        return
    torch.set_num_threads(1)
    rows = measure(words.sessions, words.turns)
    save("gateway", {"turns": words.turns, "new_tokens": NEW_TOKENS, "slots": SLOTS, "rows": rows})


if __name__ == "__main__":
    main()
