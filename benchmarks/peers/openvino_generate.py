"""How fast OpenVINO GenAI generates on this machine, in its own environment; imports nothing of stretto.

    PEER=$(python benchmarks/peers/environment.py openvino)
    "$PEER" benchmarks/peers/openvino_generate.py MODEL_DIR --dtype float32 --sequences 1 16 64 --tokens 192

Uses `ContinuousBatchingPipeline`, OpenVINO's way to answer several prompts at once. optimum-intel exports the model,
which the seconds do not include. float32: weights, sums and KV cache. bfloat16: the hint bf16, although a processor
without AVX512_BF16 or AMX may still compute in float32; the KV cache is bfloat16.

In the peer's favour: no log-probabilities, no text. Prints one JSON object as the last line of standard output:
``{"rows": [{"sequences": 64, "tokens": 12288, "seconds": 2.4}, ...], "version": "2026.4.1.0"}``
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "OPENVINO_LOG_LEVEL": "0"}

import numpy as np
import openvino as ov
import openvino_genai as genai
from optimum.intel import OVModelForCausalLM

PROMPT_TOKENS = 32
KINDS = {"float32": ("f32", "f32"), "bfloat16": ("bf16", "bf16")}  # of products, and of the KV cache


def main() -> None:
    parser = argparse.ArgumentParser(description="OpenVINO GenAI as the peer of the embedded engine")
    parser.add_argument("model")
    parser.add_argument("--dtype", choices=tuple(KINDS), default="float32")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--passes", type=int, default=3, help="the fastest one counts")
    parser.add_argument("--cache", choices=("f32", "bf16", "f16", "u8"), help="type of the KV cache")
    words = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="openvino-model-") as folder:
        export(words.model, Path(folder))
        pipeline = load(Path(folder), words)
        rows = []
        generate(pipeline, prompts(2, words.vocabulary), 8)
        for count in words.sequences:
            asked, seconds = prompts(count, words.vocabulary), []
            for _ in range(words.passes):
                start = time.perf_counter()
                done = generate(pipeline, asked, words.tokens)
                seconds.append(round(time.perf_counter() - start, 6))
                if done != count * words.tokens:
                    raise ValueError(f"{done} tokens instead of {count} times {words.tokens}")
            row = {"sequences": count, "tokens": count * words.tokens, "seconds": min(seconds), "passes": seconds}
            rows.append(row)
    print(json.dumps({"rows": rows, "version": version("openvino-genai")}))


def export(model: str, folder: Path) -> None:
    OVModelForCausalLM.from_pretrained(model, export=True, compile=False, load_in_8bit=False).save_pretrained(folder)


def load(folder: Path, words: argparse.Namespace) -> genai.ContinuousBatchingPipeline:
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 2
    scheduler.max_num_seqs = max(words.sequences)
    scheduler.max_num_batched_tokens = max(256, PROMPT_TOKENS * max(words.sequences))
    scheduler.enable_prefix_caching = False
    products, cache = KINDS[words.dtype]
    settings: dict[str, Any] = {
        "INFERENCE_PRECISION_HINT": products,
        "KV_CACHE_PRECISION": words.cache or cache,
        "INFERENCE_NUM_THREADS": words.threads,
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        "ENABLE_CPU_PINNING": False,
    }
    return genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", settings)


def generate(pipeline: genai.ContinuousBatchingPipeline, asked: list[list[int]], tokens: int) -> int:
    sampling = genai.GenerationConfig()
    sampling.do_sample, sampling.temperature, sampling.top_p = True, 1.0, 1.0
    sampling.max_new_tokens, sampling.ignore_eos, sampling.eos_token_id = tokens, True, 1
    inputs = [ov.Tensor(np.array([ids], np.int64)) for ids in asked]
    answers = pipeline.generate(inputs, [sampling] * len(asked))
    return sum(len(answer.m_generation_ids[0]) for answer in answers)


def prompts(count: int, vocabulary: int) -> list[list[int]]:
    """The same prompts that `benchmarks.generators` uses."""
    chance = random.Random(7)
    return [[chance.randrange(2, vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


if __name__ == "__main__":
    main()
