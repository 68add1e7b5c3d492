"""The native engine against what a user would use instead, on this machine, one thread each.

    python -m benchmarks.generation rates                 every size, type and number of sequences
    python -m benchmarks.generation rates --models 3.4M --dtypes float32 --sequences 1 64 --systems stretto vllm
    python -m benchmarks.generation tail                  long-tailed lengths against static batches of the same engine
    python -m benchmarks.generation pause                 what a weight update costs running answers
    python -m benchmarks.generation all

The peers: transformers' `generate` and `generate_batch`; and, in environments that the benchmark creates, vLLM's CPU
build, OpenVINO GenAI and llama.cpp. A peer whose environment cannot be created is skipped with a message. The systems
run one after the other, and each answers everything three times. The fastest pass counts, because the first use of
memory is slow. A pass with a wrong number of tokens is no result. If the passes differ by half or more, the result has
all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.generators import SYSTEMS, prompts
from benchmarks.peers.environment import HERE as PEERS
from benchmarks.peers.environment import Environment, PeerUnavailable
from benchmarks.report import Table, save
from benchmarks.shapes import SHAPES, make
from stretto.core.records import GenerateRequest, Sampling
from stretto.engine.config import EngineConfig
from stretto.engine.native.engine import NativeEngine
from stretto.model.decode.policy import CACHED_ATTENTION
from stretto.model.hf.folder import load_policy

TOKENS = 192
SEQUENCES = (1, 16, 64, 128, 256)
DTYPES = ("float32", "bfloat16")
#: Scripts of systems that run in an environment of their own.
APART = {"vllm": "vllm_generate.py", "openvino": "openvino_generate.py", "llamacpp": "llamacpp_generate.py"}
EVERY_SYSTEM = (*SYSTEMS, *APART)
TAIL_REQUESTS, TAIL_AT_ONCE, TAIL_MEDIAN, TAIL_LONGEST = 1000, 64, 50, 500
RUNNING = 64
SECONDS = 1500
#: The most sequences at once that a slow system is asked for: a minute says enough.
MOST = {"transformers generate_batch": 64}


def rates(
    models: Sequence[str], dtypes: Sequence[str], sequences: Sequence[int], systems: Sequence[str], tokens: int
) -> list[dict[str, Any]]:
    """Tokens per second of each system, model, dtype and number of sequences."""
    rows: list[dict[str, Any]] = []
    table = Table("model", "type", "system", *(f"{count} sequences" for count in sequences))
    with tempfile.TemporaryDirectory(prefix="stretto-benchmark-") as folder:
        for model in models:
            path = make(model, Path(folder))
            for dtype in dtypes:
                for system in systems:
                    asked = [count for count in sequences if count <= MOST.get(system, count)]
                    row: dict[str, Any] = {"model": model, "dtype": dtype, "system": system, "tokens": tokens}
                    row |= _rate(system, path, dtype, asked, tokens)
                    rows.append(row)
                    cells = [row["rates"].get(str(count), row.get("failed", "")[:40]) for count in sequences]
                    table.add(model, dtype, system, *cells)
                    table.show_last()
    return rows


def _rate(system: str, model: Path, dtype: str, sequences: Sequence[int], tokens: int) -> dict[str, Any]:
    words = [str(model), "--dtype", dtype, "--tokens", str(tokens), "--sequences", *map(str, sequences)]
    try:
        rows = _apart(system, words) if system in APART else _ours(system, words)
    except (PeerUnavailable, subprocess.TimeoutExpired) as failure:
        return {"rates": {}, "failed": str(failure)[-300:]}
    rates = {str(row["sequences"]): round(row["tokens"] / row["seconds"], 1) for row in rows}
    unsteady = {
        str(row["sequences"]): row["passes"] for row in rows if statistics.median(row["passes"]) > 1.5 * row["seconds"]
    }
    return {"rates": rates} | ({"unsteady_seconds": unsteady} if unsteady else {})


def _apart(system: str, words: list[str]) -> list[dict[str, Any]]:
    measured = Environment(system).measure(PEERS / APART[system], *words, threads=1, seconds=SECONDS)
    rows: list[dict[str, Any]] = measured["rows"]
    return rows


def _ours(system: str, words: list[str]) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "benchmarks.generators", system, *words]
    surroundings = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=SECONDS, env=surroundings, cwd=PEERS.parent.parent
    )
    if done.returncode:
        raise PeerUnavailable(done.stderr.strip()[-300:])
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def tail(model: str) -> dict[str, Any]:
    """Useful tokens per second of continuous batching, against batches that wait for their longest answer.

    In a static batch, an ended row is computed until the longest has ended, as in transformers' `generate`; its further
    tokens are not useful. The native engine would leave such rows out: batches that only wait are the third way.
    """
    chance = random.Random(3)
    spread = 2.303 / 3.09  # the longest of 1,000 log-normal lengths is about 10 times their median
    drawn = (round(TAIL_MEDIAN * chance.lognormvariate(0, spread)) for _ in range(TAIL_REQUESTS))
    lengths = [min(TAIL_LONGEST, max(1, length)) for length in drawn]
    with tempfile.TemporaryDirectory(prefix="stretto-benchmark-") as folder:
        path = make(model, Path(folder))
        lots = [lengths[first : first + TAIL_AT_ONCE] for first in range(0, len(lengths), TAIL_AT_ONCE)]
        measured = {
            "continuous": _tail(path, [lengths], lengths),
            "static": _tail(path, [[max(lot)] * len(lot) for lot in lots], lengths),
            "waiting": _tail(path, lots, lengths),
        }
    table = Table("batching", "tokens/s")
    for name, rate in measured.items():
        table.add(name, round(rate, 1))
    table.show()
    return {"model": model, "longest": max(lengths), "median": statistics.median(lengths)} | {
        "tokens_per_second": measured,
        "ratio": round(measured["continuous"] / measured["static"], 3),
        "ratio_to_waiting": round(measured["continuous"] / measured["waiting"], 3),
    }


def _tail(model: Path, lots: Sequence[Sequence[int]], useful: Sequence[int]) -> float:
    """Useful tokens per second of answers of these lengths. The next of the `lots` is submitted when the engine is
    idle."""
    engine = _engine(model, TAIL_AT_ONCE)
    asked = iter(enumerate(prompts(len(useful), 1024)))
    start = time.perf_counter()
    for lot in lots:
        for length in lot:
            number, prompt = next(asked)
            sampling = Sampling(max_tokens=length)
            engine.add(GenerateRequest(id=str(number), prompt_token_ids=prompt, seeds=(number,), sampling=sampling))
        while not engine.idle:
            engine.step()
    return sum(useful) / (time.perf_counter() - start)


def pause(models: Sequence[str]) -> list[dict[str, Any]]:
    """With 64 running answers: the pause of one update, and tokens per second with one update per second."""
    rows: list[dict[str, Any]] = []
    table = Table("model", "load ms", "memory copy ms", "recompute pause ms", "recompute tokens/s", "keep tokens/s")
    with tempfile.TemporaryDirectory(prefix="stretto-benchmark-") as folder:
        for model in models:
            path = make(model, Path(folder))
            load, copy = _load_and_copy(path)
            row = {"model": model, "load_ms": load, "copy_ms": copy, "pause_ms": _pause(path)}
            row |= {f"{mode}_tokens_per_second": _updated(path, mode) for mode in ("recompute", "keep")}
            rows.append(row)
            table.add(*(round(value, 1) if isinstance(value, float) else value for value in row.values()))
            table.show_last()
    return rows


def _load_and_copy(model: Path) -> tuple[float, float]:
    """Milliseconds to load weights into the engine, and to copy as many bytes within memory."""
    engine = _engine(model, RUNNING)
    tensors = {name: value.clone() for name, value in load_policy(model).named_parameters()}
    flat = torch.cat([value.detach().flatten() for value in tensors.values()])
    target = torch.empty_like(flat)
    loads = [_milliseconds(lambda version=version: engine.update(version, tensors)) for version in range(1, 8)]
    copies = [_milliseconds(lambda: target.copy_(flat)) for _ in range(7)]
    return statistics.median(loads), statistics.median(copies)


def _pause(model: Path) -> float:
    """Milliseconds between two tokens of a running answer across an update that recomputes the KV cache, minus a usual
    step."""
    engine = _running(model, "recompute")
    tensors = dict(load_policy(model).named_parameters())
    usual = statistics.median(_milliseconds(engine.step) for _ in range(20))

    def interrupted() -> None:
        engine.update(engine.version + 1, tensors)
        before = engine.health().running
        engine.step()
        assert engine.health().running == before, "all answers go on"

    return statistics.median(_milliseconds(interrupted) for _ in range(5)) - usual


def _updated(model: Path, on_update: str) -> float:
    """Tokens per second over ten seconds with an update each second."""
    engine = _running(model, on_update)
    tensors = dict(load_policy(model).named_parameters())
    before, start = engine.health().generated, time.perf_counter()
    due = start + 1
    while (now := time.perf_counter()) < start + 10:
        if now >= due:
            engine.update(engine.version + 1, tensors)
            due += 1
        engine.step()
    return (engine.health().generated - before) / (time.perf_counter() - start)


def _running(model: Path, on_update: str) -> NativeEngine:
    """An engine with 64 running answers of 64 tokens, which do not end soon."""
    engine = _engine(model, RUNNING, on_update)
    for number, prompt in enumerate(prompts(RUNNING, 1024)):
        sampling = Sampling(max_tokens=1900)
        engine.add(GenerateRequest(id=str(number), prompt_token_ids=prompt, seeds=(number,), sampling=sampling))
    for _ in range(64):
        engine.step()
    return engine


def _engine(model: Path, slots: int, on_update: str = "recompute") -> NativeEngine:
    config = EngineConfig.model_validate({"slots": slots, "on_update": on_update, "max_prefill_tokens": 1 << 20})
    return NativeEngine(load_policy(model, attention=CACHED_ATTENTION), config)


def _milliseconds(work: Any) -> float:
    start = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("rates", "tail", "pause", "all"))
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--sequences", nargs="+", type=int, default=SEQUENCES)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each answer of `rates`")
    parser.add_argument("--systems", nargs="+", choices=EVERY_SYSTEM, default=EVERY_SYSTEM)
    words = parser.parse_args()
    torch.set_num_threads(1)
    if words.part in ("rates", "all"):
        for model in words.models:
            save(
                f"generation-rates-{model}", rates([model], words.dtypes, words.sequences, words.systems, words.tokens)
            )
    if words.part in ("tail", "all"):
        save("generation-tail", [tail(model) for model in words.models])
    if words.part in ("pause", "all"):
        save("generation-pause", pause(words.models))


if __name__ == "__main__":
    main()
