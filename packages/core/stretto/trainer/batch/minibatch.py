"""Minibatches: which sequences are computed together, and the tensors of one optimizer step, divided among ranks and
micro-batches; and scores of a whole batch by a critic or a reference policy.

What is computed together is decided by pure functions from lengths (tokens) to lists of indices.

Axes: N loss token, S sequence.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stretto.core.records import Batch
from stretto.model.device import copied
from stretto.model.packed.logprobs import PackedTokens, pack_tokens
from stretto.trainer.batch.paths import Ints, PathTokens, as_column, paths_of, trajectory_of
from stretto.trainer.batch.samples import Sample, chosen_of, scored_of
from stretto.trainer.config import OptimizerConfig
from stretto.trainer.objective.aggregation import Aggregation, coefficients
from stretto.trainer.objective.returns import Column, Doubles
from stretto.trainer.objective.tokens import Sequences
from stretto.trainer.ranks import ALONE, Ranks


def micro_batches(lengths: Sequence[int], capacity: int, fewest: int = 1) -> list[list[int]]:
    """Algorithm 1 (AReaL, appendix B.3): indices into `lengths` of the sequences of each micro-batch; empty for none.

    Sequences are placed longest first. A sequence opens a new micro-batch if there are fewer than `fewest`, or if none
    has room for it. Otherwise, of the micro-batches with room, it joins the one with the fewest sequences. A
    micro-batch exceeds `capacity` (tokens) only if it consists of a single longer sequence.

    >>> micro_batches([5, 9, 3, 4], capacity=10)   # 9 | 5, 4 | 3
    [[1], [0, 3], [2]]
    """
    batches: list[list[int]] = []
    room: list[int] = []
    longest_first = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    if fewest <= 1 and sum(lengths) <= capacity:
        return [longest_first] if longest_first else []
    for index in longest_first:
        fits = [b for b, left in enumerate(room) if lengths[index] <= left]
        if len(batches) < fewest or not fits:
            batches.append([index])
            room.append(capacity - lengths[index])
        else:
            chosen = min(fits, key=lambda b: len(batches[b]))
            batches[chosen].append(index)
            room[chosen] -= lengths[index]
    return batches


def minibatches(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Divide sequences into `count` parts with about equal token totals: longest first, each into the lightest part.

    No part is empty: with fewer sequences there are fewer parts. Indices within a part are ascending.

    >>> minibatches([8, 7, 6, 5, 4], 2)   # 8 + 5 + 4 and 7 + 6
    [[0, 3, 4], [1, 2]]
    """
    if count == 1:
        return [list(range(len(lengths)))] if lengths else []
    parts: list[list[int]] = [[] for _ in range(min(count, len(lengths)))]
    totals = [0] * len(parts)
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        lightest = min(range(len(parts)), key=lambda part: (totals[part], len(parts[part])))
        parts[lightest].append(index)
        totals[lightest] += lengths[index]
    return [sorted(part) for part in parts]


