"""`stretto serve` under load: completions streamed to several clients at once, and the share of the engine's own speed
that remains.

    python -m benchmarks.serving                                   1, 16 and 64 streams at once
    python -m benchmarks.serving --model 48M --concurrency 64 --rounds 2

Each client sends its next request as soon as its answer has ended (prompts of 32 tokens, 64 to 192 new ones, streamed
token by token, so that answers begin and end at different times, as with independent clients). The engine alone does
the same requests, equally many at a time, in this process, that of the clients; the server is two more. Times are those
that a client sees: to the first token of an answer, and between its tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.generators import prompts
from benchmarks.report import Table, save
from benchmarks.shapes import SHAPES, make
from stretto.core.records import GenerateRequest, Sampling
from stretto.engine.config import EngineConfig
from stretto.engine.http.connections import Connections
from stretto.engine.native.engine import NativeEngine
from stretto.model.hf.folder import inspect_model_folder
from stretto.model.hf.tokenizer import load_tokenizer

SHORTEST, LONGEST = 64, 192  # tokens of an answer, if it does not end by itself
SLOTS = 64
CONCURRENCY = (1, 16, 64)
FEWEST_REQUESTS = 24

Prompts = Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class Answered:
    """One answer, as a client saw it."""

    tokens: int
    first: float  # seconds to the first token
    rest: float  # seconds from the first token to the last


class Load:
    """Clients that share a list of prompts, each with its own connection."""

    def __init__(self, address: str, model: str) -> None:
        self._connections, self._model = Connections("the server", address), model

    async def run(self, asked: Prompts, concurrency: int) -> tuple[list[Answered], float]:
        """Get all answers; returns them and the seconds until the last one ended."""
        left = iter(enumerate(asked))

        async def client() -> list[Answered]:
            return [await self._ask(number, prompt) for number, prompt in left]

        start = time.perf_counter()
        answered = await asyncio.gather(*(client() for _ in range(concurrency)))
        return [each for one in answered for each in one], time.perf_counter() - start

    async def _ask(self, seed: int, prompt: tuple[int, ...]) -> Answered:
        fields = {"model": self._model, "prompt": prompt, "max_tokens": length(seed), "seed": seed}
        body = json.dumps(fields | {"stream": True, "stream_options": {"include_usage": True}}).encode()
        async with self._connections.one() as connection:
            start = time.perf_counter()
            connection.send("POST", "/v1/completions", body)
            told, first, last = bytearray(), 0.0, 0.0
            while part := await connection.read():
                last = time.perf_counter()
                first = first or last
                told += part
        usage = json.loads(told.rsplit(b"data: ", 2)[1])["usage"]
        return Answered(usage["completion_tokens"], first - start, last - first)


def length(number: int) -> int:
    """Maximum number of tokens of answer `number`."""
    return random.Random(number).randint(SHORTEST, LONGEST)


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Start a server in its own process, and yield its address."""
    command = [
        sys.executable,
        "-m",
        "stretto_app.cli.main",
        "serve",
        str(folder),
        "--port",
        "0",
        f"engine.slots={SLOTS}",
    ]
    surroundings = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=surroundings) as process:
        assert process.stdout is not None
        try:
            yield next(line.split("//")[1].split("/")[0] for line in process.stdout if line.startswith("serving at "))
        finally:
            process.terminate()


def engine_alone(engine: NativeEngine, ends: tuple[int, ...], asked: Prompts, concurrency: int) -> float:
    """Tokens per second for the same requests without a server."""
    left = iter(enumerate(asked))
    tokens, running, start = 0, 0, time.perf_counter()
    while True:
        for number, prompt in islice(left, concurrency - running):
            sampling = Sampling(max_tokens=length(number), stop_token_ids=ends)
            engine.add(GenerateRequest(id=str(number), prompt_token_ids=prompt, seeds=(number,), sampling=sampling))
            running += 1
        if not running:
            return tokens / (time.perf_counter() - start)
        for completion in engine.step():
            tokens += len(completion.token_ids)
            running -= 1


def measure(model: str, concurrency: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """A row for each number of streams."""
    rows: list[dict[str, Any]] = []
    columns = ("requests/s", "tokens/s", "engine alone", "fraction", "first p50", "first p99", "token p50", "token p99")
    table = Table("streams", *columns)
    with tempfile.TemporaryDirectory(prefix="stretto-benchmark-") as place:
        folder = make(model, Path(place))
        engine = NativeEngine.load(folder, EngineConfig(slots=SLOTS))
        ends, vocabulary = load_tokenizer(folder).eos_token_ids, inspect_model_folder(folder).vocab_size
        with serving(folder) as address:
            for count in concurrency:
                asked = prompts(max(FEWEST_REQUESTS, rounds * count), vocabulary)
                engine_alone(engine, ends, asked[: 2 * count], count)  # the first steps of a size cost more
                asyncio.run(Load(address, model).run(asked[: 2 * count], count))
                alone = engine_alone(engine, ends, asked, count)
                rows.append(row(count, *asyncio.run(Load(address, model).run(asked, count)), alone))
                table.add(*rows[-1].values())
                table.show_last()
    return rows


def markdown(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The rows as docs/how_to/gateway.md shows them."""
    return [
        f"| {each['streams']} | {each['requests_per_second']:.1f} | {each['tokens_per_second']:,.0f} "
        f"| {each['engine_alone']:,.0f} | {each['fraction']:.3f} "
        f"| {each['first_token_ms_p50']:.1f} / {each['first_token_ms_p99']:.1f} "
        f"| {each['per_token_ms_p50']:.1f} / {each['per_token_ms_p99']:.1f} |"
        for each in rows
    ]


def row(count: int, answered: Sequence[Answered], seconds: float, alone: float) -> dict[str, Any]:
    """Results for one number of streams; times are in milliseconds."""
    tokens = sum(each.tokens for each in answered)
    first = [1000 * each.first for each in answered]
    later = [1000 * each.rest / (each.tokens - 1) for each in answered if each.tokens > 1]
    return {
        "streams": count,
        "requests_per_second": round(len(answered) / seconds, 2),
        "tokens_per_second": round(tokens / seconds, 1),
        "engine_alone": round(alone, 1),
        "fraction": round(tokens / seconds / alone, 3),
        "first_token_ms_p50": round(float(np.percentile(first, 50)), 2),
        "first_token_ms_p99": round(float(np.percentile(first, 99)), 2),
        "per_token_ms_p50": round(float(np.percentile(later, 50)), 2),
        "per_token_ms_p99": round(float(np.percentile(later, 99)), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(SHAPES), default="3.4M")
    parser.add_argument("--concurrency", nargs="+", type=int, default=CONCURRENCY)
    parser.add_argument("--rounds", type=int, default=8, help="answers that each client asks for")
    words = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(words.model, words.concurrency, words.rounds)
    save(
        "serving",
        {"model": words.model, "prompt_tokens": 32, "new_tokens": [SHORTEST, LONGEST], "slots": SLOTS, "rows": rows},
    )


if __name__ == "__main__":
    main()
