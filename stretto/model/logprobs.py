"""Log-probabilities of given tokens under a model, at the cost of the positions that are wanted.

The body of the model runs over all T packed tokens; the output matrix runs over the N wanted ones, in chunks, so that
no more than one chunk of [N, V] logits is alive, in the backward pass either.

Axes: T packed token, N wanted token, V vocabulary, W width of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from stretto.core.errors import ModelFolderError, Problem
from stretto.model.packed import Packing, pack

#: Logits alive at once (64 MiB in float32).
CHUNK_LOGITS = 1 << 24


@dataclass(frozen=True)
class PackedTokens:
    """Sequences laid one after the other, and the tokens whose log-probability is wanted.

    Example: prompt (5, 12) with answer (4, 2), then prompt (5,) with answer (2,)::

        PackedTokens(input_ids=[[5, 12, 4, 2, 5, 2]], packing=pack([4, 2]), wanted=[2, 3, 5])
    """

    input_ids: Tensor  # [1, T]
    packing: Packing
    wanted: Tensor  # [N] positions in the packed row, none of them the first of its sequence


class TokenLogprobs(NamedTuple):
    """Natural logarithms, float32."""

    logprobs: Tensor  # [N]
    entropy: Tensor | None  # [N], of the distribution that the token was drawn from


def pack_tokens(
    sequences: Sequence[Sequence[int]],
    wanted: Sequence[Sequence[int]] | None = None,
    device: torch.device | str = "cpu",
) -> PackedTokens:
    """Pack sequences of token ids; `wanted` holds positions within each (default: all but the first).

    Raises:
        ValueError: an empty sequence, or a wanted position that has no token before it.
    """
    packing = pack([len(sequence) for sequence in sequences], device)
    if wanted is None:
        wanted = [range(1, len(sequence)) for sequence in sequences]
    offset, positions = 0, list[int]()
    for sequence, inside in zip(sequences, wanted, strict=True):
        if len(inside) and not 1 <= min(inside) <= max(inside) < len(sequence):
            raise ValueError(f"wanted positions {inside} of a sequence of {len(sequence)}: 1 or more, and inside it")
        positions.extend(offset + position for position in inside)
        offset += len(sequence)
    return PackedTokens(
        input_ids=torch.tensor([token for sequence in sequences for token in sequence], device=device)[None],
        packing=packing,
        wanted=torch.tensor(positions, dtype=torch.int64, device=device),
    )


def token_logprobs(
    model: PreTrainedModel,
    packed: PackedTokens,
    temperature: float,
    *,
    entropy: bool = False,
    chunk_logits: int = CHUNK_LOGITS,
) -> TokenLogprobs:
    """log p(token | tokens before it in its sequence) at each wanted position, [N], differentiable.

    p is the softmax of the logits divided by `temperature` (greater than 0), in float32. The model must have been
    loaded with the packed attention (`stretto.model.packed`) and have passed `check_policy`.
    """
    hidden_TW = _hidden(model, packed)
    hidden_NW = hidden_TW.index_select(0, packed.wanted - 1)
    targets_N = packed.input_ids[0].index_select(0, packed.wanted)
    rows = max(1, chunk_logits // model.get_output_embeddings().weight.shape[0])
    if len(targets_N) <= rows:
        return TokenLogprobs(*_head_logprobs(model, hidden_NW, targets_N, temperature, entropy))
    chunks = [
        checkpoint(_head_logprobs, model, hidden, targets, temperature, entropy, use_reentrant=False)
        for hidden, targets in zip(hidden_NW.split(rows), targets_N.split(rows), strict=True)
    ]
    logprobs, entropies = zip(*chunks, strict=True)
    return TokenLogprobs(torch.cat(logprobs), torch.cat(entropies) if entropy else None)


def check_policy(model: PreTrainedModel) -> None:
    """Make sure that the model is what `token_logprobs` takes it for: a body, then one linear map to the logits.

    Raises:
        ModelFolderError: its own logits are not those (a soft cap, a scale), or its attention is not plain causal.
    """
    vocabulary = model.get_output_embeddings().weight.shape[0]
    packed = pack_tokens([[1 % vocabulary, 2 % vocabulary, 0], [3 % vocabulary, 0]], device=model.device)
    with torch.no_grad():
        assumed = model.get_output_embeddings()(_hidden(model, packed))
        position_ids, packing = packed.packing.position_ids, packed.packing
        own = model(packed.input_ids, position_ids=position_ids, use_cache=False, packing=packing).logits[0]
    # A scale or a soft cap that changes nothing at these tokens could hide at others: compare at 100 times the size.
    if not torch.allclose(assumed, own, rtol=1e-4, atol=1e-6 * float(own.abs().max())):
        found = "changes its logits after the output matrix (a soft cap or a scale)"
        raise ModelFolderError([Problem(type(model).__name__, found, "choose a model whose logits are linear")])


def _hidden(model: PreTrainedModel, packed: PackedTokens) -> Tensor:
    """The body's last hidden state at each packed token, [T, W]."""
    packing = packed.packing
    body = model.base_model
    out = body(input_ids=packed.input_ids, position_ids=packing.position_ids, use_cache=False, packing=packing)
    hidden: Tensor = out.last_hidden_state[0]
    return hidden


def _head_logprobs(
    model: PreTrainedModel, hidden_NW: Tensor, targets_N: Tensor, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    logits_NV = model.get_output_embeddings()(hidden_NW).float()
    if temperature != 1.0:
        logits_NV = logits_NV / temperature
    if not entropy:
        return -functional.cross_entropy(logits_NV, targets_N, reduction="none"), None
    logprobs_NV = logits_NV.log_softmax(-1)
    chosen_N = logprobs_NV.gather(1, targets_N[:, None]).squeeze(1)
    return chosen_N, -(logprobs_NV.exp() * logprobs_NV).sum(-1)
