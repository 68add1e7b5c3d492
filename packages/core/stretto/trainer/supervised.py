"""Supervised fine-tuning, with the packing and the optimizer of RL, for the warm start of a run and `stretto sft`. The
loss is the mean cross-entropy over the completion tokens of a batch, and does not depend on how they are packed.
Prompts are context, not in the loss.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from transformers import PreTrainedModel

from stretto.core.events import SupervisedProgress
from stretto.core.records import derive_seed
from stretto.model.hf.layers import linear_layers
from stretto.model.packed.logprobs import pack_tokens
from stretto.trainer.batch.minibatch import micro_batches
from stretto.trainer.config import SupervisedConfig
from stretto.trainer.messages import Demonstration
from stretto.trainer.optimizer import Learner, Muon, learning_rate


def fine_tune(
    model: PreTrainedModel,
    demonstrations: Sequence[Demonstration],
    config: SupervisedConfig,
    *,
    seed: int,
    progress: Callable[[SupervisedProgress], None] = lambda _: None,
) -> None:
    """Train `model` in place for `config.steps` steps. It must be loaded with packed attention. `progress` is called
    after each step.

    Each pass over the demonstrations is in a new order that depends on `seed` alone.

    Raises:
        ValueError: there is no demonstration, or a demonstration has an empty prompt or completion.
        TrainingDiverged: `max_bad_steps` steps in a row had gradients that are not finite.
    """
    if not all(d.prompt_ids and d.completion_ids for d in demonstrations) or not demonstrations:
        raise ValueError("supervised fine-tuning needs demonstrations, each with a prompt and a completion")
    learner = Learner(model, config)
    matrices, on_host = [layer.weight for layer in linear_layers(model).values()], config.optimizer_states == "host"
    muon = Muon(matrices, on_host=on_host) if config.optimizer == "muon" else None
    batches = drawn(len(demonstrations), config.batch_size, seed)
    for step in range(config.steps):
        batch = [demonstrations[index] for index in next(batches)]
        loss = _accumulate(learner, batch, config)
        rate = learning_rate(config, step, config.steps)
        matrix_rate = config.matrix_learning_rate * rate / config.learning_rate
        learner.step(rate, step, before=partial(muon.step, matrix_rate) if muon is not None else None)
        progress(SupervisedProgress(step + 1, config.steps, loss))


def _accumulate(learner: Learner, batch: Sequence[Demonstration], config: SupervisedConfig) -> float:
    """Accumulate the gradient of the mean cross-entropy over the batch's completion tokens; returns that mean."""
    sequences = [d.prompt_ids + d.completion_ids for d in batch]
    completions = [range(len(d.prompt_ids), len(s)) for d, s in zip(batch, sequences, strict=True)]
    total = sum(len(completion) for completion in completions)
    loss = 0.0
    for pack in micro_batches([len(s) for s in sequences], config.micro_batch_tokens, config.min_micro_batches):
        packed = pack_tokens([sequences[i] for i in pack], [completions[i] for i in pack], learner.model.device)
        part = -learner.logprobs(packed).logprobs.sum() / total
        part.backward()
        loss += float(part.detach())
    return loss


def drawn(count: int, batch_size: int, seed: int) -> Iterator[list[int]]:
    """Yield batches of `batch_size` indices below `count` without end. Each pass over the indices is in a new random
    order, decided by `seed`; a batch may span two passes."""
    ahead: list[int] = []
    epoch = 0
    while True:
        while len(ahead) < batch_size:
            order = list(range(count))
            random.Random(derive_seed("demonstrations", seed, epoch)).shuffle(order)
            ahead += order
            epoch += 1
        yield ahead[:batch_size]
        del ahead[:batch_size]
