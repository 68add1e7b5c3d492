"""From a batch of groups to samples: one for each path of a trajectory, with everything known about its tokens.

A sample is the prompt and the segments behind it. Its loss tokens are the sampled tokens that no earlier path has and
that are young enough to be trained on (``Batch.oldest_of``). All others, given ones too, are context; a path
without loss tokens makes no sample.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from stretto.core.errors import BoundViolated
from stretto.core.records import Batch
from stretto.core.states import bounded_reward
from stretto.trainer.batch.credit import ScoredPath, ScoredTrajectory, advantages_by_path, rewarded
from stretto.trainer.batch.paths import PathTokens, Value, paths_of
from stretto.trainer.objective.algorithm import AlgorithmConfig
from stretto.trainer.objective.estimators import targets

#: A score for each own sampled token of each path, by its id (`scoring.py`).
TokenScores = Mapping[str, Sequence[float]]
NO_SCORES: TokenScores = MappingProxyType({})


@dataclass(frozen=True)
class Sample:
    """Example: prompt (5, 12), completion (4, 4, 2) of versions (5, 6, 7), trained at 7 with versions from 6 on::

    Sample(id="0.17.0/3", token_ids=(5, 12, 4, 4, 2), prompt_tokens=2, loss_positions=(3, 4),
        behavior_logprobs=(-0.7, -0.02), staleness=(1, 0), advantages=(0.5, 0.5))
    """

    id: str  # of the path
    token_ids: tuple[int, ...]
    prompt_tokens: int
    loss_positions: tuple[int, ...]  # [N], ascending, each at least 1
    behavior_logprobs: tuple[float, ...]  # [N]
    staleness: tuple[int, ...]  # [N], versions between the one that sampled the token and the one in training
    advantages: tuple[float, ...]  # [N]
    values: tuple[float, ...] = ()  # [N], by the critic before the step; empty without one, and the returns too
    returns: tuple[float, ...] = ()  # [N], the critic's targets
    engine: str = ""  # that sampled the newest of its tokens (`PathTokens.engine`)
    weights: tuple[float, ...] = ()  # [N], factors of the tokens in the loss; empty: all 1
    scored: tuple[int, ...] = ()  # [M], positions whose log-probability is wanted, the loss's too; empty: these alone
    targets: tuple[int, ...] = ()  # [M], the tokens scored there; empty: those of the sequence


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
    """Advantages over the whole batch, then one sample for each path that has loss tokens.

    `longest` is ``sampling.max_tokens``; `values` are the critic's, of the state before each sampled token;
    `reference_logprobs` are needed where the KL is part of the reward.

    Raises:
        BoundViolated: a token has no log-probability or version, or was sampled by a version not published yet.
    """
    paths = {t.id: paths_of(group.prompt, t) for group in batch.groups for t in group.trajectories}
    kl = _kl([path for own in paths.values() for path in own], config, reference_logprobs)
    groups = [
        [
            ScoredTrajectory(
                t, [_scored(path, batch.version, batch.oldest_of(group.id), config, values, kl) for path in paths[t.id]]
            )
            for t in group.trajectories
        ]
        for group in batch.groups
    ]
    advantages = advantages_by_path(config, longest, groups)
    samples = [
        _sample(scored, advantages[scored.path.id], batch.version, _targets(config, longest, one, scored))
        for group in groups
        for one in group
        for scored in one.paths
        if scored.trained
    ]
    rewards = [one.trajectory.reward for group in groups for one in group]
    tokens = sum(len(path.places) for own in paths.values() for path in own)
    return SampledBatch(
        samples=tuple(samples),
        masked_tokens=tokens - sum(len(sample.loss_positions) for sample in samples),
        reward_mean=sum(rewards) / len(rewards) if rewards else 0.0,
        kl_reference=sum(map(math.fsum, kl.values())) / tokens if kl and tokens else None,
    )


def _kl(paths: Sequence[PathTokens], config: AlgorithmConfig, reference_logprobs: TokenScores) -> TokenScores:
    """KL(behavior || reference) at each sampled token, where it is part of the reward."""
    estimator = config.divergence("reward")
    if estimator is None:
        return NO_SCORES
    return {
        path.id: estimator(torch.tensor(path.behavior_logprobs), torch.tensor(reference_logprobs[path.id])).tolist()
        for path in paths
    }


def _scored(
    path: PathTokens, version: int, oldest: int, config: AlgorithmConfig, values: TokenScores, kl: TokenScores
) -> ScoredPath:
    """A path whose tokens from version `oldest` on are trained at `version`.

    Raises:
        BoundViolated: a token was sampled by a version not published yet.
    """
    if (newest := max(path.versions)) > version:
        known = f"version {newest}, but version {version} is being trained"
        raise BoundViolated(f"trajectory {path.id} has tokens of {known}")
    weight = config.reference.weight if config.reference is not None else 0.0
    whole = range(len(path.versions))
    trained = whole if min(path.versions) >= oldest else [t for t in whole if path.versions[t] >= oldest]
    return ScoredPath(
        path=path,
        trained=trained,
        values=values.get(path.id, ()),
        kl=[bounded_reward(weight * one) for one in kl.get(path.id, ())],  # an engine may log any number
    )


def _sample(
    scored: ScoredPath, advantages: list[float], version: int, targets: Mapping[str, tuple[float, ...]]
) -> Sample:
    path = scored.path
    return Sample(
        id=path.id,
        token_ids=path.token_ids,
        prompt_tokens=path.prompt_tokens,
        loss_positions=_chosen(path.places, scored.trained),
        behavior_logprobs=_chosen(path.behavior_logprobs, scored.trained),
        staleness=tuple([version - one for one in _chosen(path.versions, scored.trained)]),
        advantages=tuple(advantages),
        engine=path.engine,
        values=targets.get("values", ()),
        returns=targets.get("returns", ()),
    )


def _chosen(values: Sequence[Value], places: Sequence[int]) -> tuple[Value, ...]:
    """The values at some places, ascending; most often all of them, which are not gone through one by one."""
    return tuple(values) if len(places) == len(values) else tuple([values[place] for place in places])


def _targets(
    config: AlgorithmConfig, longest: int, one: ScoredTrajectory, scored: ScoredPath
) -> dict[str, tuple[float, ...]]:
    """The values and returns of the loss tokens, where there is a critic: R = A + V (arXiv 1506.02438, section 5)."""
    if not scored.values or not hasattr(config.advantages, "critic"):
        return {}
    values = tuple(scored.values[t] for t in scored.trained)
    gaps = targets(config.advantages, rewarded(config, longest, one, scored))
    return {"values": values, "returns": tuple(a + v for a, v in zip(gaps, values, strict=True))}
