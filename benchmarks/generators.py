"""How fast one system generates, in a process of its own, so that no system inherits another's threads or memory.

    python -m benchmarks.generators stretto MODEL_DIR --dtype float32 --sequences 1 16 64 --tokens 192

Every answer has the same number of tokens: nothing is padded, and a pass with fewer tokens is refused. Prints one JSON
line per number of sequences: the seconds of the fastest pass, and of every pass.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from stretto.core.records import GenerateRequest, Sampling
from stretto.engine.config import EngineConfig
from stretto.engine.native.engine import NativeEngine
from stretto.model.hf.folder import load_policy

PROMPT_TOKENS = 32
PAGE = 32  # tokens of a page of transformers' continuous cache

Prompts = Sequence[tuple[int, ...]]
Generator = Callable[[Prompts, int], int]


def prompts(count: int, vocabulary: int) -> Prompts:
    """The same random prompts for every system."""
    chance = random.Random(7)
    return [tuple(chance.randrange(2, vocabulary) for _ in range(PROMPT_TOKENS)) for _ in range(count)]


def stretto(model: Path, dtype: str, most: int) -> Generator:
    """The native engine, with log-probabilities and versions."""
    engine = NativeEngine(
        load_policy(model, attention="stretto_cached", dtype=dtype),
        EngineConfig.model_validate({"slots": most, "dtype": dtype}),
    )

    def generate(asked: Prompts, tokens: int) -> int:
        for number, prompt in enumerate(asked):
            sampling = Sampling(max_tokens=tokens)
            engine.add(GenerateRequest(id=str(number), prompt_token_ids=prompt, seeds=(number,), sampling=sampling))
        done = 0
        while not engine.idle:
            done += sum(len(completion.token_ids) for completion in engine.step())
        return done

    return generate


def transformers_generate(model: Path, dtype: str, most: int) -> Generator:
    """transformers' `generate` with a dynamic cache and sdpa attention, in one batch of at most `most`."""
    policy: Any = load_policy(model, attention="sdpa", dtype=dtype)  # its generation methods are not typed

    @torch.inference_mode()
    def generate(asked: Prompts, tokens: int) -> int:
        ids = torch.tensor(asked)
        config = _sampled(policy, tokens)
        out = policy.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        return int(out.numel() - ids.numel())

    return generate


def transformers_continuous(model: Path, dtype: str, most: int) -> Generator:
    """transformers' own continuous batching (`generate_batch`), with a cache as large as the work needs."""
    policy: Any = load_policy(model, attention="sdpa", dtype=dtype)  # its generation methods are not typed

    def generate(asked: Prompts, tokens: int) -> int:
        pages = -(-(PROMPT_TOKENS + tokens) // PAGE)
        cache = ContinuousBatchingConfig(
            page_size=PAGE, num_blocks=len(asked) * pages, max_batch_tokens=max(512, len(asked)), use_cuda_graph=False
        )
        out = policy.generate_batch(
            [list(prompt) for prompt in asked],
            generation_config=_sampled(policy, tokens),
            continuous_batching_config=cache,
        )
        return sum(len(answer.generated_tokens) for answer in out.values())

    return generate


def _sampled(policy: PreTrainedModel, tokens: int) -> GenerationConfig:
    # What is None in the config of a call is filled in from the model's.
    policy.generation_config.eos_token_id = None
    return GenerationConfig(
        max_new_tokens=tokens,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        eos_token_id=None,  # no answer ends early
        pad_token_id=policy.config.pad_token_id,
    )


SYSTEMS = {
    "stretto": stretto,
    "transformers generate": transformers_generate,
    "transformers generate_batch": transformers_continuous,
}


def timed(generate: Generator, asked: Prompts, tokens: int, passes: int) -> dict[str, Any]:
    """Seconds of each pass over the prompts, and of the fastest.

    Raises:
        ValueError: a pass gave a wrong number of tokens, so its time has no meaning.
    """
    seconds: list[float] = []
    for _ in range(passes):
        start = time.perf_counter()
        done = generate(asked, tokens)
        seconds.append(round(time.perf_counter() - start, 6))
        if done != len(asked) * tokens:
            raise ValueError(f"{done} tokens instead of {len(asked)} times {tokens}")
    return {"sequences": len(asked), "tokens": len(asked) * tokens, "seconds": min(seconds), "passes": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--passes", type=int, default=3, help="the fastest one counts: memory is new in the first")
    words = parser.parse_args()
    torch.set_num_threads(words.threads)
    vocabulary = json.loads((words.model / "config.json").read_text())["vocab_size"]
    generate = SYSTEMS[words.system](words.model, words.dtype, max(words.sequences))
    generate(prompts(2, vocabulary), 8)  # first calls cost more
    for count in words.sequences:
        print(json.dumps(timed(generate, prompts(count, vocabulary), words.tokens, words.passes)), flush=True)


if __name__ == "__main__":
    main()
