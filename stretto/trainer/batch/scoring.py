"""Asking a model about the answers of a batch, whole, before anything is trained: a critic, or a reference policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
    """One number for each token of each answer, masked ones too, by the trajectory's id; on every rank those of all.

    `evaluate` gives one for each wanted token. Where an answer `goes_on` there is one more, of the state after its
    last token: of a token that was never sampled, so that only what comes before it can count.
    """
    answers = [
        (t.id, group.prompt.token_ids, t.completion.token_ids + ((0,) if goes_on(t) else ()))
        for group in batch.groups
        for t in group.trajectories
    ]
    divided = shares([len(prompt) + len(answer) for _, prompt, answer in answers], capacity, 1, ranks.count)
    own = [evaluate(_packed([answers[i] for i in pack], device)) for pack in divided[ranks.rank]]
    numbers, _ = ranks.joined(torch.cat(own))
    order = [answers[i] for share in divided for pack in share for i in pack]
    parts = numbers.split([len(answer) for _, _, answer in order])
    return {name: part.tolist() for (name, _, _), part in zip(order, parts, strict=True)}


def _packed(answers: Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]], device: torch.device) -> PackedTokens:
    """Answers with their names and prompts; what is wanted is the answers' tokens."""
    wanted = [range(len(prompt), len(prompt) + len(answer)) for _, prompt, answer in answers]
    # As in `minibatch.py`: away from CUDA the answers to one prompt share it. Nothing follows an empty answer.
    share = device.type != "cuda" and all(answer for _, _, answer in answers)
    prompts = [len(prompt) for _, prompt, _ in answers] if share else None
    return pack_tokens([prompt + answer for _, prompt, answer in answers], wanted, device, prompts)
