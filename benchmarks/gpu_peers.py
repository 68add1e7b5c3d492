"""Parts of `python -m benchmarks.gpu` beside transformers alone, on the same work: answers of a fixed length to prompts
that differ, and one training step. What a user would write by hand: `generate`, `generate_batch`, a padded batch.

Times are of whole answers, prompts included; the first pass of each number of sequences does not count.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from benchmarks import gpu_generation, gpu_training
from benchmarks.gpu_parts import Asked
from benchmarks.gpu_training import ALGORITHM
from benchmarks.lengths import batch
from benchmarks.padded import PaddedTrainer
from stretto.core.records import GenerateRequest, Sampling
from stretto.engine.config import EngineConfig
from stretto.engine.native.engine import NativeEngine
from stretto.model.attention_support import check_attention
from stretto.model.decode.policy import cache_layout
from stretto.trainer.config import TrainerConfig
from stretto.trainer.trainer import Trainer

PAGE = 32  # tokens of a page of transformers' continuous cache
PREFILL = 16_384  # tokens of prompts in a step of the engine
BATCH = 2048  # tokens of a step of transformers' continuous batching
PASSES = 2  # of which the first does not count

Prompts = Sequence[tuple[int, ...]]
#: Answers all prompts; returns the number of tokens.
Answers = Callable[[Prompts], int]
#: What has the model of a shape, for a number of sequences.
Way = Callable[[Asked, int], AbstractContextManager[Answers]]


def beside(asked: Asked) -> dict[str, Any]:
    """Tokens per second of the engine and of transformers' `generate`, with its growing and its static cache; seconds
    of a training step and of the same one with padded rows."""
    ways = {"stretto": _stretto, "generate": _growing, "generate_static": _static}
    return {**_answered(asked, ways), "training": _trained(asked)}


def continuous(asked: Asked) -> dict[str, Any]:
    """Tokens per second of transformers' continuous batching. Without its kernel of the hub each token is compared with
    the whole cache under a mask: 128 prompts of 512 tokens would take minutes, so the largest number is left out."""
    return _answered(asked, {"generate_batch": _continuous}, asked.size.together[:2])


def compiled(asked: Asked) -> dict[str, Any]:
    """Tokens per second of transformers' `generate` with a static cache, compiled as it does by itself on a GPU, at one
    number of sequences: each has to be compiled anew. The first pass, which compiles, is told too."""
    return _answered(asked, {"generate_compiled": _compiled}, asked.size.compiled)


def _answered(asked: Asked, ways: Mapping[str, Way], counts: Sequence[int] = ()) -> dict[str, Any]:
    prompt, tokens = asked.size.answered
    rows = [{"sequences": count} for count in counts or asked.size.together]
    for name, way in ways.items():
        for row in rows:
            with way(asked, row["sequences"]) as answers:
                row |= _timed(asked, name, answers, row["sequences"])
            gc.collect()
            if asked.device.type == "cuda":
                torch.cuda.empty_cache()
    return {"prompt_tokens": prompt, "answer_tokens": tokens, "rows": rows}


def _timed(asked: Asked, name: str, answers: Answers, count: int) -> dict[str, Any]:
    prompt, tokens = asked.size.answered
    seconds = []
    for number in range(PASSES):
        vocabulary = gpu_training.SHAPES[asked.size.shape][1].vocab_size
        drawn = np.random.default_rng(number).integers(2, vocabulary, (count, prompt)).tolist()
        gpu_training._wait(asked.device)
        began = time.perf_counter()
        done = answers([tuple(one) for one in drawn])
        gpu_training._wait(asked.device)
        seconds.append(time.perf_counter() - began)
        if done != count * tokens:
            return {f"{name}_failed": f"{done} tokens instead of {count} times {tokens}"}
    rate = round(count * tokens / seconds[-1], 1)
    return {f"{name}_tokens_per_second": rate, f"{name}_first_seconds": round(seconds[0], 3)}


@contextmanager
def _stretto(asked: Asked, count: int) -> Iterator[Answers]:
    model = gpu_generation.build(asked.size.shape, asked.device)
    layout = cache_layout(model, check_attention(model))
    room = gpu_generation._cache_bytes(layout, count, sum(asked.size.answered)) / 2**30
    engine = NativeEngine(model, EngineConfig(slots=count, cache_gib=1.01 * room, max_prefill_tokens=PREFILL))
    sampling = Sampling(max_tokens=asked.size.answered[1])

    def answers(prompts: Prompts) -> int:
        for number, prompt in enumerate(prompts):
            engine.add(GenerateRequest(str(number), prompt, (number,), sampling))
        done = 0
        while not engine.idle:
            done += sum(len(completion.token_ids) for completion in engine.step())
        return done

    yield answers


def _sampled(asked: Asked, **more: Any) -> GenerationConfig:
    """Sampling at temperature 1 from all tokens; no answer ends early."""
    tokens = asked.size.answered[1]
    return GenerationConfig(
        max_new_tokens=tokens, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0, **more
    )


def _generate(asked: Asked, config: GenerationConfig) -> Answers:
    model: Any = gpu_generation.build(asked.size.shape, asked.device, "sdpa")  # its generation methods are not typed
    model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def answers(prompts: Prompts) -> int:
        ids = torch.tensor(prompts, device=asked.device)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        return int(out.numel() - ids.numel())

    return answers


@contextmanager
def _growing(asked: Asked, count: int) -> Iterator[Answers]:
    yield _generate(asked, _sampled(asked))


@contextmanager
def _static(asked: Asked, count: int) -> Iterator[Answers]:
    yield _generate(asked, _sampled(asked, cache_implementation="static", disable_compile=True))


@contextmanager
def _compiled(asked: Asked, count: int) -> Iterator[Answers]:
    yield _generate(asked, _sampled(asked, cache_implementation="static"))


@contextmanager
def _continuous(asked: Asked, count: int) -> Iterator[Answers]:
    """With a cache as large as the work needs, and transformers' own choice of everything else. Flash attention is a
    kernel of the hub, which is not fetched."""
    model: Any = gpu_generation.build(asked.size.shape, asked.device, "sdpa")  # as above
    model.generation_config.eos_token_id = None
    model._supports_flash_attn = False
    name = "page_size" if hasattr(ContinuousBatchingConfig, "page_size") else "block_size"  # of transformers 5.17
    page: dict[str, Any] = {name: PAGE}
    pages = -(-sum(asked.size.answered) // PAGE) + 1
    graphs = None if asked.device.type == "cuda" else False
    config = ContinuousBatchingConfig(
        **page,
        num_blocks=count * pages,
        max_batch_tokens=max(BATCH, count),
        use_cuda_graph=graphs,
    )

    def answers(prompts: Prompts) -> int:
        out = model.generate_batch(
            [list(prompt) for prompt in prompts],
            generation_config=_sampled(asked),
            continuous_batching_config=config,
            persistent_manager=True,  # captures its graphs in the first pass only
        )
        return sum(len(answer.generated_tokens) for answer in out.values())

    try:
        yield answers
    finally:
        model.destroy_cached_continuous_batching_manager()


def _trained(asked: Asked) -> dict[str, Any]:
    """The step of `gpu_training`, and the same objective over rows that go through transformers' model together."""
    size, device = asked.size, asked.device
    tokens, rows = size.tokens[0], min(16, size.tokens[0] // 8)
    config = TrainerConfig(minibatches=1, learning_rate=1e-6, dtype=size.dtype, micro_batch_tokens=tokens)  # type: ignore[arg-type]
    found: dict[str, Any] = {"tokens": tokens, "sequences": rows}

    def packed() -> Callable[..., object]:
        trainer = Trainer(gpu_training.build(size.shape, device), config, ALGORITHM, Sampling(max_tokens=tokens))
        return trainer.train

    def padded() -> Callable[..., object]:
        model = gpu_training.build(size.shape, device, "sdpa")
        return PaddedTrainer(model, config, ALGORITHM, longest=tokens, rows=rows).train

    for name, way in (("stretto", packed), ("padded", padded)):
        gpu_training._forget_peak(device)
        seconds = _steps(asked, way(), tokens // rows, rows)
        found[f"{name}_tokens_per_second"] = round(tokens / float(np.median(seconds)), 1)
        found[f"{name}_peak_gib"] = round(gpu_training._peak(device) / 2**30, 2)
    return found


def _steps(asked: Asked, train: Callable[..., object], length: int, rows: int) -> list[float]:
    prompt = max(1, int(length * gpu_training.PROMPT))
    vocabulary, warm = gpu_training.SHAPES[asked.size.shape][1].vocab_size, 2
    seconds = []
    for number in range(warm + asked.size.steps):
        one = batch([(prompt, (length - prompt,))] * rows, vocabulary, number)
        gpu_training._wait(asked.device)
        began = time.perf_counter()
        train(one)
        gpu_training._wait(asked.device)
        seconds.append(time.perf_counter() - began)
    return seconds[warm:]


PARTS: Mapping[str, Callable[[Asked], dict[str, Any]]] = {
    "beside": beside,
    "continuous": continuous,
    "compiled": compiled,
}
