"""Batch scoring: before a step, a critic or reference policy computes one number for each sampled token of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stretto.core.records import Batch
from stretto.model.packed.logprobs import PackedTokens, pack_tokens
from stretto.trainer.batch.minibatch import shares
from stretto.trainer.batch.paths import Ints, PathTokens, paths_of
from stretto.trainer.objective.returns import Doubles
from stretto.trainer.ranks import ALONE, Ranks


@torch.no_grad()
def score_tokens(
    batch: Batch,
    capacity: int,
    device: torch.device,
    evaluate: Callable[[PackedTokens], Tensor],
    continues: Callable[[PathTokens], bool] = lambda _: False,
    ranks: Ranks = ALONE,
) -> dict[str, Doubles]:
    """Scores of the own sampled tokens of each path, including tokens too old to be trained on, by path id. The result
    is the same on every rank; all ranks must call it. Empty if no token was sampled.

    `capacity`: most tokens of a forward pass. `device`: where `evaluate` computes; it returns one score per wanted
    token. A path for which `continues` is true gets one score more, of the state after its last token. Raises
    BoundViolated as `paths_of`."""
    scored = [
        _scored(path, continues(path))
        for group in batch.groups
        for trajectory in group.trajectories
        for path in paths_of(group.prompt, trajectory)
    ]
    if not scored:
        return {}
    divided = shares([len(one.token_ids) for one in scored], capacity, 1, ranks.shares)
    own = [evaluate(_packed([scored[i] for i in pack], device)) for pack in divided[ranks.share]]
    numbers, _ = ranks.all_gather(torch.cat(own))
    order = [scored[i] for share in divided for pack in share for i in pack]
    parts = np.split(numbers.double().cpu().numpy(), np.cumsum([len(one.places) for one in order])[:-1])
    return {one.id: part for one, part in zip(order, parts, strict=True)}


@dataclass(frozen=True)
class _Scored:
    """The tokens of a path, its number of prompt tokens, and the positions that get a score."""

    id: str
    token_ids: Ints
    prompt_tokens: int
    places: Ints


def _scored(path: PathTokens, continues: bool) -> _Scored:
    places = np.append(path.places, np.int32(len(path.token_ids))) if continues else path.places
    return _Scored(path.id, path.token_ids, path.prompt_tokens, places)


def _packed(scored: Sequence[_Scored], device: torch.device) -> PackedTokens:
    # As in `minibatch.py`: on the CPU the paths share the computation of their prompt.
    prompts = None if device.type == "cuda" else [one.prompt_tokens for one in scored]
    # After the last token any token is scored: a token more would have a position that learned positions may not have.
    targets = [np.append(one.token_ids, np.int32(0))[one.places] for one in scored]
    return pack_tokens([one.token_ids for one in scored], [one.places for one in scored], device, prompts, targets)
