"""Batch scoring: one number for each sampled token of a batch, from a critic or a reference policy, before a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.core.records import Batch
from stretto.model.packed.logprobs import PackedTokens, pack_tokens
from stretto.trainer.batch.packing import shares
from stretto.trainer.batch.paths import PathTokens, paths_of
from stretto.trainer.parallel.ranks import ALONE, Ranks


@torch.no_grad()
def score_tokens(
    batch: Batch,
    capacity: int,
    device: torch.device,
    evaluate: Callable[[PackedTokens], Tensor],
    continues: Callable[[PathTokens], bool] = lambda _: False,
    ranks: Ranks = ALONE,
) -> dict[str, list[float]]:
    """The scores of the own sampled tokens of each path, masked ones too, by its id; the same on every rank.

    `evaluate` gives one score for each wanted token. A path that `continues` has one score more: of a filler token
    behind its last one, for the state that the last token leads to.
    """
    scored = [
        _scored(path, continues(path))
        for group in batch.groups
        for trajectory in group.trajectories
        for path in paths_of(group.prompt, trajectory)
    ]
    if not scored:
        return {}
    divided = shares([len(one.token_ids) for one in scored], capacity, 1, ranks.count)
    own = [evaluate(_packed([scored[i] for i in pack], device)) for pack in divided[ranks.rank]]
    numbers, _ = ranks.all_gather(torch.cat(own))
    order = [scored[i] for share in divided for pack in share for i in pack]
    parts = numbers.split([len(one.places) for one in order])
    return {one.id: part.tolist() for one, part in zip(order, parts, strict=True)}


@dataclass(frozen=True)
class _Scored:
    """The tokens of a path, its prompt included, and the places of those that get a score."""

    id: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    places: Sequence[int]


def _scored(path: PathTokens, continues: bool) -> _Scored:
    token_ids, places = path.token_ids, path.places
    if continues:
        token_ids, places = (*token_ids, 0), [*places, len(token_ids)]
    return _Scored(path.id, token_ids, path.prompt_tokens, places)


def _packed(scored: Sequence[_Scored], device: torch.device) -> PackedTokens:
    # As in `minibatch.py`: away from CUDA the paths share their prompt.
    prompts = None if device.type == "cuda" else [one.prompt_tokens for one in scored]
    return pack_tokens([one.token_ids for one in scored], [one.places for one in scored], device, prompts)
