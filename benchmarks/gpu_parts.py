"""Parts of `python -m benchmarks.gpu`. Each takes an `Asked` and returns rows for the file of results."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from benchmarks import gpu_generation, gpu_training
from benchmarks.flops import step_flops
from benchmarks.gpu_generation import Measured
from benchmarks.gpu_training import ALGORITHM, SHAPES
from benchmarks.lengths import batch
from benchmarks.report import RESULTS
from benchmarks.runs import train
from stretto.core.records import GenerateRequest, Sampling
from stretto.engine.config import EngineConfig
from stretto.engine.native.engine import NativeEngine
from stretto.launch.preflight.devices import rank_of
from stretto.launch.recipe.recipe import load_recipe
from stretto.model.hf.build import character_tokenizer
from stretto.model.hf.config import BuildConfig
from stretto.model.layout import pack
from stretto.model.packed.attention import _flash, bucketed
from stretto.trainer.config import TrainerConfig
from stretto.trainer.trainer import Trainer
from stretto_app.extensions.preflight.paper import outline
from stretto_kernels.gpu.attention import GRAIN, read_rows
from stretto_kernels.gpu.tables import cut, slots_of
from stretto_kernels.rule import Rule

ROOT = RESULTS.parent.parent
RECIPE = RESULTS.parent / "gpu.toml"
_TESTED = ("triton_*", "cuda_graphs", "slot_tables")  # as `ON_GPU` in the Makefile
TESTED = tuple(
    str(path.relative_to(ROOT)) for name in _TESTED for path in sorted(ROOT.glob(f"tests/model/test_{name}.py"))
)
_FIRST = 25  # rows of a profile
_PAUSE = 50  # microseconds: a longer one is no launch


@dataclass(frozen=True)
class Size:
    """Sizes of the models and of the work."""

    shape: str = "0.6B"
    decoded: tuple[tuple[int, int], ...] = ((1, 1024), (32, 1024), (128, 1024), (256, 1024), (32, 8192))
    sequences: tuple[int, ...] = (1, 32, 128, 256)  # of the kernels
    contexts: tuple[int, ...] = (1024, 8192)
    warm: int = 8  # steps of generation that do not count, and that do
    counted: int = 32
    compared: tuple[int, int, int] = (8, 700, 32)  # rows, longest prompt, tokens held against transformers
    tokens: tuple[int, ...] = (8192, 16_384)  # of a training step
    steps: int = 5
    dtype: str = "bfloat16"
    run: tuple[str, ...] = ()  # overrides of benchmarks/gpu.toml, and of benchmarks/gpu_learn.toml
    learn: tuple[str, ...] = ()
    heads: tuple[int, int, int] = (16, 8, 128)  # query heads, key heads, width
    answered: tuple[int, int] = (512, 64)  # tokens of a prompt and of its answer, beside transformers
    together: tuple[int, ...] = (1, 32, 128)  # sequences there
    compiled: tuple[int, ...] = (32,)
    tests: tuple[str, ...] = ()
    repeats: int = 20


REHEARSED = Size(
    shape="tiny",
    decoded=((1, 64), (3, 64)),
    sequences=(1, 3),
    contexts=(64,),
    warm=1,
    counted=3,
    compared=(3, 40, 6),
    tokens=(128,),
    steps=2,
    dtype="float32",
    run=(
        "sampling.max_tokens=16",
        "rollout.batch_size=2",
        "rollout.group_size=2",
        "engine.slots=8",
        "engine.cache_gib=0.1",
        "trainer.micro_batch_tokens=128",
        "trainer.steps=2",
    ),
    learn=(
        "model.build.hidden_size=32",
        "model.build.layers=1",
        "model.build.intermediate_size=64",
        "task.demonstrations=64",
        "warm_start.steps=2",
        "warm_start.batch_size=8",
        "warm_start.micro_batch_tokens=512",
        "rollout.batch_size=2",
        "rollout.max_in_flight=4",
        "sampling.max_tokens=16",
        "engine.slots=16",
        "evaluation.prompts=8",
        "evaluation.every=2",
        "trainer.steps=4",
    ),
    heads=(4, 2, 16),
    answered=(8, 3),
    together=(1, 3),
    compiled=(3,),
    tests=("-k", "rows"),
    repeats=1,
)


@dataclass(frozen=True)
class Asked:
    """Request to a part: sizes, device, a folder for its files, and an interpreter with vLLM if there is one."""

    size: Size
    device: torch.device
    folder: Path
    vllm: str = ""


def tests(asked: Asked) -> dict[str, Any]:
    """Run pytest over the files whose tests need a GPU."""
    command = [sys.executable, "-m", "pytest", "-q", "-o", "cache_dir=.cache/pytest/gpu", *TESTED, *asked.size.tests]
    environment = os.environ | ({"STRETTO_TEST_GPU": "1"} if asked.device.type == "cuda" else {})
    environment.pop("PYTEST_ADDOPTS", None)  # the caller's may hide the last line
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    last = (ended.stdout.strip().splitlines() or [""])[-1]
    return {"told": last} | ({} if ended.returncode == 0 else {"failed": last, "output": ended.stdout[-4000:]})


def decode(asked: Asked) -> dict[str, Any]:
    """Decoding speed; see `benchmarks.gpu_generation`."""
    size = asked.size
    status, found = gpu_generation.measure(
        [size.shape],
        size.decoded,
        Measured(size.warm, size.counted),
        size.compared,
        asked.device,
    )
    return found | ({} if status == 0 else {"failed": "greedy answers are not those of transformers"})


def training(asked: Asked) -> dict[str, Any]:
    """Training speed; see `benchmarks.gpu_training`."""
    size = asked.size
    peak, whose = gpu_training.peak_rate(asked.device, size.dtype)
    words = argparse.Namespace(dtype=size.dtype, steps=size.steps, warm=1 if size.steps < 5 else 3)
    rows = []
    for tokens, sequences in product(size.tokens, (1, 16)):
        one = gpu_training.row(size.shape, tokens, sequences, words, asked.device)
        rows.append(one | ({"mfu": round(one["tflops"] * 1e12 / peak, 4)} if "tflops" in one else {}))
    return {"peak_tflops": round(peak / 1e12, 2), "peak_is": whose, "rows": rows}


def run(asked: Asked) -> dict[str, Any]:
    """A whole run. The first of its steps, in which the trainer waits and warms up, does not count."""
    model = model_folder(asked.size.shape, asked.folder / "model")
    seen = train([f"model.path={model}", *asked.size.run], RECIPE)
    steps = [{name: one or 0.0 for name, one in step.trainer.items()} for step in seen.steps[1:]]
    tokens, seconds = sum(s["tokens"] for s in steps), sum(s["seconds_proximal"] + s["seconds_update"] for s in steps)
    shape = gpu_training.build(asked.size.shape, torch.device("meta"))
    each = seen.inspection.tokens.trained / max(1, seen.inspection.trajectories.trained)
    count = round(tokens / max(1.0, each))
    flops = step_flops(shape, int(tokens), int(count * each), [int(each)] * count)
    peak, _ = gpu_training.peak_rate(asked.device, asked.size.dtype)
    inspection = seen.inspection
    return {
        "rl_seconds": round(inspection.rl_seconds, 2),
        "generated_per_second": round(inspection.tokens.generated / inspection.rl_seconds, 1),
        "trained_per_second_of_training": round(tokens / seconds, 1),
        "mfu_of_training": round(flops / seconds / peak, 4),
        "busy": inspection.busy,
        "staleness_mean": round(inspection.staleness.mean, 3),
        "interrupted": inspection.interrupted,
        "weights": inspection.weights,
        "behavior_logprob_error": [s.get("behavior_logprob_error") for s in steps],
    }


def memory(asked: Asked) -> dict[str, Any]:
    """Peak memory of a step of the trainer alone, beside the estimate for one rank of the same recipe."""
    folder = outlined(asked.size.shape, asked.folder / "outlined")
    tokens = asked.size.tokens[-1]
    recipe = load_recipe(
        RECIPE,
        [f"model.path={folder}", *asked.size.run, f"trainer.micro_batch_tokens={tokens}", "trainer.minibatches=1"],
    )
    parts = rank_of(outline(recipe)).parts
    trainer = Trainer(
        gpu_training.build(asked.size.shape, asked.device), recipe.trainer, ALGORITHM, Sampling(max_tokens=tokens)
    )
    seen = gpu_training.measure(trainer, tokens, 4, 2, 1)
    estimate = sum(parts.values())
    return {
        "tokens": tokens,
        "estimated_gib": round(estimate / 2**30, 3),
        "parts_gib": {name: round(size / 2**30, 3) for name, size in parts.items()},
        "peak_gib": seen["peak_gib"],
        "peak_of_estimate": round(seen["peak_gib"] * 2**30 / estimate, 3),
    }


def kernels(asked: Asked) -> dict[str, Any]:
    """Milliseconds of reading cached rows, and of packed attention with its gradient: fused and plain, with the largest
    difference of their results."""
    heads, kv_heads, width = asked.size.heads
    kind = torch.bfloat16 if asked.device.type == "cuda" else torch.float32
    rows = []
    for count, context in product(asked.size.sequences, asked.size.contexts):
        if count * context * kv_heads * width * kind.itemsize * 4 < _room(asked.device):
            rows.append({"rows": count, "context": context} | _reading(asked, count, context, kind))
    length, several = asked.size.tokens[0] // 4, 4
    qkv = [
        torch.randn(several * length, h, width, device=asked.device, dtype=kind) for h in (heads, kv_heads, kv_heads)
    ]
    return {"reading": rows, "packed": {"tokens": several * length} | _packed(asked, qkv, [length] * several)}


def _reading(asked: Asked, count: int, context: int, kind: torch.dtype) -> dict[str, float]:
    heads, kv_heads, width = asked.size.heads
    cache = torch.randn(2, 1, count, kv_heads, context, width, device=asked.device).to(kind)
    query = torch.randn(count, heads, width, device=asked.device).to(kind)
    ends = np.full(count, context)
    chunks = cut(np.zeros_like(ends), ends, 3 * count + 64, GRAIN)
    items, bounds, slots = (
        torch.from_numpy(x).to(asked.device)
        for x in (chunks.items, chunks.bounds, slots_of(cache[0, 0], cache[1, 0], count))
    )

    def fused() -> Tensor:
        return read_rows(query, slots, items, bounds, Rule(), kv_heads)

    def plain() -> Tensor:
        keys, values = (x.repeat_interleave(heads // kv_heads, 1) for x in cache[:, 0])
        return functional.scaled_dot_product_attention(query[:, :, None], keys, values)[:, :, 0]

    off = float((fused().float() - plain().float()).abs().max())
    return {"fused_ms": milliseconds(fused, asked), "plain_ms": milliseconds(plain, asked), "off_by": round(off, 5)}


def _packed(asked: Asked, qkv: list[Tensor], lengths: list[int]) -> dict[str, float]:
    packing = pack(lengths, asked.device)
    leaves = [x.requires_grad_() for x in qkv]

    def step(attend: Callable[..., Tensor]) -> Tensor:
        out = attend(*leaves, packing, Rule())
        out.float().square().sum().backward()
        return out

    found = {"bucketed_ms": milliseconds(lambda: step(bucketed), asked)}
    if asked.device.type == "cuda":
        found["flash_ms"] = milliseconds(lambda: step(_flash), asked)
        found["off_by"] = round(float((step(_flash).float() - step(bucketed).float()).abs().max()), 5)
    return found


def profiled(asked: Asked) -> dict[str, Any]:
    """The most expensive kernels of a training step and of an engine's step, the milliseconds in which none ran, and
    each place that waits for the GPU."""
    size, device = asked.size, asked.device
    tokens = size.tokens[0]
    config = TrainerConfig(minibatches=1, dtype=size.dtype, micro_batch_tokens=tokens)  # type: ignore[arg-type]
    trainer = Trainer(gpu_training.build(size.shape, device), config, ALGORITHM, Sampling(max_tokens=tokens))
    length = tokens // 16
    groups = [(1, (length - 1,))] * 16
    vocabulary = trainer.learner.model.config.vocab_size

    def trained(trainer: Trainer) -> None:
        trainer.train(batch(groups, vocabulary, trainer.version))

    found = {"training": _profile(partial(trained, trainer), device)}
    del trainer
    rows = min(size.sequences[-1], 128)
    engine = NativeEngine(gpu_generation.build(size.shape, device), EngineConfig(slots=rows))
    sampling = Sampling(max_tokens=size.contexts[0] // 2)
    engine.add(GenerateRequest("all", tuple(range(2, 34)), tuple(range(rows)), sampling))
    for _ in range(3):
        engine.step()
    return found | {"decode": {"rows": rows} | _profile(engine.step, device)}


def _profile(step: Callable[[], object], device: torch.device) -> dict[str, Any]:
    step()
    with _waits() as waits:
        step()
    by_device = device.type == "cuda"
    # Beside the calls of the host the profiler would slow them down, and count each kernel twice.
    with profile(activities=[ProfilerActivity.CUDA if by_device else ProfilerActivity.CPU]) as seen:
        began = time.perf_counter()
        step()
        gpu_training._wait(device)
        wall = time.perf_counter() - began

    def cost(event: Any) -> float:
        return float(event.self_device_time_total if by_device else event.self_cpu_time_total)

    events = sorted(seen.key_averages(), key=cost, reverse=True)
    total = sum(map(cost, events)) or 1.0
    dearest = [
        {"name": e.key[:80], "calls": e.count, "ms": round(cost(e) / 1e3, 3), "share": round(cost(e) / total, 4)}
        for e in events[:_FIRST]
    ]
    spans = sorted((e.time_range.start, e.time_range.end) for e in seen.events() or ())
    ends = itertools.accumulate((end for _, end in spans), max)
    idle = [after - end for end, (after, _) in zip(ends, spans[1:], strict=False) if after > end]
    return {
        "ms": round(total / 1e3, 2),
        "wall_ms": round(wall * 1e3, 2),
        "launched": len(spans),
        "idle_ms": round(sum(idle) / 1e3, 2),
        "idle_beyond_50us_ms": round(sum(one for one in idle if one > _PAUSE) / 1e3, 2),
        "waits": sum(waits.values()),
        "waits_at": dict(waits.most_common()),
        "dearest": dearest,
    }


@contextmanager
def _waits() -> Iterator[Counter[str]]:
    """Count the waits of this process for the GPU, by the line of stretto's code that causes them."""
    found = Counter[str]()

    def count(message: Warning | str, *_: object, **__: object) -> None:
        if "synchroniz" in str(message):
            ours = [f for f in traceback.extract_stack() if "/stretto/" in f.filename] or traceback.extract_stack()[:1]
            found[f"{Path(ours[-1].filename).name}:{ours[-1].lineno}"] += 1

    gpu, before = torch.cuda.is_available(), warnings.showwarning
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = count
        if gpu:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            if gpu:
                torch.cuda.set_sync_debug_mode("default")
            warnings.showwarning = before


