"""A training step of real shapes on a GPU: tokens per second, share of the peak (MFU), memory. No network, no files.

    python -m benchmarks.gpu_training                                     both shapes, 8k and 16k packed tokens
    python -m benchmarks.gpu_training --shapes 0.6B --tokens 16384
    python -m benchmarks.gpu_training --shapes tiny --tokens 512          the same code on a processor, in seconds

Weights are random, in float32; the arithmetic is bfloat16 (`trainer.dtype`); attention is torch's flash attention over
the packed row. A step is what a run's trainer does with a batch: packing, forward, the decoupled objective, backward,
clipping, AdamW. Each number of tokens is measured as one sequence, with expensive attention, and as sixteen.

MFU counts 6 FLOPs per token and weight of the linear layers and the output matrix, and the half squares of causal
attention; recomputation does not count. The public number for the 0.6B shape (an RL step at 16k context on one H100):
11.9k tokens per second, 11.1 % MFU.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from itertools import product
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from benchmarks.flops import ceiling, step_flops
from benchmarks.lengths import batch
from benchmarks.memory import forget_peak, peak_bytes
from benchmarks.report import Table, save
from stretto.core.records import Sampling
from stretto.model.packed.attention import PACKED_ATTENTION
from stretto.trainer.config import TrainerConfig
from stretto.trainer.objective.algorithm import AlgorithmConfig
from stretto.trainer.objective.corrections import CORRECTIONS
from stretto.trainer.objective.estimators import ESTIMATORS
from stretto.trainer.trainer import Trainer

#: Dense bfloat16 operations per second, by a part of the device's name, the longest first; the makers' data sheets.
PEAKS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "RTX 4090": 165e12,
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
}

SHAPES: dict[str, tuple[type[PreTrainedModel], Qwen2Config | Qwen3Config]] = {
    "0.6B": (
        Qwen3ForCausalLM,
        Qwen3Config(
            vocab_size=151_936,
            hidden_size=1024,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            intermediate_size=3072,
            max_position_embeddings=40_960,
            tie_word_embeddings=True,
        ),
    ),
    "1.5B": (
        Qwen2ForCausalLM,
        Qwen2Config(
            vocab_size=151_936,
            hidden_size=1536,
            num_hidden_layers=28,
            num_attention_heads=12,
            num_key_value_heads=2,
            intermediate_size=8960,
            max_position_embeddings=32_768,
            tie_word_embeddings=True,
        ),
    ),
    "tiny": (
        Qwen3ForCausalLM,
        Qwen3Config(
            vocab_size=512,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            intermediate_size=128,
            max_position_embeddings=40_960,
            tie_word_embeddings=True,
        ),
    ),
}
PROMPT = 1 / 16  # of a sequence; the rest is the answer
ALGORITHM = AlgorithmConfig(advantages=ESTIMATORS("reward"), correction=CORRECTIONS("mask", high=5.0))


def build(shape: str, device: torch.device, attention: str = PACKED_ATTENTION) -> PreTrainedModel:
    """Create a model with random weights on the device."""
    kind, config = SHAPES[shape]
    torch.manual_seed(1)
    with device:
        model: PreTrainedModel = kind._from_config(config, attn_implementation=attention, dtype=torch.float32)
    return model


def measure(trainer: Trainer, tokens: int, sequences: int, steps: int, warm: int) -> dict[str, Any]:
    """Measure steps of `tokens` packed tokens in `sequences` sequences of equal length."""
    model = trainer.learner.model
    device, length = model.device, tokens // sequences
    prompt = max(1, int(length * PROMPT))
    groups = [(prompt, (length - prompt,))] * sequences
    seconds = []
    _forget_peak(device)
    for number in range(warm + steps):
        one = batch(groups, model.config.vocab_size, trainer.version)
        _wait(device)
        began = time.perf_counter()
        trainer.train(one)
        _wait(device)
        if number >= warm:
            seconds.append(time.perf_counter() - began)
    flops = step_flops(model, length * sequences, (length - prompt) * sequences, [length] * sequences)
    typical = statistics.median(seconds)
    return {
        "tokens": length * sequences,
        "sequences": sequences,
        "seconds": [round(second, 4) for second in seconds],
        "tokens_per_second": round(length * sequences / typical, 1),
        "tflops": round(flops / typical / 1e12, 2),
        "peak_gib": round(_peak(device) / 2**30, 2),
    }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _forget_peak(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    else:
        forget_peak()


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_bytes()


def peak_rate(device: torch.device, dtype: str) -> tuple[float, str]:
    """FLOPs per second to which MFU is relative, and the source of the number."""
    if device.type == "cuda" and dtype == "bfloat16":
        name = torch.cuda.get_device_name(device)
        for part, rate in PEAKS.items():
            if part in name:
                return rate, f"data sheet of {part}"
    return ceiling(getattr(torch, dtype), device=device), "the fastest square product here"


def row(shape: str, tokens: int, sequences: int, words: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """One measurement, with a new model; if memory does not suffice, with activation checkpointing."""
    setting = {"shape": shape, "dtype": words.dtype, "tokens": tokens, "sequences": sequences}
    why = ""
    for again in (False, True):
        config = TrainerConfig(
            minibatches=1,
            learning_rate=1e-6,
            dtype=words.dtype,
            micro_batch_tokens=tokens,
            activation_checkpointing=again,
        )
        trainer = Trainer(build(shape, device), config, ALGORITHM, Sampling(max_tokens=tokens))
        try:
            return setting | {"recomputed": again} | measure(trainer, tokens, sequences, words.steps, words.warm)
        except torch.OutOfMemoryError as error:
            why = str(error).partition(". ")[0]
        finally:
            del trainer
    return setting | {"failed": why}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=tuple(SHAPES), default=["0.6B", "1.5B"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16_384], help="packed tokens of a step")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 16], help="equally long sequences in them")
    parser.add_argument("--steps", type=int, default=5, help="steps that are measured")
    parser.add_argument("--warm", type=int, default=3, help="steps before them that are not")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    words = parser.parse_args()
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if words.device == "auto" else words.device
    device = torch.device(kind)
    peak, whose = peak_rate(device, words.dtype)
    print(f"MFU is a share of {peak / 1e12:.1f} TFLOP/s: {whose}")
    rows: list[dict[str, Any]] = []
    table = Table("shape", "packed tokens", "sequences", "activations", "tokens/s", "TFLOP/s", "MFU", "peak GiB")
    for shape, tokens, sequences in product(words.shapes, words.tokens, words.sequences):
        one = row(shape, tokens, sequences, words, device)
        cells: tuple[object, ...] = (one.get("failed"), "", "", "", "")
        if "failed" not in one:
            one["mfu"] = round(one["tflops"] * 1e12 / peak, 4)
            kept = "recomputed" if one["recomputed"] else "kept"
            cells = (kept, one["tokens_per_second"], one["tflops"], f"{one['mfu']:.1%}", one["peak_gib"])
        table.add(shape, tokens, sequences, *cells)
        table.show_last()
        rows.append(one)
    name = "gpu-training" if kind == "cuda" else "gpu-training-on-the-processor"
    save(name, {"device": kind, "peak_tflops": round(peak / 1e12, 2), "peak_is": whose, "rows": rows})


if __name__ == "__main__":
    main()
