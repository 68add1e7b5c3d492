"""Asking a model about the answers of a batch, whole, before anything is trained: a critic, or a reference policy."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stretto.core.records import Batch, Trajectory
from stretto.model.logprobs import PackedTokens, pack_tokens
from stretto.trainer.packing import micro_batches


@torch.no_grad()
def ask(
    batch: Batch,
    capacity: int,
    device: torch.device,
    evaluate: Callable[[PackedTokens], Tensor],
    goes_on: Callable[[Trajectory], bool] = lambda _: False,
) -> dict[str, list[float]]:
    """One number for each token of each answer, masked ones too, by the trajectory's id.

    `evaluate` gives one for each wanted token. Where an answer `goes_on` there is one more, of the state after its
    last token: of a token that was never sampled, so that only what comes before it can count.
    """
    answers = [
        (t.id, group.prompt.token_ids, t.completion.token_ids + ((0,) if goes_on(t) else ()))
        for group in batch.groups
        for t in group.trajectories
    ]
    found: dict[str, list[float]] = {}
    for pack in micro_batches([len(prompt) + len(answer) for _, prompt, answer in answers], capacity):
        together = [answers[i] for i in pack]
        wanted = [range(len(prompt), len(prompt) + len(answer)) for _, prompt, answer in together]
        # As in `minibatch.py`: away from CUDA the answers to one prompt share it. Nothing follows an empty answer.
        share = device.type != "cuda" and all(answer for _, _, answer in together)
        prompts = [len(prompt) for _, prompt, _ in together] if share else None
        packed = pack_tokens([prompt + answer for _, prompt, answer in together], wanted, device, prompts)
        parts = evaluate(packed).split([len(places) for places in wanted])
        found |= {name: part.tolist() for (name, _, _), part in zip(together, parts, strict=True)}
    return found
