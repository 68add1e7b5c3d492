"""Credit assignment: a reward goes to a whole trajectory or to single turns (``algorithm.advantages.credit``).

    trajectory    the sampled tokens of all paths of a trajectory share its reward; the trajectories of a group are
                  compared
    turn          each turn has its return: the sum of rewards from this turn to the end of its path; the n-th turns of
                  a group are compared with each other, those of each root (`root_of`) apart

Token-level estimators (`EstimatorSection.along`) get one path at a time. The last token of a path has the trajectory's
reward; with credit by turn, the last token of each turn has the turn's reward.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, pairwise

import numpy as np

from stretto.core.forest import paths
from stretto.core.records import Group, Record, Trajectory
from stretto.trainer.batch.paths import PathTokens, joined, root_of, turns_before, turns_of
from stretto.trainer.objective.advantages import shaped
from stretto.trainer.objective.algorithm import AlgorithmConfig
from stretto.trainer.objective.estimators import RewardedCompletion
from stretto.trainer.objective.returns import Column, Doubles, Whole
from stretto.trainer.objective.token_estimators import advantages_of


class ScoredPath(Record, frozen=True):
    """A path (a branch of a trajectory) with the critic's `values` and the weighted `kl` of its S own tokens (sampled,
    and of no earlier path), each empty if there is none. `trained`: indices of the loss tokens among the S."""

    path: PathTokens
    trained: Whole  # the loss tokens, as indices into the S tokens, ascending
    values: Column = ()  # [S], or [S + 1] if the state after the last token has a value; empty without a critic
    kl: Column = ()  # [S] weighted; empty if the KL is not part of the reward


class ScoredTrajectory(Record, frozen=True):
    """A trajectory with its scored paths; it has no paths if no token was sampled."""

    trajectory: Trajectory
    paths: Sequence[ScoredPath]


#: Root and number of a turn; of a whole trajectory or path: `_WHOLE`.
_Place = tuple[str, int]
_WHOLE: _Place = ("", 0)
#: Tokens that share one reward, and (path id, number of loss tokens) for each path that they belong to.
_Unit = tuple[RewardedCompletion, list[tuple[str, int]]]


def advantages_by_path(
    config: AlgorithmConfig, longest: int, groups: Sequence[Sequence[ScoredTrajectory]]
) -> dict[str, Doubles]:
    """Return the advantages of the loss tokens of each path, by path id.

    Args:
        longest: ``sampling.max_tokens``, for reward shaping.
        groups: the whole batch, since some estimators normalise over it.

    Raises:
        RecipeError: a user's estimator raised, or returned a wrong shape or a non-finite number.
    """
    estimator, by_turn = config.advantages, config.advantages.credit == "turn"
    compared = defaultdict[tuple[int, str, int], list[_Unit]](list)
    for group, members in enumerate(groups):
        for one in members:
            if estimator.along:
                units = [(_WHOLE, (rewarded(config, longest, one, path), [_part(path)])) for path in one.paths]
            elif by_turn:
                units = [unit for path in one.paths for unit in _turns(config, longest, path)]
            else:
                units = [(_WHOLE, (_whole(config, longest, one), [_part(path) for path in one.paths]))]
            for place, unit in units:
                compared[group, *place].append(unit)
    order = [compared[key] for key in sorted(compared)]
    found = defaultdict[str, list[Column]](list)
    advantages = advantages_of(estimator, [[completion for completion, _ in units] for units in order])
    for (_, parts), one_by_one in zip(chain.from_iterable(order), chain.from_iterable(advantages), strict=True):
        if len(parts) == 1:
            found[parts[0][0]].append(one_by_one)
            continue
        ends = accumulate((count for _, count in parts), initial=0)
        for (id, _), (start, end) in zip(parts, pairwise(ends), strict=True):
            found[id].append(one_by_one[start:end])
    return {id: joined(parts, np.float64) for id, parts in found.items()}


def rewarded(config: AlgorithmConfig, longest: int, one: ScoredTrajectory, path: ScoredPath) -> RewardedCompletion:
    """Convert a path of trajectory `one` into the input of a token-level estimator: the trajectory's shaped reward at
    the path's end; with credit by turn, the reward of each turn at its end. `longest`: ``sampling.max_tokens``, for
    reward shaping."""
    tokens = len(path.path.places)
    if config.advantages.credit == "trajectory":
        reward = _shaped(config, longest, one)
        return RewardedCompletion(reward, tokens, path.trained, path.values, path.kl)
    rewards, ends = _rewards(config, longest, path), accumulate(turn.tokens for turn in path.path.turns)
    earlier = tuple((end - 1, reward) for end, reward in zip(ends, rewards[:-1], strict=False))
    return RewardedCompletion(rewards[-1], tokens, path.trained, path.values, path.kl, earlier)


def _whole(config: AlgorithmConfig, longest: int, one: ScoredTrajectory) -> RewardedCompletion:
    """Concatenate all paths of a trajectory to one estimator input. `longest`: ``sampling.max_tokens``, for reward
    shaping."""
    if len(one.paths) == 1:  # the common case of a single turn: no arrays are copied
        (path,) = one.paths
        return RewardedCompletion(_shaped(config, longest, one), len(path.path.places), path.trained, kl=path.kl)
    lengths = [len(path.path.places) for path in one.paths]
    starts = accumulate(lengths, initial=0)
    places = [start + np.asarray(path.trained, np.int64) for start, path in zip(starts, one.paths, strict=False)]
    trained = np.concatenate([np.zeros(0, np.int64), *places])
    kl = np.concatenate([np.zeros(0), *(path.kl for path in one.paths)])
    return RewardedCompletion(_shaped(config, longest, one), sum(lengths), trained, kl=kl)


def _turns(config: AlgorithmConfig, longest: int, path: ScoredPath) -> Iterator[tuple[_Place, _Unit]]:
    """Yield (root (`root_of`) and number of the turn on the path, estimator input) of each turn that belongs to this
    path. The reward of a turn includes the rewards of later turns, less the KL of their tokens."""
    ends = list(accumulate((turn.tokens for turn in path.path.turns), initial=0))
    rewards, every = _rewards(config, longest, path), np.asarray(path.trained, np.int64)
    for turn, (start, end) in enumerate(pairwise(ends)):
        reward = math.fsum(rewards[turn:]) - math.fsum(np.asarray(path.kl[end:]).tolist())
        trained = every[(start <= every) & (every < end)] - start
        unit = RewardedCompletion(reward, end - start, trained, kl=path.kl[start:end])
        yield (path.path.root, path.path.turns_before + turn), (unit, [(path.path.id, len(trained))])


def rewards_compared(config: AlgorithmConfig, group: Group) -> Iterable[Sequence[float]]:
    """Rewards of a decided group, not shaped, in the lists that are compared: of all trajectories; with credit by turn,
    the returns of the n-th turns of each root (`root_of`). If the numbers of every list are equal, an estimator that
    compares gives no signal."""
    if config.advantages.credit == "trajectory":
        return [[one.reward for one in group.trajectories]]
    found = defaultdict[_Place, list[float]](list)
    for one in group.trajectories:
        for path in paths(one.segments):
            rewards = [turn.reward for turn in turns_of(one, [one.segments[place] for place in path.trained])]
            for number, _ in enumerate(rewards):
                place = root_of(one, path), turns_before(one, path) + number
                found[place].append(math.fsum(rewards[number:]))
    return found.values()


def _part(path: ScoredPath) -> tuple[str, int]:
    """Id of a path, and number of its loss tokens."""
    return path.path.id, len(path.trained)


def _shaped(config: AlgorithmConfig, longest: int, one: ScoredTrajectory) -> float:
    """The shaped reward of a trajectory. The length that counts is that of its longest turn, because
    ``sampling.max_tokens`` limits each turn."""
    length = max([turn.tokens for path in one.paths for turn in path.path.turns], default=0)
    return shaped(one.trajectory.reward, length, longest, config.shaping)


def _rewards(config: AlgorithmConfig, longest: int, path: ScoredPath) -> list[float]:
    """The shaped rewards of the path's turns. The shaping's bias is added to the last turn alone: added to each, it
    would be a reward for many turns."""
    *earlier, last = path.path.turns
    unbiased = config.shaping.model_copy(update={"bias": 0.0}) if earlier else config.shaping
    before = [shaped(turn.reward, turn.tokens, longest, unbiased) for turn in earlier]
    return [*before, shaped(last.reward, last.tokens, longest, config.shaping)]
