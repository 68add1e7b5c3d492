"""Decoding with real shapes on a GPU: tokens per second, as a share of what its memory allows. No network, no files.

    python -m benchmarks.gpu_generation                                   both shapes, 1 to 256 sequences, 1k and 8k
    python -m benchmarks.gpu_generation --shapes 0.6B --sequences 128 --contexts 1024
    python -m benchmarks.gpu_generation --check                           the same code on a tiny shape, in seconds

Weights are random, in bfloat16. First, exactness: greedy answers of rows of different lengths; their tokens and
log-probabilities are compared with transformers' own forward pass over the whole sequences, in bfloat16 and float32.
The float32 pass shows how much of a difference is rounding: stretto's error may be twice that of transformers'
bfloat16.

Then, speed. All sequences have the same prompt, which is computed once; the steps after it are measured, up to
`context` tokens. *Decode* is the forward pass of a step with the argmax of each row; *engine* is a step of the whole
engine, which samples. The lower bound of a step is the time to read all weights and the KV cache once, at the device's
copy rate (bytes read plus bytes written).
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.gpu_training import SHAPES
from benchmarks.report import Table, save
from stretto.core.records import GenerateRequest, Sampling
from stretto.engine.config import EngineConfig
from stretto.engine.native.engine import NativeEngine
from stretto.model.attention_support import check_attention
from stretto.model.decode.length_buckets import CacheLayout
from stretto.model.decode.policy import CACHED_ATTENTION, Context, DecodePolicy, cache_layout

DTYPE = torch.bfloat16
#: A difference of log-probabilities that is rounding whatever the yardstick says.
LEAST_ROUNDING = 1e-3
#: While a bucket doubles, the old half is there too.
GROWTH = 1.5


@dataclass(frozen=True)
class Measured:
    """Number of steps to measure; the first `warm` steps do not count."""

    warm: int
    steps: int

    @property
    def tokens(self) -> int:
        return self.warm + self.steps


def build(shape: str, device: torch.device, attention: str = CACHED_ATTENTION) -> PreTrainedModel:
    """Create a model with random weights on the device."""
    kind, config = SHAPES[shape]
    torch.manual_seed(1)
    with device:
        model: PreTrainedModel = kind._from_config(copy.deepcopy(config), attn_implementation=attention, dtype=DTYPE)
    model.requires_grad_(False).eval()
    return model


def exactness(shape: str, device: torch.device, rows: int, longest: int, tokens: int) -> dict[str, Any]:
    """Compare greedy answers of `rows` rows with transformers. `longest`: tokens of the longest prompt."""
    model = build(shape, device)
    chance = np.random.default_rng(1)
    prompts = [chance.integers(0, model.config.vocab_size, 1 + longest * (row + 1) // rows) for row in range(rows)]
    answers, ours = _greedy(DecodePolicy(model), prompts, tokens)
    sequences = [torch.from_numpy(np.concatenate(one)).to(device) for one in zip(prompts, answers, strict=True)]
    reference = build(shape, device, "sdpa")
    reference.load_state_dict(model.state_dict())
    theirs, below = _scored(reference, sequences, tokens)
    exact, _ = _scored(reference.float(), sequences, tokens)
    off, rounding = (float((x - exact).abs().max()) for x in (ours, theirs))
    allowed = 2 * rounding + LEAST_ROUNDING
    return {
        "shape": shape,
        "tokens": rows * tokens,
        "same_likeliest": round(float((below == 0).double().mean()), 4),
        "likeliest_missed_by": round(float(below.max()), 5),
        "off_from_transformers": round(float((ours - theirs).abs().max()), 5),
        "off_from_float32": round(off, 5),
        "transformers_off_from_float32": round(rounding, 5),
        # Two that are each off by `allowed` from the same number may disagree by twice as much on what is likeliest.
        "exact": off <= allowed and float(below.max()) <= 2 * allowed,
    }


def _greedy(policy: DecodePolicy, prompts: list[np.ndarray], tokens: int) -> tuple[np.ndarray, Tensor]:
    """Most probable tokens [R, tokens] after each prompt, and their log-probabilities."""
    answers, logprobs = np.zeros((len(prompts), tokens), np.int64), torch.zeros(len(prompts), tokens)
    newest = np.array([prompt[-1] for prompt in prompts])
    lengths = np.array([len(prompt) for prompt in prompts])
    contexts = [Context(prompt[:-1], (row,)) for row, prompt in enumerate(prompts)]
    for number in range(tokens):
        order, logits = policy.forward(newest, lengths, contexts)
        best = logits.log_softmax(-1).max(-1)
        newest[order], lengths, contexts = best.indices.cpu().numpy(), lengths + 1, []
        answers[order, number] = newest[order]
        logprobs[order, number] = best.values.cpu()
    return answers, logprobs


@torch.inference_mode()
def _scored(model: PreTrainedModel, sequences: list[Tensor], tokens: int) -> tuple[Tensor, Tensor]:
    """For the last `tokens` tokens of each sequence: log-probabilities, and how far each is below the most probable
    token's."""
    logprobs, below = [], []
    for sequence in sequences:
        logits = model(sequence[None], use_cache=False, logits_to_keep=tokens + 1).logits[0, :-1].float()
        scores = logits.log_softmax(-1)
        taken = scores.gather(1, sequence[-tokens:, None])[:, 0]
        logprobs.append(taken.cpu())
        below.append((scores.max(-1).values - taken).cpu())
    return torch.stack(logprobs), torch.stack(below)


