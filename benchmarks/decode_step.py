"""Where the time of a decode step goes: 64 answers of about 160 tokens, one thread, against the core's fastest
matmul.

    python -m benchmarks.decode_step [--models 3.4M 48M] [--dtypes float32 bfloat16]

The FLOPs of a step's matmuls (all linear layers, and the two of attention), divided by its time and by the rate of the
fastest square matmul on this core (`benchmarks.flops.ceiling`), give the fraction of the ceiling. The time is split
into matmuls, attention (the compiled loop, timed within the step, because alone it would find its data in the CPU's
cache), other calls to torch, and the rest: the fused loops of norms, rotation, gates and sampling, Python, and the
engine's work in numpy.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
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
from stretto.model.decode import steps as decode_steps
from stretto.model.decode.policy import CACHED_ATTENTION
from stretto.model.hf.folder import load_policy
from stretto_kernels.decode_attention import ragged_attention

ROWS, LENGTH, STEPS, PROFILED = 64, 160, 60, 20  # no row changes its bucket in these steps
KINDS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_PRODUCTS = ("mm", "linear", "matmul")  # parts of the names of torch's products


def measure(name: str, dtype: str, folder: Path) -> dict[str, Any]:
    """Measure one model in one dtype."""
    model = load_policy(make(name, folder), attention=CACHED_ATTENTION, dtype=dtype)
    step, attention = _step_and_attention(running(model, dtype, STEPS))
    products, others = _torch_milliseconds(running(model, dtype, PROFILED))
    work, peak = operations(model), ceiling(KINDS[dtype])
    rest = step - products - others - attention
    return {
        "model": name,
        "dtype": dtype,
        "step_ms": step,
        "tokens_per_second": 1000 * ROWS / step,
        "ceiling_gflops": peak / 1e9,
        "gflops": work / step / 1e6,
        "fraction": work / (step / 1000) / peak,
        "share": {name: ms / step for name, ms in _named(products, attention, others, rest)},
    }


def _named(products: float, attention: float, others: float, rest: float) -> list[tuple[str, float]]:
    return [("products", products), ("attention", attention), ("other calls to torch", others), ("rest", rest)]


def running(model: PreTrainedModel, dtype: str, steps: int) -> NativeEngine:
    """An engine whose completions reach the wanted length in the middle of the next steps."""
    engine = NativeEngine(model, EngineConfig.model_validate({"slots": ROWS, "dtype": dtype}))
    for number, prompt in enumerate(prompts(ROWS, 1024)):
        sampling = Sampling(max_tokens=1900)
        engine.add(GenerateRequest(id=str(number), prompt_token_ids=prompt, seeds=(number,), sampling=sampling))
    while engine.health().generated < ROWS * (LENGTH - steps // 2 - len(prompt)):
        engine.step()
    return engine


def _step_and_attention(engine: NativeEngine) -> tuple[float, float]:
    """Median milliseconds of a step, and of its attention in all layers."""
    spent, attend = 0.0, ragged_attention

    def timed(*asked: Any) -> torch.Tensor:
        nonlocal spent
        start = time.perf_counter()
        try:
            return attend(*asked)
        finally:
            spent += time.perf_counter() - start

    setattr(decode_steps, attend.__name__, timed)
    steps, attentions = [], []
    try:
        for _ in range(STEPS):
            spent, start = 0.0, time.perf_counter()
            engine.step()
            steps.append(time.perf_counter() - start)
            attentions.append(spent)
    finally:
        setattr(decode_steps, attend.__name__, attend)
    return 1000 * statistics.median(steps), 1000 * statistics.median(attentions)


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
