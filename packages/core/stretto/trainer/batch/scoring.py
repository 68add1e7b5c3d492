"""Batch scoring: before a step, a critic or reference policy computes one number for each sampled token of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
        evaluate(_packed([paths[i] for i in pack], [places[i] for i in pack], device)) for pack in divided[ranks.share]
    ]
    numbers, _ = ranks.all_gather(torch.cat(own))
    order = [i for share in divided for pack in share for i in pack]
    parts = np.split(numbers.double().cpu().numpy(), np.cumsum([len(places[i]) for i in order])[:-1])
    return {paths[i].id: part for i, part in zip(order, parts, strict=True)}


def _packed(paths: Sequence[PathTokens], places: Sequence[Ints], device: torch.device) -> PackedTokens:
    """Pack paths for one forward pass. `places`: the positions in each path that get a score."""
    # As in `minibatch.py`: on the CPU the paths share the computation of their prompt.
    prompts = None if device.type == "cuda" else [path.prompt_tokens for path in paths]
    # After the last token any token is scored: a token more would have a position that learned positions may not have.
    targets = [np.append(path.token_ids, np.int32(0))[wanted] for path, wanted in zip(paths, places, strict=True)]
    return pack_tokens([path.token_ids for path in paths], places, device, prompts, targets)