def decode(shape: str, device: torch.device, sequences: int, context: int, measured: Measured) -> list[float]:
    """Seconds of each step of the decode policy alone."""
    policy = DecodePolicy(build(shape, device))
    prompt = _prompt(policy.model, context, measured)
    newest, lengths = np.full(sequences, prompt[-1]), np.full(sequences, len(prompt))
    contexts = [Context(prompt[:-1], tuple(range(sequences)))]

    def step() -> None:
        nonlocal lengths, contexts
        order, logits = policy.forward(newest, lengths, contexts)
        newest[order], lengths, contexts = logits.argmax(-1).cpu().numpy(), lengths + 1, []

    step()
    return _seconds(step, device, measured)


def engine(shape: str, device: torch.device, sequences: int, context: int, measured: Measured) -> list[float]:
    """Seconds of each step of the whole engine."""
    model = build(shape, device)
    prompt = _prompt(model, context, measured)
    gib = _cache_bytes(cache_layout(model, check_attention(model)), sequences, context) / 2**30
    config = EngineConfig(slots=sequences, cache_gib=1.01 * gib, max_prefill_tokens=context + sequences)
    running = NativeEngine(model, config)
    sampling = Sampling(max_tokens=measured.tokens + 1)
    running.add(GenerateRequest("all", tuple(prompt.tolist()), tuple(range(sequences)), sampling))
    running.step()
    return _seconds(running.step, device, measured)


def _prompt(model: PreTrainedModel, context: int, measured: Measured) -> np.ndarray:
    """Prompt of such a length that the last step is at `context` tokens."""
    return np.random.default_rng(2).integers(0, model.config.vocab_size, context - measured.tokens - 1)


def _seconds(step: Callable[[], object], device: torch.device, measured: Measured) -> list[float]:
    seconds = []
    for _ in range(measured.tokens):
        _wait(device)
        began = time.perf_counter()
        step()
        _wait(device)
        seconds.append(time.perf_counter() - began)
    return seconds[measured.warm :]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def copy_rate(device: torch.device) -> float:
    """Bytes read plus written per second by a copy on the device; median."""
    numbers = (1 << 30 if device.type == "cuda" else 1 << 26) // 4
    source, target = (torch.zeros(numbers, device=device) for _ in range(2))
    seconds = _seconds(lambda: target.copy_(source), device, Measured(warm=3, steps=9))
    return 2 * 4 * numbers / statistics.median(seconds)


