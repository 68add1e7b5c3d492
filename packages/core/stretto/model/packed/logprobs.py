"""Log-probabilities of given tokens under a model, differentiable, with a single [N, V] tensor in memory.

The model's body runs over all T packed tokens. The output matrix runs only over the N wanted tokens, in chunks: at most
one chunk of the [N, V] logits is in memory, also in the backward pass.

torch's log-softmax and gather need four such tensors: logits, log-softmax, and the gradients of both. Here the logits
are overwritten by their gradient, block by block (a GPU has `stretto_kernels.gpu.logprobs`), z = logits / temperature:

    d log p(c) / d z_j = [j = c] - p_j,      d H / d z_j = - p_j (log p_j + H)

Axes: T packed token, N wanted token, V vocabulary, W width of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MethodType
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from stretto.core.errors import ModelFolderError, Problem
from stretto.core.records import Sampling
from stretto.model.device import copied
from stretto.model.layout import DivideRow, Ints, Packing, RowPart, pack, round_length
from stretto.model.truncation import Truncation, truncate
from stretto_kernels.gpu import logprobs as gpu_logprobs

#: Logits per block; they fit the CPU cache.
_BLOCK = {"cpu": 1 << 20, "cuda": 1 << 26}


class _Chosen(torch.autograd.Function):
    """Computes `chosen_logprobs` block by block; without `entropy` the second output is zeros."""

    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, chosen_N: Tensor, entropy: bool, temperature: float
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.temperature = temperature
        if gpu_logprobs.computes(logits_NV):
            scored = gpu_logprobs.score(logits_NV, chosen_N, entropy=entropy, temperature=temperature)
            ctx.save_for_backward(logits_NV, chosen_N, *scored[1:])
            return scored[0], scored[2]
        logprobs_N = torch.empty(len(chosen_N), dtype=torch.float32, device=logits_NV.device)
        sums_N, entropy_N = torch.empty_like(logprobs_N), torch.zeros_like(logprobs_N)
        for rows in _blocks(logits_NV):
            z = logits_NV[rows].float()
            z = z if temperature == 1.0 else z / temperature
            highest = z.amax(-1, keepdim=True)
            below = z - highest  # at most 0
            chosen = below.gather(1, chosen_N[rows, None])[:, 0]
            weights = below.exp()
            total = weights.sum(-1)
            logprobs_N[rows] = chosen - total.log()
            sums_N[rows] = highest[:, 0] + total.log()
            if entropy:
                entropy_N[rows] = total.log() - weights.mul_(below).sum(-1) / total
        ctx.save_for_backward(logits_NV, chosen_N, sums_N, entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(
        ctx: Any, grad_N: Tensor | None, grad_entropy_N: Tensor | None
    ) -> tuple[Tensor | None, None, None, None]:
        logits_NV, chosen_N, sums_N, entropy_N = saved = ctx.saved_tensors
        if gpu_logprobs.computes(logits_NV):
            gpu_logprobs.write_gradient(saved, grad_N, grad_entropy_N, ctx.temperature)
            return logits_NV, None, None, None
        if grad_N is None:
            grad_N = torch.zeros_like(sums_N)
        for rows in _blocks(logits_NV):
            z = logits_NV[rows].float()  # of float32 the logits themselves
            if ctx.temperature != 1.0:
                z.div_(ctx.temperature)
            z.sub_(sums_N[rows, None])  # log p
            if grad_entropy_N is None:
                z.exp_().mul_(-grad_N[rows, None])
            else:
                p = z.exp()
                z.clamp_(min=-1e4)  # excluded tokens: their p is 0
                z.add_(entropy_N[rows, None]).mul_(grad_entropy_N[rows, None]).add_(grad_N[rows, None])
                z.mul_(p).neg_()
            z.scatter_add_(1, chosen_N[rows, None], grad_N[rows, None])
            if ctx.temperature != 1.0:
                z.div_(ctx.temperature)
            if logits_NV.dtype != torch.float32:
                logits_NV[rows] = z.to(logits_NV.dtype)
        return logits_NV, None, None, None


def _blocks(logits_NV: Tensor) -> Iterator[slice]:
    """Divide the rows into slices of at most `_BLOCK` logits, and at least one row."""
    rows = max(1, _BLOCK.get(logits_NV.device.type, 1 << 20) // logits_NV.shape[1])
    return (slice(first, first + rows) for first in range(0, len(logits_NV), rows))


def chosen_logprobs(
    logits_NV: Tensor, chosen_N: Tensor, *, entropy: bool, temperature: float = 1.0
) -> tuple[Tensor, Tensor | None]:
    """Compute log softmax(logits / temperature)[chosen], [N], and the entropies [N] (None without `entropy`). Both are
    float32 and differentiable with respect to the logits.

    The backward pass overwrites the logits, so they must not be used elsewhere. autograd refuses a second backward
    pass.
    """
    logprobs_N, entropy_N = cast(
        tuple[Tensor, Tensor],
        _Chosen.apply(logits_NV, chosen_N, entropy, temperature),  # type: ignore[no-untyped-call]
    )
    return logprobs_N, entropy_N if entropy else None


#: Name of the method by which a sharded output matrix scores tokens.
SCORE = "stretto_score"

#: Most logits in memory at once: 64 MiB in float32 on the CPU; 1 GiB on a GPU, where matmuls need more rows.
CHUNK_LOGITS = {"cpu": 1 << 24, "cuda": 1 << 28}

#: Token ids, or positions.
Numbers = Sequence[int] | npt.NDArray[Any]


def rows_of_chunk(device: torch.device, vocabulary: int) -> int:
    """Return how many rows of logits, of `vocabulary` numbers each, may be in memory at once (`CHUNK_LOGITS`); at least
    1."""
    return max(1, CHUNK_LOGITS.get(device.type, 1 << 24) // vocabulary)


@dataclass(frozen=True)
class PackedTokens:
    """Packed sequences, and the tokens whose log-probabilities are `wanted` (indices in the row), with the token
    `before` each. `targets`: tokens to score there; None: those of the row. `part`: this rank's, if ranks divide a row.

    Example: prompt (5, 12) with the completions (4, 2) and (9,), which share the prompt::

        PackedTokens(input_ids=[[5, 12, 4, 2, 9]], packing=..., wanted=[2, 3, 4], before=[1, 2, 1])
    """

    input_ids: Tensor  # [1, T]
    packing: Packing
    wanted: Tensor  # [N] index of each wanted token in the packed row
    before: Tensor  # [N] index of the token before each wanted token in its sequence
    targets: Tensor | None = None  # [N] tokens to score at these positions; None: the tokens of the row
    part: RowPart | None = None  # this rank's tokens if several ranks divide the row

    def divided(self, divide: DivideRow | None) -> PackedTokens:
        """Return a copy of which this process computes the part that `divide` cuts; the object itself if `divide` is
        None, or it has a part already."""
        if divide is None or self.part is not None:
            return self
        return replace(self, part=divide(self.input_ids, self.packing.position_ids, self.before))


class TokenLogprobs(NamedTuple):
    """Log-probabilities (natural, float32) of the wanted tokens, and entropies if requested."""

    logprobs: Tensor  # [N]
    entropy: Tensor | None  # [N], of the distribution that each token is drawn from; None if not requested


def pack_tokens(
    sequences: Sequence[Numbers],
    wanted: Sequence[Numbers] | None = None,
    device: torch.device | str = "cpu",
    prompts: Sequence[int] | None = None,
    targets: Sequence[Numbers] | None = None,
) -> PackedTokens:
    """Pack sequences of token ids into one row.

    `wanted`: for each sequence, the positions whose tokens are scored; None: all but the first. `targets`: tokens to
    score at these positions, one of which may be the position after the last token; None: the tokens of the sequences.
    `prompts`: length of each sequence's prompt. Sequences with equal prompts share the prompt's computation; then no
    position within the prompt may be wanted.

    A last sequence of filler tokens pads the row to a `round_length`; its positions pass no other's. Without any
    sequence the row is one filler token, and nothing is scored, so that a rank without work can run a forward pass.

    Raises:
        ValueError: an empty sequence, or a wanted position that is the first, in a shared prompt, or past the end.
    """
    if not sequences:
        sequences, wanted, prompts, targets = [[0]], [()], None, None
    rows = [np.asarray(sequence, np.int64) for sequence in sequences]
    places = [np.asarray(one, np.int64) for one in wanted] if wanted else [np.arange(1, len(row)) for row in rows]
    prefixes = _shared_prefixes(rows, prompts or [0] * len(rows))
    tokens = sum(len(row) - prefix for row, (_, prefix) in zip(rows, prefixes, strict=True))
    if filler := round_length(tokens) - tokens:
        rows, places = [*rows, np.zeros(filler, np.int64)], [*places, np.zeros(0, np.int64)]
        prefixes.append((len(prefixes), 0))
    packing = pack([len(row) for row in rows], device, prefixes)
    if filler:  # a longer one would pass the last of a model's learned positions
        last = max(map(len, rows[:-1])) - 1
        packing = replace(packing, position_ids=packing.position_ids.clamp(max=last))
    # Each of these has a number for each wanted position: of its sequence, or its source.
    counts, inside = [len(one) for one in places], np.concatenate(places)
    (sources, shared), sizes = np.asarray(prefixes, np.int64).T, np.asarray(packing.lengths)
    ends = sizes + (targets is not None)
    starts = (sizes - shared).cumsum() - (sizes - shared)  # `packing.starts`, without a wait for its device
    prefix, end = shared.repeat(counts), ends.repeat(counts)
    if (outside := np.flatnonzero((inside < np.maximum(prefix, 1)) | (inside >= end))).size:
        s = int(np.searchsorted(np.cumsum(counts), outside[0], side="right"))
        found = f"wanted positions {places[s].tolist()} of a sequence of {len(rows[s])}"
        raise ValueError(f"{found}: after the first, inside it")
    at = inside + (starts - shared).repeat(counts)
    before = np.where(inside > prefix, at, starts[sources].repeat(counts) + inside) - 1
    return PackedTokens(
        input_ids=_tensor([row[prefix:] for row, (_, prefix) in zip(rows, prefixes, strict=True)], device)[None],
        packing=packing,
        wanted=copied(at, device),
        before=copied(before, device),
        targets=None if targets is None else _tensor([np.asarray(one, np.int64) for one in targets], device),
    )


def _tensor(parts: Sequence[Ints], device: torch.device | str) -> Tensor:
    return copied(np.concatenate(parts), device)


def _shared_prefixes(sequences: Sequence[Ints], prompts: Sequence[int]) -> list[tuple[int, int]]:
    """Return, for each sequence, the index of the one whose prompt it shares and the number of shared tokens (0: none),
    as `layout.pack` takes them. The first sequence with a prompt computes it for the others."""
    first: dict[bytes, int] = {}
    prefixes = []
    for s, (sequence, prompt) in enumerate(zip(sequences, prompts, strict=True)):
        source = first.setdefault(sequence[:prompt].tobytes(), s)
        prefixes.append((source, prompt if source != s else 0))
    return prefixes


def token_logprobs(
    model: PreTrainedModel,
    packed: PackedTokens,
    sampling: Sampling,
    *,
    entropy: bool = False,
    chunk_logits: int | None = None,
) -> TokenLogprobs:
    """Compute log p(token | earlier tokens of its sequence) at each wanted position, [N], differentiable; with
    `entropy` also the entropies [N]. `chunk_logits`: most logits in memory at once; None: `CHUNK_LOGITS`.

    p is the engine's sampling distribution for this model: the float32 softmax of logits / temperature (> 0) over the
    tokens that top-k, top-p and min-p keep. The scored token always counts as kept: an older version has drawn it, so
    it is unlikely now, not impossible. With probability zero the log-ratio would be infinite, without a gradient. The
    set of kept tokens is constant for the gradient.

    The model must be loaded with packed attention (`model.packed.attention`) and pass `check_policy`.

    The number of hidden states that the output matrix multiplies is rounded up (`round_length`). Otherwise oneDNN would
    compile and keep two megabytes of code for every number of wanted tokens.
    """
    targets = packed.input_ids[0].index_select(0, packed.wanted) if packed.targets is None else packed.targets
    before, part = packed.before, packed.part
    if part is not None:
        before, targets = part.before, targets.index_select(0, part.own)
    wanted = len(targets)
    before, targets = (functional.pad(x, (0, round_length(wanted) - wanted)) for x in (before, targets))
    head = model.get_output_embeddings()
    score = getattr(head, SCORE, None) or partial(_all_logprobs, head, head)
    hidden_NW = hidden_states(model, packed).index_select(0, before)
    logprobs_N, entropy_N = score(hidden_NW, targets, sampling, entropy, chunk_logits)
    both = logprobs_N[:wanted], entropy_N[:wanted] if entropy_N is not None else None
    if part is not None:
        both = part.joined(both[0]), part.joined(both[1]) if both[1] is not None else None
    return TokenLogprobs(*both)


def score_as_method(head: nn.Module) -> None:
    """Add the method `SCORE` to an output matrix, so that FSDP gathers the matrix once for all chunks."""
    setattr(head, SCORE, MethodType(_gathered_logprobs, head))


def _gathered_logprobs(head: nn.Module, *arguments: Any) -> tuple[Tensor, Tensor | None]:
    return _all_logprobs(head, head.forward, *arguments)  # without FSDP's hooks, which would gather it for each chunk


def _all_logprobs(
    head: nn.Module,
    multiply: Callable[[Tensor], Tensor],
    hidden_NW: Tensor,
    targets_N: Tensor,
    sampling: Sampling,
    entropy: bool,
    chunk_logits: int | None,
) -> tuple[Tensor, Tensor | None]:
    """Compute log-probabilities [N] and entropies [N] (None without `entropy`) from hidden states, in chunks of at most
    `chunk_logits` logits (None: `CHUNK_LOGITS`), which the backward pass computes again, or by a fused GPU kernel.
    `multiply`: applies the output matrix `head`."""
    weight = cast(Tensor, head.weight)
    rows = rows_of_chunk(hidden_NW.device, len(weight)) if not chunk_logits else max(1, chunk_logits // len(weight))
    if not sampling.filtered and multiply is head and _is_matrix(head) and gpu_logprobs.computes(hidden_NW):
        found = gpu_logprobs.head_logprobs(
            hidden_NW, weight, targets_N, entropy=entropy, temperature=sampling.temperature, most=rows
        )
        return found[0], found[1] if entropy else None
    if len(targets_N) <= rows:
        return _head_logprobs(multiply, hidden_NW, targets_N, sampling, entropy)
    chunks = [
        checkpoint(_head_logprobs, multiply, hidden, targets, sampling, entropy, use_reentrant=False)
        for hidden, targets in zip(hidden_NW.split(rows), targets_N.split(rows), strict=True)
    ]
    logprobs, entropies = zip(*chunks, strict=True)
    return torch.cat(logprobs), torch.cat(entropies) if entropy else None


def _is_matrix(head: nn.Module) -> bool:
    """Whether an output matrix does nothing but multiply by its weight: no bias, no hooks, not sharded."""
    hooks = head._forward_hooks or head._forward_pre_hooks or head._backward_hooks or head._backward_pre_hooks
    return type(head) is nn.Linear and head.bias is None and type(head.weight) is nn.Parameter and not hooks


def check_policy(model: PreTrainedModel) -> None:
    """Check, by two forward passes, that the model is a body followed by one linear map to the logits, as
    `token_logprobs` assumes. Raises ModelFolderError if the model changes its logits after the output matrix (a soft
    cap, a scale), or a layer requests unsupported attention."""
    head = model.get_output_embeddings()
    packed = pack_tokens([[1, 2, 0], [3, 0]], device=model.device)
    with torch.no_grad():
        logits = head(hidden_states(model, packed))
        assumed, exact = logits.float(), logits.dtype == torch.float32
        # A soft cap has no effect on small logits, so the module's forward is tested with large ones.
        factor = 1000 / float(assumed.abs().max().clamp_min(1e-6))
        hook = head.register_forward_hook(lambda module, inputs, logits: logits * factor)
        try:
            own = model(packed.input_ids, **_arguments(packed)).logits[0].float()
        finally:
            hook.remove()
    tolerance = 1e-4 if exact else 2e-2
    if not torch.allclose(assumed * factor, own, rtol=tolerance, atol=1000 * tolerance):
        found = "changes its logits after the output matrix (a soft cap or a scale)"
        raise ModelFolderError([Problem(type(model).__name__, found, "choose a model whose logits are linear")])


def hidden_states(model: PreTrainedModel, packed: PackedTokens) -> Tensor:
    """Compute the last hidden states of the model's body, [T, W], at the packed tokens that this rank computes: all,
    unless `packed` has a part."""
    ids = packed.input_ids if packed.part is None else packed.part.input_ids
    hidden: Tensor = model.base_model(ids, **_arguments(packed)).last_hidden_state[0]
    return hidden


def _arguments(packed: PackedTokens) -> dict[str, Any]:
    """Return the keyword arguments of a model's forward for the packed tokens."""
    whole = {"position_ids": packed.packing.position_ids, "use_cache": False, "packing": packed.packing}
    return whole if packed.part is None else whole | {"position_ids": packed.part.position_ids, "part": packed.part}


def _head_logprobs(
    multiply: Callable[[Tensor], Tensor], hidden_NW: Tensor, targets_N: Tensor, sampling: Sampling, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute log-probabilities and entropies (None without `entropy`), [N], from hidden states, in one chunk."""
    logits_NV = multiply(hidden_NW)
    if not sampling.filtered:
        return chosen_logprobs(logits_NV, targets_N, entropy=entropy, temperature=sampling.temperature)
    kept_NV = truncate(logits_NV.float() / sampling.temperature, Truncation.of(sampling), targets_N)
    return chosen_logprobs(kept_NV, targets_N, entropy=entropy)