def balanced(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Divide sequences into `count` parts with nearly equal token totals, by the largest differencing method; parts may
    be empty.

    Karmarkar and Karp, 1982: start with one division per sequence, in which one part has the sequence and the others
    are empty. While there are several divisions, merge the two whose parts differ most: the heaviest part of one with
    the lightest part of the other, and so on. Totals never differ by more than the longest sequence. Indices within a
    part are ascending.

    >>> balanced([8, 7, 6, 5, 4], 2)   # 8 + 6 and 7 + 5 + 4: more equal than `minibatches`
    [[0, 2], [1, 3, 4]]
    """
    if count == 1:
        return [list(range(len(lengths)))]
    empty: list[tuple[int, list[int]]] = [(0, [])] * (count - 1)
    divisions = [(-length, index, [*empty, (length, [index])]) for index, length in enumerate(lengths)]
    heapq.heapify(divisions)  # heap key: minus the difference, then the index as tie-break
    while len(divisions) > 1:
        (_, index, first), (_, _, second) = heapq.heappop(divisions), heapq.heappop(divisions)
        laid = [(a + b, left + right) for (a, left), (b, right) in zip(first, reversed(second), strict=True)]
        laid.sort(key=lambda part: part[0])
        heapq.heappush(divisions, (laid[0][0] - laid[-1][0], index, laid))
    parts = divisions[0][2] if divisions else [*empty, (0, [])]
    return [sorted(part) for _, part in parts]


def shares(lengths: Sequence[int], capacity: int, fewest: int, ranks: int) -> list[list[list[int]]]:
    """The micro-batches of each rank, as indices into `lengths`. Every rank gets the same number, because all ranks run
    each forward pass together; some may be empty. `fewest`: least number per rank; `capacity`: as in `micro_batches`.

    >>> shares([5, 9, 3, 4], capacity=10, fewest=1, ranks=2)   # 9 | nothing and 5, 4 | 3
    [[[1], []], [[0, 3], [2]]]
    """
    own = [
        [[part[i] for i in pack] for pack in micro_batches([lengths[i] for i in part], capacity, fewest)]
        for part in balanced(lengths, ranks)
    ]
    most = max(map(len, own))
    return [packs + [[]] * (most - len(packs)) for packs in own]


@dataclass(frozen=True)
class MicroBatch:
    """Samples computed in one forward and backward pass: columns over their loss tokens [N]. `behavior_logprobs`: empty
    if unknown: the proximal policy then counts as the sampler. `values`, `returns`: of the critic; empty without one.
    `scale`: weight of a token in the minibatch's mean. `mixed`: tokens that are no evidence of their engine's weights;
    None: all are evidence. `chosen`: indices of the loss tokens among the scored ones; None: all. `engines`, `ids`: of
    the sequences."""

    packed: PackedTokens
    behavior_logprobs: Tensor  # [N]; empty if unknown, then the proximal policy counts as the one that sampled
    advantages: Tensor  # [N]
    staleness: Tensor  # [N], versions
    scale: Tensor  # [N], weight of each token in the minibatch's mean
    sequences: Sequences
    values: Tensor  # [N], by the critic before the step; empty without a critic
    returns: Tensor  # [N], the critic's targets; empty without a critic
    engines: tuple[str, ...]  # [S], engine that sampled the newest tokens of each sequence
    ids: tuple[str, ...] = ()  # [S], path ids
    mixed: Tensor | None = None  # [N], the tokens that are no evidence of their engines' weights; None: all are
    chosen: Tensor | None = None  # [N], indices of the loss tokens among the scored tokens; None: all are loss tokens


@dataclass(frozen=True)
class Minibatch:
    """The samples of one optimizer step, `divided` by share, and the `micro_batches` of this rank's share.
    `loss_tokens` and `ids` (of trajectories) are those of all shares."""

    micro_batches: tuple[MicroBatch, ...]  # of this rank's share; equally many on every rank
    loss_tokens: int  # number of loss tokens of all shares
    ids: tuple[str, ...]  # ids of the trajectories of all shares
    divided: tuple[tuple[Sample, ...], ...]  # samples of each share, in the order of its micro-batches


def minibatch(
    samples: Sequence[Sample],
    config: OptimizerConfig,
    aggregation: Aggregation | Literal["sum"],
    longest: int,
    device: torch.device,
    ranks: Ranks = ALONE,
    *,
    trajectories: float | None = None,
) -> Minibatch:
    """Pack this rank's share of the samples of one optimizer step.

    The tokens' weights are computed over the samples of all ranks, so the ranks' losses sum to the exact mean. A
    position with several targets counts as one token in the mean.

    Args:
        samples: of all ranks, in the same order on each.
        config: gives the size of micro-batches.
        aggregation: how the tokens' losses are averaged; "sum": they are added.
        longest: ``sampling.max_tokens``.
        device: of the tensors of the result.
        ranks: the processes among which the samples are divided.
        trajectories: mean number of trajectories per minibatch of the batch; None: these samples are the whole batch.
    """
    lengths = [len(set(sample.loss_positions) if len(sample.targets) else sample.loss_positions) for sample in samples]
    own = iter(coefficients(aggregation, [n for n in lengths if n], trajectories or len(samples), longest))
    scales = [next(own) if length else 0.0 for length in lengths]
    tokens = [len(sample.token_ids) for sample in samples]
    divided = shares(tokens, config.micro_batch_tokens, config.min_micro_batches, ranks.shares)
    return Minibatch(
        micro_batches=tuple(
            _micro_batch([samples[i] for i in pack], [scales[i] for i in pack], device) for pack in divided[ranks.share]
        ),
        loss_tokens=sum(lengths),
        ids=tuple(dict.fromkeys(trajectory_of(sample.id) for sample in samples)),
        divided=tuple(tuple([samples[i] for pack in share for i in pack]) for share in divided),
    )


def _micro_batch(samples: Sequence[Sample], scales: Sequence[float], device: torch.device) -> MicroBatch:
    def column(parts: Iterable[Column]) -> Tensor:
        return copied(as_column(np.concatenate([np.zeros(0, np.float32), *parts]), np.float32), device)

    lengths = [len(sample.loss_positions) for sample in samples]
    sequences = Sequences.of(copied(np.array(lengths, np.int64), device), sum(lengths))  # a rank may have none
    scale = sequences.spread(column([scales]))
    if any(len(sample.weights) for sample in samples):
        scale = scale * column(sample.weights for sample in samples)
    return MicroBatch(
        packed=_packed(samples, device),
        behavior_logprobs=column(sample.behavior_logprobs for sample in samples),
        advantages=column(sample.advantages for sample in samples),
        staleness=column(sample.staleness for sample in samples),
        scale=scale,
        sequences=sequences,
        values=column(sample.values for sample in samples),
        returns=column(sample.returns for sample in samples),
        engines=tuple(sample.engine for sample in samples),
        ids=tuple(sample.id for sample in samples),
        mixed=_mixed(samples, device),
        chosen=_chosen(samples, device),
    )


def _mixed(samples: Sequence[Sample], device: torch.device) -> Tensor | None:
    """Which loss tokens [N] are no evidence of their engines' weights; None: all are (`MicroBatch.mixed`)."""
    if not any(len(sample.mixed) for sample in samples):
        return None
    each = [np.asarray(one.mixed) if len(one.mixed) else np.zeros(len(one.loss_positions)) for one in samples]
    return copied(np.concatenate(each) > 0, device)


def _packed(samples: Sequence[Sample], device: torch.device) -> PackedTokens:
    # Flash attention needs every sequence in full; on the CPU the samples of one prompt share its computation.
    prompts = None if device.type == "cuda" else [sample.prompt_tokens for sample in samples]
    wanted = [scored_of(sample) for sample in samples]
    targets = list(map(_targets, samples)) if any(len(sample.targets) for sample in samples) else None
    return pack_tokens([sample.token_ids for sample in samples], wanted, device, prompts, targets)


def _targets(sample: Sample) -> npt.NDArray[np.int32]:
    """The tokens [M] that are scored at the scored positions of a sample."""
    given, scored = np.asarray(sample.targets, np.int32), np.asarray(scored_of(sample), np.int64)
    return given if len(given) else np.asarray(sample.token_ids, np.int32)[scored]


def _chosen(samples: Sequence[Sample], device: torch.device) -> Tensor | None:
    """Indices of the loss tokens among the scored tokens of a micro-batch; None if all are loss tokens."""
    if not any(len(sample.scored) for sample in samples):
        return None
    chosen, start = [np.zeros(0, np.int64)], 0
    for sample in samples:
        chosen.append(start + chosen_of(sample))
        start += len(scored_of(sample))
    return copied(np.concatenate(chosen), device)


@torch.no_grad()
def score_tokens(
    batch: Batch,
    capacity: int,
    device: torch.device,
    evaluate: Callable[[PackedTokens], Tensor],
    continues: Callable[[PathTokens], bool] = lambda _: False,
    ranks: Ranks = ALONE,
) -> dict[str, Doubles]:
    """Scores of each path's sampled tokens (without those of earlier paths), even if too old to be trained on, by path
    id. The result is the same on every rank; all ranks must call it. Empty if no token was sampled.

    `capacity`: most tokens of a forward pass. `device`: where `evaluate` computes; it returns one score per wanted
    token. A path for which `continues` is true gets one score more, of the state after its last token. Raises
    BoundViolated if a segment's checksum does not match, or a token was sampled without context."""
    paths = [
        path
        for group in batch.groups
        for trajectory in group.trajectories
        for path in paths_of(group.prompt, trajectory)
    ]
    if not paths:
        return {}
    places = [np.append(one.places, np.int32(len(one.token_ids))) if continues(one) else one.places for one in paths]
    divided = shares([len(path.token_ids) for path in paths], capacity, 1, ranks.shares)
    own = [
        evaluate(_packed_paths([paths[i] for i in pack], [places[i] for i in pack], device))
        for pack in divided[ranks.share]
    ]
    numbers, _ = ranks.all_gather(torch.cat(own))
    order = [i for share in divided for pack in share for i in pack]
    parts = np.split(numbers.double().cpu().numpy(), np.cumsum([len(places[i]) for i in order])[:-1])
    return {paths[i].id: part for i, part in zip(order, parts, strict=True)}


def _packed_paths(paths: Sequence[PathTokens], places: Sequence[Ints], device: torch.device) -> PackedTokens:
    """Pack paths for one forward pass, with shared prompts except on a GPU. `places`: the positions in each path that
    get a score; at the one after its end, a filler token is scored."""
    prompts = None if device.type == "cuda" else [path.prompt_tokens for path in paths]
    # After the last token any token is scored: a token more would have a position that learned positions may not have.
    targets = [np.append(path.token_ids, np.int32(0))[wanted] for path, wanted in zip(paths, places, strict=True)]
    return pack_tokens([path.token_ids for path in paths], places, device, prompts, targets)