def _weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of weights that a step reads: all but an embedding that is not the output matrix too."""
    looked_up, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    read = [weight for weight in model.parameters() if weight is not looked_up or weight is output]
    return sum(weight.numel() * weight.element_size() for weight in read)


def _cache_bytes(layout: CacheLayout, sequences: int, context: int) -> int:
    return sequences * layout.slot(context) * layout.bytes_per_token


def row(
    shape: str, sequences: int, context: int, measured: Measured, device: torch.device, rate: float
) -> dict[str, Any]:
    """One measurement, or the reason why there is none."""
    setting = {"shape": shape, "sequences": sequences, "context": context}
    model = build(shape, torch.device("meta"))
    weights, layout = _weight_bytes(model), cache_layout(model, check_attention(model))
    logits = sequences * model.config.vocab_size * 32  # of the model, in float32, and the sums of sampling in float64
    needed, there = weights + GROWTH * _cache_bytes(layout, sequences, context) + logits, _memory(device)
    if needed > there:
        return setting | {"skipped": f"needs about {needed / 2**30:.0f} of {there / 2**30:.0f} GiB"}
    read = weights + sequences * (context - measured.steps / 2) * layout.bytes_per_token
    found: dict[str, Any] = setting | {"floor_ms": round(read / rate * 1e3, 4)}
    for name, run in (("decode", decode), ("engine", engine)):
        try:
            seconds = statistics.median(run(shape, device, sequences, context, measured))
        except torch.OutOfMemoryError as error:
            return setting | {"skipped": str(error).partition(". ")[0]}
        finally:
            _forget(device)
        found |= {
            f"{name}_ms": round(seconds * 1e3, 4),
            f"{name}_tokens_per_second": round(sequences / seconds, 1),
            f"{name}_of_floor": round(read / rate / seconds, 4),
        }
    return found


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _forget(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def main(words: list[str] | None = None) -> int:
    """Run the command; return the exit status: 0; 1 if answers differ from those of transformers; 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=[shape for shape in SHAPES if shape != "tiny"])
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 32, 128, 256])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192], help="tokens of each sequence")
    parser.add_argument("--check", action="store_true", help="a tiny shape wherever torch runs; nothing is written")
    asked = parser.parse_args(words)
    if asked.check:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return measure(["tiny"], [(1, 64), (3, 64)], Measured(warm=1, steps=3), (3, 40, 6), device)[0]
    if not torch.cuda.is_available():
        print("no GPU that torch can use: nothing is measured (--check runs the code without one)", file=sys.stderr)
        return 2
    shapes, measured = asked.shapes or ["0.6B", "1.5B"], Measured(warm=8, steps=32)
    settings = list(product(asked.sequences, asked.contexts))
    status, results = measure(shapes, settings, measured, (8, 700, 32), torch.device("cuda"))
    save("gpu-generation", results)
    return status


def measure(
    shapes: list[str],
    settings: Sequence[tuple[int, int]],
    measured: Measured,
    compared: tuple[int, int, int],
    device: torch.device,
) -> tuple[int, dict[str, Any]]:
    """Measure everything and print it as it comes; return the exit status and the results. `settings`: numbers of
    sequences, and tokens of each."""
    rate = copy_rate(device)
    print(f"the device copies {rate / 1e9:,.0f} GB/s, read and written")
    checks = []
    for shape in shapes:
        checks.append(exactness(shape, device, *compared))
        _forget(device)
        print(_sentence(checks[-1]))
    rows: list[dict[str, Any]] = []
    columns = ("decode tokens/s", "ms a step", "of the floor", "engine tokens/s", "of the floor")
    table = Table("shape", "sequences", "context", *columns)
    for shape, (count, context) in product(shapes, settings):
        one = row(shape, count, context, measured, device, rate)
        rows.append(one)
        cells: tuple[object, ...] = (one.get("skipped"), "", "", "", "")
        if "skipped" not in one:
            shares = [f"{one[f'{name}_of_floor']:.1%}" for name in ("decode", "engine")]
            rates = [one[f"{name}_tokens_per_second"] for name in ("decode", "engine")]
            cells = (rates[0], one["decode_ms"], shares[0], rates[1], shares[1])
        table.add(shape, count, context, *cells)
        table.show_last()
    results = {"copy_gb_per_second": round(rate / 1e9, 1), "exactness": checks, "rows": rows}
    return (0 if all(check["exact"] for check in checks) else 1), results


def _sentence(check: dict[str, Any]) -> str:
    verdict = "as transformers" if check["exact"] else "NOT as transformers"
    return (
        f"{check['shape']}: {verdict}; of {check['tokens']} greedy tokens {check['same_likeliest']:.1%} are its"
        f" likeliest, the others at most {check['likeliest_missed_by']} below; log-probabilities differ by"
        f" {check['off_from_transformers']} at most, from float32 by {check['off_from_float32']}"
        f" (transformers by {check['transformers_off_from_float32']})"
    )


if __name__ == "__main__":
    sys.exit(main())
