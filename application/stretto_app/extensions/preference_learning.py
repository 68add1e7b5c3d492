"""Learning from preferences by DPO (Rafailov et al., arXiv 2305.18290), with the packing and the optimizer of RL.

    loss = - log sigmoid( beta (log policy(chosen) / reference(chosen) - log policy(rejected) / reference(rejected)) )

The probabilities are those of whole completions. The loss is the mean over the pairs of a batch, and does not depend on
how they are packed.

Axes: P pair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from stretto.core.events import SupervisedProgress
from stretto.model.packed.logprobs import PackedTokens, pack_tokens
from stretto.trainer.batch.minibatch import micro_batches
from stretto.trainer.config import OptimizerConfig, PreferenceConfig
from stretto.trainer.messages import Preference, Preferences, SupervisedSpec
from stretto.trainer.objective.tokens import Sequences
from stretto.trainer.optimizer import UNCHANGED, Learner, learning_rate
from stretto.trainer.reference import ReferencePolicy
from stretto.trainer.roles.supervised import drawn


def learn(
    spec: SupervisedSpec,
    examples: Preferences,
    load: Callable[[str, OptimizerConfig], PreTrainedModel],
    progress: Callable[[SupervisedProgress], None],
) -> tuple[PreTrainedModel, OptimizerConfig]:
    """Train the model of `spec` on the pairs of `examples`, as `prefer` does; returns it with its settings. `load`
    loads a model folder for training with these settings. `progress` is called after each step."""
    config = PreferenceConfig.model_validate_json(spec.config)
    model, reference = load(spec.model, config), load(examples.reference, config)
    prefer(model, reference, examples.pairs, config, seed=spec.seed, progress=progress)
    return model, config


def dpo(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """Loss of each pair, -log sigmoid(beta (chosen - rejected)), [P]; equation 7 of DPO.

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
    returns the loss, and the share of pairs whose chosen completion gained more than the rejected one."""
    loss, right = 0.0, 0
    for pack in micro_batches([pair.tokens for pair in batch], config.micro_batch_tokens, config.min_micro_batches):
        packed, sequences = _packed([batch[i] for i in pack], learner.model.device)
        gaps = learner.logprobs(packed).logprobs - reference.logprobs(packed)
        chosen, rejected = sequences.sums(gaps).view(-1, 2).unbind(1)
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