def vllm(asked: Asked) -> dict[str, Any]:
    """The engine and vLLM on the same prompts and lengths."""
    size, tokens = asked.size, 64 if asked.device.type == "cuda" else 4
    ours = []
    for count in size.sequences:
        engine = NativeEngine(gpu_generation.build(size.shape, asked.device), EngineConfig(slots=count))
        sampling = Sampling(max_tokens=tokens)
        seconds = []
        for turn in range(2):
            prompt = tuple(range(2, 34))
            engine.add(GenerateRequest(f"turn {turn}", prompt, tuple(range(count)), sampling))
            began = time.perf_counter()
            while not engine.idle:
                engine.step()
            seconds.append(time.perf_counter() - began)
        ours.append({"sequences": count, "tokens": count * tokens, "seconds": round(min(seconds), 3)})
    return {"stretto": ours} | beside_vllm(asked, tokens)


def beside_vllm(asked: Asked, tokens: int) -> dict[str, Any]:
    """What vLLM takes for as many prompts and tokens, in its own environment."""
    if not asked.vllm:
        return {"vllm": "no interpreter is named (--vllm, STRETTO_VLLM)"}
    model = model_folder(asked.size.shape, asked.folder / "model")
    words = ["--dtype", "bfloat16", "--tokens", str(tokens), "--gpu", "--sequences", *map(str, asked.size.sequences)]
    script = RESULTS.parent / "peers" / "vllm_generate.py"
    ended = subprocess.run([asked.vllm, str(script), str(model), *words], capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        return {"failed": f"vLLM ended with exit code {ended.returncode}", "output": ended.stderr[-2000:]}
    return {"vllm": json.loads(ended.stdout.strip().splitlines()[-1])}


def model_folder(shape: str, folder: Path) -> Path:
    """Write a model with random weights and a character tokenizer, whose vocabulary is a part of the model's; once."""
    if (folder / "config.json").exists():
        return folder
    model = gpu_training.build(shape, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    model.config.eos_token_id, model.config.pad_token_id = 1, 0
    model.generation_config.eos_token_id = 1
    model.bfloat16().save_pretrained(folder)
    character_tokenizer(BuildConfig().vocabulary, model.config.max_position_embeddings).save_pretrained(folder)
    return folder


def outlined(shape: str, folder: Path) -> Path:
    """A model without weights: its config alone."""
    kind, config = SHAPES[shape]
    config.save_pretrained(folder)
    told = json.loads((folder / "config.json").read_text()) | {"architectures": [kind.__name__]}
    (folder / "config.json").write_text(json.dumps(told))
    return folder


def _room(device: torch.device) -> float:
    return 0.5 * torch.cuda.mem_get_info()[0] if device.type == "cuda" else 1 << 30


def milliseconds(work: Callable[[], object], asked: Asked) -> float:
    """Median milliseconds of a call, after two calls that do not count."""
    seconds = []
    for _ in range(2 + asked.size.repeats):
        gpu_training._wait(asked.device)
        began = time.perf_counter()
        work()
        gpu_training._wait(asked.device)
        seconds.append(time.perf_counter() - began)
    return round(statistics.median(seconds[2:]) * 1e3, 4)


PARTS: Mapping[str, Callable[[Asked], dict[str, Any]]] = {
    "tests": tests,
    "decode": decode,
    "training": training,
    "run": run,
    "memory": memory,
    "kernels": kernels,
    "profile": profiled,
    "vllm": vllm,
}
