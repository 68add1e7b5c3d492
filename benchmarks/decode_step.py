"""Where the time of a decode step goes: 64 answers of about 160 tokens, one thread, against the core's fastest
matmul.

    python -m benchmarks.decode_step [--models 3.4M 48M] [--dtypes float32 bfloat16]

The FLOPs of a step's matmuls (all linear layers, and the two of attention), divided by its time and by the rate of the
fastest square matmul on this core (`benchmarks.flops.ceiling`), give the fraction of the ceiling. The time is split
into matmuls, attention, the fused loops of norms, rotation and gates, other calls to torch, and the rest: sampling,
Python, and the engine's work in numpy. A step is one call of a compiled loop (`stretto_kernels.steps.program`); to time
its parts, further steps call the loop once for each part, in the same order. Shares are of CPU time.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel

from benchmarks.flops import ceiling
from benchmarks.generators import prompts
from benchmarks.report import Table, save
from benchmarks.shapes import SHAPES, make
from stretto.core.records import GenerateRequest, Sampling
from stretto.engine.config import EngineConfig
from stretto.engine.native.engine import NativeEngine
from stretto.model.decode.policy import CACHED_ATTENTION
from stretto.model.hf.folder import load_policy
from stretto_kernels.program_loop import ATTEND, MULTIPLY, run
from stretto_kernels.steps import program

ROWS, LENGTH, STEPS, PROFILED = 64, 160, 60, 20  # no row changes its bucket in these steps
KINDS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_PRODUCTS = ("mm", "linear", "matmul")  # parts of the names of torch's products


def measure(name: str, dtype: str, folder: Path) -> dict[str, Any]:
    """Measure one model in one dtype."""
    model = load_policy(make(name, folder), attention=CACHED_ATTENTION, dtype=dtype)
    engine = running(model, dtype, STEPS)
    step, busy = (_milliseconds(engine, STEPS // 3, clock) for clock in (time.perf_counter, time.thread_time))
    parts = _compiled_milliseconds(engine, STEPS // 3)
    products, others = _torch_milliseconds(running(model, dtype, PROFILED))
    parts["products"] += products
    work, peak = operations(model), ceiling(KINDS[dtype])
    parts["other calls to torch"] = others
    parts["rest"] = busy - sum(parts.values())
    return {
        "model": name,
        "dtype": dtype,
        "step_ms": step,
        "tokens_per_second": 1000 * ROWS / step,
        "ceiling_gflops": peak / 1e9,
        "gflops": work / step / 1e6,
        "fraction": work / (step / 1000) / peak,
        "share": {part: ms / busy for part, ms in parts.items()},
    }


def running(model: PreTrainedModel, dtype: str, steps: int) -> NativeEngine:
    """An engine whose completions reach the wanted length in the middle of the next steps."""
    engine = NativeEngine(model, EngineConfig.model_validate({"slots": ROWS, "dtype": dtype}))
    for number, prompt in enumerate(prompts(ROWS, 1024)):
        sampling = Sampling(max_tokens=1900)
        engine.add(GenerateRequest(id=str(number), prompt_token_ids=prompt, seeds=(number,), sampling=sampling))
    while engine.health().generated < ROWS * (LENGTH - steps // 2 - len(prompt)):
        engine.step()
    return engine


def _milliseconds(engine: NativeEngine, steps: int, clock: Callable[[], float]) -> float:
    """Median milliseconds of a step by a clock."""
    found = []
    for _ in range(steps):
        start = clock()
        engine.step()
        found.append(clock() - start)
    return 1000 * statistics.median(found)


def _compiled_milliseconds(engine: NativeEngine, steps: int) -> dict[str, float]:
    """Median CPU milliseconds of a step in the compiled loop, by part. The loop takes more than `ROWS` tokens through
    its parts together, so each part computes what it computes in one call of all."""
    spent = dict.fromkeys(("products", "attention", "norms, rotation, gates"), 0.0)
    names = {MULTIPLY: "products", ATTEND: "attention"}

    def timed(table: Any, at: Any, first: int, end: int, *rest: Any) -> None:
        kinds = [names.get(int(table[number, 0]), "norms, rotation, gates") for number in range(first, end)]
        for kind, numbers in groupby(range(first, end), lambda number: kinds[number - first]):
            inside = list(numbers)
            start = time.thread_time()
            run(table, at, inside[0], inside[-1] + 1, *rest)
            spent[kind] += time.thread_time() - start

    setattr(program, run.__name__, timed)
    found: list[dict[str, float]] = []
    try:
        for _ in range(steps):
            spent.update(dict.fromkeys(spent, 0.0))
            engine.step()
            found.append(dict(spent))
    finally:
        setattr(program, run.__name__, run)
    if not any(one["attention"] for one in found):
        raise SystemExit("the steps of this model are not of the compiled loop, whose parts are timed here")
    return {part: 1000 * statistics.median(one[part] for one in found) for part in spent}


def _torch_milliseconds(engine: NativeEngine) -> tuple[float, float]:
    """Milliseconds of a step in torch's matmuls, and in its other calls, each without nested calls."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for _ in range(PROFILED):
            engine.step()
    products = others = 0.0
    for event in seen.key_averages():
        if any(part in event.key for part in _PRODUCTS):
            products += event.self_cpu_time_total
        else:
            others += event.self_cpu_time_total
    return products / PROFILED / 1000, others / PROFILED / 1000


def operations(model: PreTrainedModel) -> float:
    """FLOPs of one step: two for each weight and row, and four for each number in the KV cache."""
    config = model.config.get_text_config()
    weights = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    cached = 2 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * LENGTH
    return float(2 * ROWS * (weights + cached))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--dtypes", nargs="+", choices=list(KINDS), default=list(KINDS))
    words = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    table = Table("model", "type", "step ms", "tokens/s", "ceiling GFLOP/s", "fraction of it", "where the time goes")
    with tempfile.TemporaryDirectory(prefix="stretto-benchmark-") as folder:
        for name in words.models:
            for dtype in words.dtypes:
                row = measure(name, dtype, Path(folder))
                rows.append(row)
                shares = ", ".join(f"{part} {share:.0%}" for part, share in row["share"].items())
                numbers = (f"{row[key]:.2f}" for key in ("step_ms", "tokens_per_second", "ceiling_gflops", "fraction"))
                table.add(name, dtype, *numbers, shares)
                table.show_last()
    save("decode-step", {"rows": rows, "answers": ROWS, "tokens_each": LENGTH})


if __name__ == "__main__":
    main()
