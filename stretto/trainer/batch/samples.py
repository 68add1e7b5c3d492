"""From a batch of groups to samples: one for each trajectory, with everything known about its tokens.

A sample is the prompt and the segments behind it. Its loss tokens are the sampled tokens that are young enough to be
trained on (``Batch.oldest_trainable``). All others, given ones too, are context; a trajectory without loss tokens
makes no sample.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from stretto.core.errors import BoundViolated
from stretto.core.records import Batch, Prompt, Trajectory
from stretto.trainer.objective.algorithm import AlgorithmConfig
from stretto.trainer.objective.estimators import GAE, Estimator, RewardedCompletion, advantages_of, generalised
from stretto.trainer.objective.shaping import shaped

#: A score for each sampled token of each trajectory, by its id (`scoring.py`).
TokenScores = Mapping[str, Sequence[float]]
NO_SCORES: TokenScores = MappingProxyType({})


@dataclass(frozen=True)
class Sample:
    """Example: prompt (5, 12), completion (4, 4, 2) of versions (5, 6, 7), trained at 7 with versions from 6 on::

    Sample(id="0.17.0/3", token_ids=(5, 12, 4, 4, 2), prompt_tokens=2, loss_positions=(3, 4),
        behavior_logprobs=(-0.7, -0.02), staleness=(1, 0), advantages=(0.5, 0.5))
    """

    id: str  # of the trajectory
    token_ids: tuple[int, ...]
    prompt_tokens: int
    loss_positions: tuple[int, ...]  # [N], ascending, each at least 1
    behavior_logprobs: tuple[float, ...]  # [N]
    staleness: tuple[int, ...]  # [N], versions between the one that sampled the token and the one in training
    advantages: tuple[float, ...]  # [N]
    values: tuple[float, ...] = ()  # [N], by the critic before the step; empty without one, and the returns too
    returns: tuple[float, ...] = ()  # [N], the critic's targets


@dataclass(frozen=True)
class SampledBatch:
    """A batch as the trainer sees it."""

    samples: tuple[Sample, ...]
    masked_tokens: int  # sampled tokens too old to be trained on
    reward_mean: float  # over all trajectories of the batch, as given: neither shaped nor less a KL
    kl_reference: float | None = None  # mean over all sampled tokens, where it is part of the reward


def samples_of(
    batch: Batch,
    config: AlgorithmConfig,
    longest: int,
    values: TokenScores = NO_SCORES,
    reference_logprobs: TokenScores = NO_SCORES,
) -> SampledBatch:
    """Advantages over the whole batch, then one sample for each trajectory that has loss tokens.

    `longest` is ``sampling.max_tokens``; `values` are the critic's, of the state before each sampled token;
    `reference_logprobs` are needed where the KL is part of the reward.

    Raises:
        BoundViolated: a token has no log-probability or version, or was sampled by a version not published yet.
    """
    members = [[(group.prompt, trajectory) for trajectory in group.trajectories] for group in batch.groups]
    kl = _kl(batch, config, reference_logprobs)
    completions = [
        [_rewarded(trajectory, batch, config, longest, values, kl) for _, trajectory in group] for group in members
    ]
    advantages = advantages_of(config.advantages, completions)
    samples = [
        _sample(*member, completion, one, batch.version, config.advantages)
        for group in zip(members, completions, advantages, strict=True)
        for member, completion, one in zip(*group, strict=True)
        if completion.trained
    ]
    rewards = [trajectory.reward for group in members for _, trajectory in group]
    tokens = sum(completion.tokens for group in completions for completion in group)
    return SampledBatch(
        samples=tuple(samples),
        masked_tokens=tokens - sum(len(sample.loss_positions) for sample in samples),
        reward_mean=sum(rewards) / len(rewards) if rewards else 0.0,
        kl_reference=sum(map(math.fsum, kl.values())) / tokens if kl and tokens else None,
    )


def _kl(batch: Batch, config: AlgorithmConfig, reference_logprobs: TokenScores) -> TokenScores:
    """KL(behavior || reference) at each sampled token, where it is part of the reward."""
    estimator = config.divergence("reward")
    if estimator is None:
        return NO_SCORES
    return {
        t.id: estimator(torch.tensor(t.behavior_logprobs), torch.tensor(reference_logprobs[t.id])).tolist()
        for group in batch.groups
        for t in group.trajectories
    }


def _rewarded(
    trajectory: Trajectory, batch: Batch, config: AlgorithmConfig, longest: int, values: TokenScores, kl: TokenScores
) -> RewardedCompletion:
    tokens = len(trajectory.versions)
    weight = config.reference.weight if config.reference is not None else 0.0
    return RewardedCompletion(
        reward=shaped(trajectory.reward, tokens, longest, config.shaping),
        tokens=tokens,
        trained=_trainable(trajectory, batch),
        values=values.get(trajectory.id, ()),
        kl=[weight * one for one in kl.get(trajectory.id, ())],
    )


def _trainable(trajectory: Trajectory, batch: Batch) -> tuple[int, ...]:
    """The loss tokens, as indices among the sampled tokens."""
    versions = trajectory.versions
    for segment in trajectory.segments:
        if not len(segment.versions) == len(segment.behavior_logprobs) in (0, len(segment.token_ids)):
            raise BoundViolated(f"trajectory {trajectory.id}: a token lacks its version or log-prob")
    if versions and max(versions) > batch.version:
        raise BoundViolated(
            f"trajectory {trajectory.id} has tokens of version {max(versions)}, "
            f"but version {batch.version} is being trained"
        )
    return tuple(t for t, version in enumerate(versions) if version >= batch.oldest_trainable)


def _sample(
    prompt: Prompt,
    trajectory: Trajectory,
    completion: RewardedCompletion,
    advantages: list[float],
    version: int,
    estimator: Estimator,
) -> Sample:
    start, places = len(prompt.token_ids), trajectory.sampled_places
    logprobs, versions = trajectory.behavior_logprobs, trajectory.versions
    return Sample(
        id=trajectory.id,
        token_ids=prompt.token_ids + trajectory.token_ids,
        prompt_tokens=start,
        loss_positions=tuple([start + places[t] for t in completion.trained]),
        behavior_logprobs=tuple([logprobs[t] for t in completion.trained]),
        staleness=tuple([version - versions[t] for t in completion.trained]),
        advantages=tuple(advantages),
        **_targets(completion, estimator),
    )


def _targets(completion: RewardedCompletion, estimator: Estimator) -> dict[str, tuple[float, ...]]:
    """The values and returns of the loss tokens, where there is a critic: R = A + V (arXiv 1506.02438, section 5)."""
    if not completion.values or not isinstance(estimator, GAE):
        return {}
    values = tuple(completion.values[t] for t in completion.trained)
    gaps = generalised(estimator, completion)
    return {"values": values, "returns": tuple(a + v for a, v in zip(gaps, values, strict=True))}
