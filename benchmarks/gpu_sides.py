"""More parts of `python -m benchmarks.gpu`: sampling, publication during training, several ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks import gpu_training
from benchmarks.gpu_parts import RECIPE, Asked, milliseconds, model_folder
from benchmarks.gpu_training import ALGORITHM, SHAPES
from benchmarks.lengths import batch
from benchmarks.runs import train
from stretto.core.records import Sampling
from stretto.engine.native.sampling import Filtered, draw_by_torch, tempered
from stretto.model.truncation import Truncation
from stretto.trainer.config import TrainerConfig
from stretto.trainer.trainer import Trainer
from stretto.weights.folder import remove, shared_folder
from stretto.weights.mailbox import texts
from stretto.weights.shared_memory import SharedMemoryPublisher, SharedMemorySubscriber
from stretto_kernels.gpu.draw import draw_on_device
from stretto_report.audit.check import check_run

LEARN = RECIPE.with_name("gpu_learn.toml")
GOAL = 0.9  # of its evaluations
_RUN = "benchmark.gpu"
_NEAR = 1e-5  # nats


def drawing(asked: Asked) -> dict[str, Any]:
    """Milliseconds of sampling from logits of the vocabulary, by kernels and by torch, without filters, with top-k and
    top-p, and with a top-p that leaves thousands; the share of equal tokens, and the largest difference of
    log-probabilities."""
    vocabulary = SHAPES[asked.size.shape][1].vocab_size
    return {"vocabulary": vocabulary} | {
        name: [_drawn(asked, rows, vocabulary, top_k, top_p) for rows in asked.size.sequences]
        for name, top_k, top_p in (("plain", 0, 1.0), ("filtered", 40, 0.95), ("nucleus", 0, 0.95))
    }


def _drawn(asked: Asked, rows: int, vocabulary: int, top_k: int, top_p: float) -> dict[str, Any]:
    logits = 3 * torch.randn(rows, vocabulary, device=asked.device)
    temperatures, every = np.full(rows, 0.8, np.float32), np.arange(rows)
    uniforms = np.random.default_rng(rows).random(rows)
    truncation = Truncation(np.full(rows, top_k), np.full(rows, top_p), np.zeros(rows))
    given = Filtered(every, truncation) if top_p < 1.0 else None

    def fused() -> tuple[Any, Any]:
        return draw_on_device(logits, temperatures, uniforms, every, truncation.settings if given else None)

    def plain() -> tuple[Any, Any]:
        return draw_by_torch(tempered(logits, temperatures, given), temperatures == 0, uniforms)

    (tokens, logprobs), (expected, known) = fused(), plain()
    same = tokens == expected
    off = float(np.abs(logprobs - known)[same].max()) if same.any() else float("nan")
    return {
        "rows": rows,
        "fused_ms": milliseconds(fused, asked),
        "plain_ms": milliseconds(plain, asked),
        "same_tokens": round(float(same.mean()), 4),
        "off_by": off,
    } | ({} if off <= _NEAR + _lightest(logits / 0.8, top_p) else {"failed": f"log-probabilities differ by {off}"})


def _lightest(logits: torch.Tensor, top_p: float) -> float:
    """Share of its nucleus that the least likely token in it has, the largest of all rows; 0 without top-p. Rounding
    decides whether this token is kept, and by so many nats the log-probabilities of the others differ."""
    shares = logits.double().softmax(-1).sort(-1, descending=True).values
    last = (shares.cumsum(-1) < top_p).sum(-1, keepdim=True).clamp(max=shares.shape[-1] - 1)
    return float(shares.gather(-1, last).max()) / top_p if top_p < 1.0 else 0.0


def publication(asked: Asked) -> dict[str, Any]:
    """Seconds of a step alone and during the writing of a version, of the copy, and of the writing; and whether the
    copied version was written, although the optimizer has gone on."""
    size, device = asked.size, asked.device
    tokens = size.tokens[0]
    config = TrainerConfig(minibatches=1, dtype=size.dtype, micro_batch_tokens=tokens)  # type: ignore[arg-type]
    trainer = Trainer(gpu_training.build(size.shape, device), config, ALGORITHM, Sampling(max_tokens=tokens))
    model = trainer.learner.model
    place = shared_folder(2 * sum(one.numel() for one in model.parameters()), asked.folder)
    publisher, subscriber = SharedMemoryPublisher(_RUN, place, torch.bfloat16), SharedMemorySubscriber(_RUN, place)
    step = partial(_step, trainer, tokens, device)
    try:
        trainer.publish(publisher)  # memory of the copies is found
        step()
        alone = [step() for _ in range(size.steps)]
        beside, copying, writing, right = list[float](), list[float](), list[float](), list[bool]()
        for _ in range(size.steps):
            expected = texts({name: one.to(torch.bfloat16) for name, one in model.named_parameters()})
            began = time.perf_counter()
            write = trainer.copied(publisher)
            copying.append(time.perf_counter() - began)
            version, ended = trainer.version, list[float]()
            thread = threading.Thread(target=lambda work=write, ended=ended: ended.append(_seconds(work)))
            thread.start()
            beside.append(step())
            thread.join()
            writing += ended
            right.append(texts(subscriber.load(version)) == expected)
    finally:
        remove(_RUN, place)
    told = {"step_alone": alone, "step_beside": beside, "copy": copying, "write": writing}
    found: dict[str, Any] = {name: [round(one, 4) for one in seconds] for name, seconds in told.items()}
    wrong = {} if all(right) else {"failed": "a version is not that of its copy"}
    return found | {"versions_right": sum(right)} | wrong


def _step(trainer: Trainer, tokens: int, device: torch.device) -> float:
    one = batch([(8, (tokens // 4 - 8,))] * 4, trainer.learner.model.config.vocab_size, trainer.version)
    began = time.perf_counter()
    trainer.train(one)
    gpu_training._wait(device)
    return time.perf_counter() - began


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def ranks(asked: Asked) -> dict[str, Any]:
    """Losses of a synchronous run with two ranks, and with all GPUs, beside those of one rank; each run writes a
    checkpoint."""
    cards = torch.cuda.device_count() if asked.device.type == "cuda" else 2
    if cards < 2:
        return {"ranks": "one GPU"}
    model = model_folder(asked.size.shape, asked.folder / "model")
    words = ["rollout.max_staleness=0", "trainer.steps=3", "trainer.checkpoint_every=2", f"model.path={model}"]
    words += ["algorithm.advantages=reward", "algorithm.shaping.bias=1.0"]  # else a model of random weights has no loss
    told = {word.partition("=")[0] for word in words}
    others = [word for word in asked.size.run if word.partition("=")[0] not in told]
    found: dict[str, Any] = {}
    for count in sorted({1, 2, cards}):
        seen = train([*others, *words, f"trainer.ranks={count}"], RECIPE, asked.folder / f"ranks-{count}")
        found[str(count)] = {
            "losses": [one.trainer.get("loss") for one in seen.steps],
            "gradient_norms": [one.trainer.get("grad_norm") for one in seen.steps],
            "seconds": round(seen.inspection.rl_seconds, 2),
        }
    return found


def learn(asked: Asked) -> dict[str, Any]:
    """A whole run that learns: the task of recipes/arithmetic.toml with a model of 27M, until the held-out accuracy is
    0.9; what its evaluations and the laws of `stretto check` say."""
    folder = asked.folder / "learn"
    seen = train(asked.size.learn, LEARN, folder)
    inspection = seen.inspection
    broken = {law: breaches for law, breaches in check_run(folder).breaches.items() if breaches}
    return {
        "accuracy": [[one.step, round(one.rl_seconds, 1), one.accuracy] for one in seen.evaluations],
        "goal": GOAL,
        "seconds_to_goal": seen.seconds_to(GOAL),
        "steps": inspection.steps,
        "rl_seconds": round(inspection.rl_seconds, 1),
        "trajectories_trained": inspection.trajectories.trained,
        "trained_per_second": round(seen.trained_per_second, 1),
        "tokens_generated_per_second": round(inspection.tokens.generated / inspection.rl_seconds, 1),
        "staleness_mean": round(inspection.staleness.mean, 3),
        "interrupted": inspection.interrupted,
        "busy": inspection.busy,
        "weights": inspection.weights,
    } | ({"failed": "a law of `stretto check` does not hold", "broken": broken} if broken else {})


PARTS: Mapping[str, Callable[[Asked], dict[str, Any]]] = {
    "drawing": drawing,
    "publication": publication,
    "ranks": ranks,
    "learn": learn,
}
