"""Asking a model about the answers of a batch, whole, before anything is trained: a critic, or a reference policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stretto.core.records import Batch, Trajectory
from stretto.model.packed.logprobs import PackedTokens, pack_tokens
from stretto.trainer.batch.packing import shares
from stretto.trainer.parallel.ranks import ALONE, Ranks


@torch.no_grad()
def ask(
    batch: Batch,
    capacity: int,
    device: torch.device,
    evaluate: Callable[[PackedTokens], Tensor],
    goes_on: Callable[[Trajectory], bool] = lambda _: False,
    ranks: Ranks = ALONE,
) -> dict[str, list[float]]:
    """One number for each sampled token, masked ones too, by the trajectory's id; on every rank those of all.

    `evaluate` gives one for each wanted token. Where a trajectory `goes_on` there is one more, of the state after its
    last token: of a token that was never sampled, so that only what comes before it can count.
    """
    asked = [
        _Asked(t.id, group.prompt.token_ids, t.token_ids, t.sampled_places).followed(goes_on(t))
        for group in batch.groups
        for t in group.trajectories
    ]
    divided = shares([len(one.prompt) + len(one.token_ids) for one in asked], capacity, 1, ranks.count)
    own = [evaluate(_packed([asked[i] for i in pack], device)) for pack in divided[ranks.rank]]
    numbers, _ = ranks.joined(torch.cat(own))
    order = [asked[i] for share in divided for pack in share for i in pack]
    parts = numbers.split([len(one.places) for one in order])
    return {one.id: part.tolist() for one, part in zip(order, parts, strict=True)}


@dataclass(frozen=True)
class _Asked:
    """A trajectory: its prompt, the tokens behind it, and the places among these that are asked about."""

    id: str
    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    places: tuple[int, ...]

    def followed(self, goes_on: bool) -> _Asked:
        """With one more token that was never sampled, whose place is asked about too; or as it is."""
        if not goes_on:
            return self
        return replace(self, token_ids=(*self.token_ids, 0), places=(*self.places, len(self.token_ids)))


def _packed(asked: Sequence[_Asked], device: torch.device) -> PackedTokens:
    wanted = [[len(one.prompt) + place for place in one.places] for one in asked]
    # As in `minibatch.py`: away from CUDA the trajectories of one prompt share it. Nothing follows an empty one.
    share = device.type != "cuda" and all(one.token_ids for one in asked)
    prompts = [len(one.prompt) for one in asked] if share else None
    return pack_tokens([one.prompt + one.token_ids for one in asked], wanted, device, prompts)
