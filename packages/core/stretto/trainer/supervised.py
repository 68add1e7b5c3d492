"""Supervised learning, with the packing and the optimizer of RL: fine-tuning, for the warm start of a run and `stretto
sft`, and learning from preferences by DPO (Rafailov et al., arXiv 2305.18290).

Fine-tuning: the loss is the mean cross-entropy over the completion tokens of a batch, and does not depend on how they
are packed. Prompts are context, not in the loss.

Preferences::

    loss = - log sigmoid( beta (log policy(chosen) / reference(chosen) - log policy(rejected) / reference(rejected)) )

The probabilities are those of whole completions. The loss is the mean over the pairs of a batch, and does not depend on
how they are packed.

Axes: N completion token, P pair.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from stretto.core.events import SupervisedProgress
from stretto.core.records import derive_seed
from stretto.model.hf.layers import linear_layers
from stretto.model.packed.logprobs import PackedTokens, pack_tokens
from stretto.trainer.batch.minibatch import micro_batches
from stretto.trainer.config import PreferenceConfig, SupervisedConfig
from stretto.trainer.messages import Demonstration, Preference
from stretto.trainer.objective.tokens import Sequences
from stretto.trainer.optimizer import UNCHANGED, Learner, Muon, learning_rate
from stretto.trainer.reference import ReferencePolicy


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


def dpo(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """-log sigmoid(beta (chosen - rejected)), [P]; equation 7.

    `chosen` and `rejected` are log policy - log reference of whole completions, [P].
    """
    return -functional.logsigmoid(beta * (chosen - rejected))


def prefer(
    model: PreTrainedModel,
    reference: PreTrainedModel,
    pairs: Sequence[Preference],
    config: PreferenceConfig,
    *,
    seed: int,
    progress: Callable[[SupervisedProgress], None] = lambda _: None,
) -> None:
    """Train `model` in place for `config.steps` steps. Both models must be loaded with packed attention; `reference` is
    not trained. `progress` is called after each step.

    Each pass over the pairs is in a new order that depends on `seed` alone.

    Raises:
        ValueError: there is no pair, or a pair has an empty prompt or completion.
        TrainingDiverged: `max_bad_steps` steps in a row had gradients that are not finite.
    """
    if not pairs or not all(p.prompt_ids and p.chosen_ids and p.rejected_ids for p in pairs):
        raise ValueError("learning from preferences needs pairs, each with a prompt and two completions")
    learner = Learner(model, config)
    frozen = ReferencePolicy(reference, config, UNCHANGED)
    batches = drawn(len(pairs), config.batch_size, seed)
    for step in range(config.steps):
        loss, accuracy = _accumulate_pairs(learner, frozen, [pairs[i] for i in next(batches)], config)
        learner.step(learning_rate(config, step, config.steps), step)
        progress(SupervisedProgress(step + 1, config.steps, loss, accuracy=accuracy, phase="preferences"))


def _accumulate_pairs(
    learner: Learner, reference: ReferencePolicy, batch: Sequence[Preference], config: PreferenceConfig
) -> tuple[float, float]:
    """Accumulate the gradient of the mean loss over the batch's pairs, which are never split between micro-batches;
    returns the loss and the share of pairs ranked correctly."""
    loss, right = 0.0, 0
    for pack in micro_batches([pair.tokens for pair in batch], config.micro_batch_tokens, config.min_micro_batches):
        packed, sequences = _packed([batch[i] for i in pack], learner.model.device)
        gap_N = learner.logprobs(packed).logprobs - reference.logprobs(packed)
        chosen, rejected = sequences.sums(gap_N).view(-1, 2).unbind(1)
        part = dpo(chosen, rejected, config.beta).sum() / len(batch)
        part.backward()
        loss += float(part.detach())
        right += int((chosen > rejected).sum())
    return loss, right / len(batch)


def _packed(pairs: Sequence[Preference], device: torch.device) -> tuple[PackedTokens, Sequences]:
    """Pack the sequences of the pairs in the order chosen, rejected, chosen, rejected, ...; the completions' tokens are
    scored. Also returns the assignment of these tokens to the sequences."""
    completions = [(p.prompt_ids, completion) for p in pairs for completion in (p.chosen_ids, p.rejected_ids)]
    wanted = [range(len(prompt), len(prompt) + len(completion)) for prompt, completion in completions]
    # As in `minibatch.py`: on the CPU the two completions share the computation of their prompt.
    prompts = None if device.type == "cuda" else [len(prompt) for prompt, _ in completions]
    packed = pack_tokens([prompt + completion for prompt, completion in completions], wanted, device, prompts)
    return packed, Sequences.of(torch.tensor([len(places) for places in wanted], dtype=torch.int64, device=device))
