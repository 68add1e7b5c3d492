"""From a batch of groups to samples: one for each trajectory, with everything known about its tokens.

A sample is the prompt and the segments behind it. Its loss tokens are the sampled tokens that are young enough to be
trained on (``Batch.oldest_trainable``); all others, given ones too, stay as context. A trajectory without loss tokens
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

#: What a model said of each token of each answer, by the trajectory's id (`asking.py`).
Said = Mapping[str, Sequence[float]]
#: Nobody was asked.
NOTHING: Said = MappingProxyType({})


@dataclass(frozen=True)
class Sample:
    """Example: prompt (5, 12), answer (4, 4, 2) of versions (5, 6, 7), trained at 7 with versions from 6 on::

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
    returns: tuple[float, ...] = ()  # [N], what the critic should have said


@dataclass(frozen=True)
class Samples:
    """A batch as the trainer sees it."""

    rows: tuple[Sample, ...]
    masked_tokens: int  # answer tokens too old to be trained on
    reward_mean: float  # over all trajectories of the batch, as given: neither shaped nor lowered
    kl_reference: float | None = None  # mean over all answer tokens, where it is part of the reward


def rows_of(
    batch: Batch, config: AlgorithmConfig, longest: int, values: Said = NOTHING, reference_logprobs: Said = NOTHING
) -> Samples:
    """Advantages over the whole batch, then one row for each answer that has loss tokens.

    `longest` is the most tokens that an answer may have (``sampling.max_tokens``); `values` is what a critic says of
    the state before each token of each answer, `reference_logprobs` what the reference policy says of each token,
    where the divergence from it is part of the reward.

    Raises:
        BoundViolated: a token has no log-probability or version, or was sampled by a version not published yet.
    """
    members = [[(group.prompt, trajectory) for trajectory in group.trajectories] for group in batch.groups]
    divergences = _divergences(batch, config, reference_logprobs)
    answers = [
        [_answer(trajectory, batch, config, longest, values, divergences) for _, trajectory in group]
        for group in members
    ]
    scores = advantages_of(config.advantages, answers)
    rows = [
        _row(*member, answer, score, batch.version, config.advantages)
        for group in zip(members, answers, scores, strict=True)
        for member, answer, score in zip(*group, strict=True)
        if answer.trained
    ]
    rewards = [trajectory.reward for group in members for _, trajectory in group]
    tokens = sum(answer.tokens for group in answers for answer in group)
    return Samples(
        rows=tuple(rows),
        masked_tokens=tokens - sum(len(row.loss_positions) for row in rows),
        reward_mean=sum(rewards) / len(rewards) if rewards else 0.0,
        kl_reference=sum(map(math.fsum, divergences.values())) / tokens if divergences and tokens else None,
    )


def _divergences(batch: Batch, config: AlgorithmConfig, reference_logprobs: Said) -> Said:
    """What the policy that sampled each token diverges there from the reference, where the reward is lowered by it."""
    estimator = config.divergence("reward")
    if estimator is None:
        return NOTHING
    return {
        t.id: estimator(torch.tensor(t.behavior_logprobs), torch.tensor(reference_logprobs[t.id])).tolist()
        for group in batch.groups
        for t in group.trajectories
    }


def _answer(
    trajectory: Trajectory, batch: Batch, config: AlgorithmConfig, longest: int, values: Said, divergences: Said
) -> RewardedCompletion:
    tokens = len(trajectory.versions)
    weight = config.reference.weight if config.reference is not None else 0.0
    return RewardedCompletion(
        reward=shaped(trajectory.reward, tokens, longest, config.shaping),
        tokens=tokens,
        trained=_trainable(trajectory, batch),
        values=values.get(trajectory.id, ()),
        penalties=[weight * divergence for divergence in divergences.get(trajectory.id, ())],
    )


def _trainable(trajectory: Trajectory, batch: Batch) -> tuple[int, ...]:
    """Which of the sampled tokens may be trained on."""
    versions = trajectory.versions
    tokens = len(versions)
    for segment in trajectory.segments:
        if not len(segment.versions) == len(segment.behavior_logprobs) in (0, len(segment.token_ids)):
            raise BoundViolated(f"trajectory {trajectory.id}: a token lacks its version or log-prob")
    if versions and max(versions) > batch.version:
        raise BoundViolated(
            f"trajectory {trajectory.id} has tokens of version {max(versions)}, "
            f"but version {batch.version} is being trained"
        )
    if not versions or min(versions) >= batch.oldest_trainable:
        return tuple(range(tokens))
    return tuple(t for t, version in enumerate(versions) if version >= batch.oldest_trainable)


def _row(
    prompt: Prompt,
    trajectory: Trajectory,
    answer: RewardedCompletion,
    scores: list[float],
    version: int,
    estimator: Estimator,
) -> Sample:
    inside, start, places = answer.trained, len(prompt.token_ids), trajectory.sampled_places
    logprobs, versions = trajectory.behavior_logprobs, trajectory.versions
    if len(inside) < answer.tokens:
        logprobs, versions = tuple(logprobs[t] for t in inside), tuple(versions[t] for t in inside)
        places = tuple(places[t] for t in inside)
    return Sample(
        id=trajectory.id,
        token_ids=prompt.token_ids + trajectory.token_ids,
        prompt_tokens=start,
        loss_positions=tuple([start + place for place in places]),
        behavior_logprobs=logprobs,
        staleness=tuple([version - one for one in versions]),
        advantages=tuple(scores),
        **_targets(answer, estimator),
    )


def _targets(answer: RewardedCompletion, estimator: Estimator) -> dict[str, tuple[float, ...]]:
    """The values and returns of the loss tokens, where there is a critic: R = A + V (arXiv 1506.02438, section 5)."""
    if not answer.values or not isinstance(estimator, GAE):
        return {}
    values = tuple(answer.values[t] for t in answer.trained)
    gaps = generalised(estimator, answer)
    return {"values": values, "returns": tuple(a + v for a, v in zip(gaps, values, strict=True))}
