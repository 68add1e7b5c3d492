"""Convert a batch of groups to samples: one sample for each path of a trajectory, with the loss inputs of its tokens.

A sample is the token sequence of a path. Its loss tokens are the sampled tokens that belong to no earlier path and are
fresh enough to be trained on (``Batch.oldest_of``). All other tokens are context. A path without loss tokens has no
sample.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from stretto.core.errors import BoundViolated
from stretto.core.records import Batch
from stretto.core.states import LARGEST_REWARD
from stretto.trainer.batch.credit import ScoredPath, ScoredTrajectory, advantages_by_path, rewarded
from stretto.trainer.batch.paths import PathTokens, as_column, paths_of
from stretto.trainer.messages import Evidence
from stretto.trainer.objective.algorithm import AlgorithmConfig
from stretto.trainer.objective.returns import Column, Doubles, Whole
from stretto.trainer.objective.token_estimators import targets

#: One number for each own sampled token of each path, by path id (`trainer.batch.minibatch`).
TokenScores = Mapping[str, Column]
NO_SCORES: TokenScores = MappingProxyType({})

_INT, _FLOAT, _DOUBLE = np.dtype(np.int32), np.dtype(np.float32), np.dtype(np.float64)
#: Dtypes of the arrays of a sample. Values and returns are summed before they become tensors, hence float64.
_KINDS = {
    "token_ids": _INT,
    "loss_positions": _INT,
    "behavior_logprobs": _FLOAT,
    "staleness": _INT,
    "mixed": _INT,
    "advantages": _DOUBLE,
    "values": _DOUBLE,
    "returns": _DOUBLE,
    "weights": _FLOAT,
    "scored": _INT,
    "targets": _INT,
}


@dataclass(frozen=True, eq=False)
class Sample:
    """One path (branch of a trajectory) as a training sequence, with columns over its N loss tokens, made to arrays.
    `values`, `returns`: the critic's values before the step, and its targets; empty without a critic. `weights`:
    factors of the tokens in the loss; empty: 1. `mixed`: 1 for a token that is no evidence of its engine's weights;
    empty: every token is. `scored`, `targets`: positions [M] to score, and the tokens there; empty: the loss positions,
    the path's tokens.

    Example: prompt (5, 12), completion (4, 4, 2) of versions (5, 6, 7), trained at 7 with versions from 6 on::

        Sample(id="0.17.0/3", token_ids=(5, 12, 4, 4, 2), prompt_tokens=2, loss_positions=(3, 4),
               behavior_logprobs=(-0.7, -0.02), staleness=(1, 0), advantages=(0.5, 0.5))
    """

    id: str  # path id
    token_ids: Whole
    prompt_tokens: int
    loss_positions: Whole  # [N], ascending, each at least 1; a position with several targets is repeated
    behavior_logprobs: Column  # [N]
    staleness: Whole  # [N], version in training minus the version that sampled the token
    advantages: Column  # [N]
    values: Column = ()  # [N], by the critic before the step; empty without a critic
    returns: Column = ()  # [N], the critic's targets; empty without a critic
    engine: str = ""  # engine that sampled the newest of its tokens (`PathTokens.engine`)
    mixed: Whole = ()  # [N], 1 if the token is no evidence of its engine's weights (`PathTokens.mixed`); empty: all are
    weights: Column = ()  # [N], factors of the tokens in the loss; empty: all 1
    scored: Whole = ()  # [M], positions whose log-probabilities are wanted, with loss_positions; empty: loss_positions
    targets: Whole = ()  # [M], tokens scored at these positions; empty: the tokens of the sequence

    def __post_init__(self) -> None:
        held = vars(self)  # a field of a frozen class is not set by name
        for name, kind in _KINDS.items():
            given = held[name]
            if type(given) is not np.ndarray or given.dtype is not kind:
                held[name] = as_column(given, kind)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sample):
            return NotImplemented
        plain = (self.id, self.prompt_tokens, self.engine) == (other.id, other.prompt_tokens, other.engine)
        return plain and all(np.array_equal(getattr(self, name), getattr(other, name)) for name in _KINDS)

    __hash__ = None  # type: ignore[assignment]  # arrays have none


def scored_of(sample: Sample) -> Whole:
    """Positions [M] in a sample's tokens to score, ascending: `scored`, or `loss_positions` if `scored` is empty. A
    position with several targets is repeated."""
    return sample.scored if len(sample.scored) else sample.loss_positions


def chosen_of(sample: Sample) -> npt.NDArray[np.int64]:
    """Indices [N] of the loss tokens among the scored positions. If several targets are scored at a position in the
    loss, all are included."""
    return np.flatnonzero(np.isin(scored_of(sample), sample.loss_positions))


@dataclass(frozen=True)
class SampledBatch:
    """The samples of a batch. `masked_tokens`: sampled tokens that are too old to be trained on. `reward_mean`: of all
    trajectories, before shaping. `kl_reference`: mean KL of all sampled tokens; None if it is not in the reward."""

    samples: tuple[Sample, ...]
    masked_tokens: int  # sampled tokens too old to be trained on
    reward_mean: float  # mean raw reward of all trajectories, before shaping and KL
    kl_reference: float | None = None  # mean KL over all sampled tokens, if it is part of the reward


def samples_of(
    batch: Batch,
    config: AlgorithmConfig,
    longest: int,
    values: TokenScores = NO_SCORES,
    reference_logprobs: TokenScores = NO_SCORES,
    evidence: Evidence = "all",
) -> SampledBatch:
    """Compute advantages over the whole batch, then build one sample for each path that has loss tokens.

    `longest`: ``sampling.max_tokens``. `values`: the critic's value of the state before each sampled token, by path id;
    empty without a critic. `reference_logprobs`: log-probabilities by the reference policy, by path id, needed if the
    KL is part of the reward. `evidence`: tokens by which engines may be judged.

    Raises:
        BoundViolated: a token's version is newer than the batch's, or `paths_of` refuses a trajectory.
        RecipeError: a user's estimator raised, or returned a wrong shape or a non-finite number.
    """
    paths = {t.id: paths_of(group.prompt, t, evidence) for group in batch.groups for t in group.trajectories}
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
        if len(scored.trained)
    ]
    rewards = [one.trajectory.reward for group in groups for one in group]
    tokens = sum(len(path.places) for own in paths.values() for path in own)
    return SampledBatch(
        samples=tuple(samples),
        masked_tokens=tokens - sum(len(sample.loss_positions) for sample in samples),
        reward_mean=sum(rewards) / len(rewards) if rewards else 0.0,
        kl_reference=sum(math.fsum(np.asarray(one).tolist()) for one in kl.values()) / tokens
        if kl and tokens
        else None,
    )


def _kl(paths: Sequence[PathTokens], config: AlgorithmConfig, reference_logprobs: TokenScores) -> TokenScores:
    """KL(behavior || reference), not weighted, at each sampled token, by path id; empty if it is not part of the
    reward."""
    estimator = config.divergence("reward")
    if estimator is None:
        return NO_SCORES
    return {
        path.id: estimator(
            torch.tensor(path.behavior_logprobs),
            torch.from_numpy(as_column(reference_logprobs[path.id], np.float32)),
        ).numpy()
        for path in paths
    }


def _scored(
    path: PathTokens, version: int, oldest: int, config: AlgorithmConfig, values: TokenScores, kl: TokenScores
) -> ScoredPath:
    """Choose the loss tokens of a path, sampled by version `oldest` or newer, and attach its values and weighted KL.
    Raises BoundViolated if a token was sampled by a later version than `version`, the one in training."""
    if (newest := path.versions.max()) > version:
        known = f"version {newest}, but version {version} is being trained"
        raise BoundViolated(f"trajectory {path.id} has tokens of {known}")
    all_fresh = path.versions.min() >= oldest
    trained = range(len(path.versions)) if all_fresh else np.flatnonzero(path.versions >= oldest)
    return ScoredPath(path=path, trained=trained, values=values.get(path.id, ()), kl=_weighted(kl, path.id, config))


def _weighted(kl: TokenScores, path: str, config: AlgorithmConfig) -> Column:
    """The KL at each own token of the path with this id, times `reference.weight`, clipped to ±1e6; empty if it is not
    part of the reward."""
    if path not in kl or config.reference is None:
        return ()
    with np.errstate(over="ignore"):  # an engine may log any number
        divergence = config.reference.weight * np.asarray(kl[path], np.float64)
    return divergence.clip(-LARGEST_REWARD, LARGEST_REWARD)


def _sample(scored: ScoredPath, advantages: Doubles, version: int, targets: Mapping[str, Doubles]) -> Sample:
    """Make the sample of a path. `version`: in training; `targets`: a result of `_targets`."""
    path = scored.path
    return Sample(
        id=path.id,
        token_ids=path.token_ids,
        prompt_tokens=path.prompt_tokens,
        loss_positions=_chosen(path.places, scored.trained),
        behavior_logprobs=_chosen(path.behavior_logprobs, scored.trained),
        staleness=version - _chosen(path.versions, scored.trained),
        advantages=advantages,
        engine=path.engine,
        mixed=() if isinstance(path.mixed, tuple) else _chosen(path.mixed, scored.trained),
        values=targets.get("values", ()),
        returns=targets.get("returns", ()),
    )


def _chosen(values: npt.NDArray[Any], places: Whole) -> npt.NDArray[Any]:
    return values if len(places) == len(values) else values[np.asarray(places, np.int64)]


def _targets(config: AlgorithmConfig, longest: int, one: ScoredTrajectory, scored: ScoredPath) -> dict[str, Doubles]:
    """The critic's ``values`` of the loss tokens, and their ``returns``: value + advantage before normalisation (arXiv
    1506.02438, section 5). Empty without a critic."""
    if not len(scored.values) or not hasattr(config.advantages, "critic"):
        return {}
    values = _chosen(np.asarray(scored.values, np.float64), scored.trained)
    return {"values": values, "returns": targets(config.advantages, rewarded(config, longest, one, scored)) + values}
