"""The parameters of an engine's model. A published version replaces all of them, or adds adapters to them; the engine
proves which it has by scores of a text, and of its own sampled tokens.

    all         model.layers.0.self_attn.q_proj.weight = W                  all parameters by name
    adapters    model.layers.0.self_attn.q_proj.lora_A = A, ....lora_B = B  W becomes W + B A (LoRA, arXiv 2106.09685)

Adapters are always added to the base weights: the last complete weights that were loaded, initially those of the model
folder. They are never added to an earlier sum, so the result does not depend on the versions in between.

`Parameters.differing` compares the parameters in memory with the trainer's digests. The digests do not come through the
mailbox, so the comparison detects any loss or change since the publication.

Axes: L token of a text, N sampled token that is computed again, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from stretto.core.canary import DECODED, TensorDigest, differing
from stretto.core.errors import TornPublication
from stretto.engine.native.completions import Completions
from stretto.engine.native.sampling import tempered
from stretto.model.decode.policy import DecodePolicy
from stretto.model.decode.text import TextCache
from stretto.model.kernels import OneDnnLinear
from stretto.model.packed.logprobs import rows_of_chunk
from stretto.weights.mailbox import LORA_A, LORA_B, pinned, texts
from stretto.weights.shared_memory import digest_of_tensor, name_of

_Shape = tuple[int, ...]


class Parameters:
    """Copies published versions into the parameters of a model. For a layer with adapters it keeps the base weight
    beside the parameter, which holds the sum.

    `spare`: bytes free on the device, None without a limit; to be set before a load. If base weights to be kept for
    layers with adapters need more, they are kept in host memory and copied back layer by layer.
    """

    def __init__(self, model: nn.Module) -> None:
        """`model`: where `load` copies versions."""
        self.spare: int | None = None
        self._beyond = False  # the base weights are beyond the device
        self._torn = False  # a load of all parameters has failed halfway
        self._parameters = dict(model.named_parameters())
        modules = model.named_modules()
        self._products = {f"{name}.weight": one for name, one in modules if isinstance(one, OneDnnLinear)}
        self._beside = _adapters_of(model)  # of a model that computes W x + B A x: its weights are never changed
        self._bases: dict[str, Tensor] = {}  # without adapters, of the parameters that have had some
        self._adapters: dict[str, Tensor] = {}  # as they were published
        self._compared: Mapping[str, TensorDigest] = {}  # by `compare`, since the last load

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors of a version into the parameters, or add its adapters to the base weights; a model with
        separate matrices A and B gets only those. `check` must have accepted the version. An error halfway leaves a
        mixture; then `check` refuses adapters until all parameters were loaded."""
        self._compared = {}
        if self._beside:
            for name, parameter in self._beside.items():
                parameter.copy_(tensors[name])
            return
        if not _is_of_adapters(tensors):
            self._torn = True
            for name, parameter in self._parameters.items():
                if parameter.is_contiguous():
                    parameter.copy_(tensors[name])
                else:  # column by column in memory: torch copies half as fast from the other side
                    parameter.t().copy_(tensors[name].t())
            self._bases.clear()
            self._adapters.clear()
            self._torn = False
            return
        self._adapters = {name: tensor.to("cpu", torch.float32, copy=True) for name, tensor in tensors.items()}
        weights = {layer: self._parameters[f"{layer}.weight"] for layer in _layers(tensors)}
        for layer in self._bases.keys() - weights.keys():  # earlier adapters had it, these do not
            self._parameters[f"{layer}.weight"].copy_(self._bases[layer])
            del self._bases[layer]
        new = sum(weight.nbytes for layer, weight in weights.items() if layer not in self._bases)
        if new and self.spare is not None:
            self._beyond = new > self.spare
        for layer, weight in weights.items():
            if layer not in self._bases:
                self._bases[layer] = pinned(weight).copy_(weight) if self._beyond else weight.clone()
            weight.copy_(self._with_adapters(layer))

    def compare(self, digests: Mapping[str, TensorDigest]) -> tuple[tuple[str, ...], int]:
        """Compare as `differing` does, with what it returns, and remember `digests` for `changed`."""
        self._compared = digests
        return self.differing(digests)

    def changed(self) -> tuple[str, ...] | None:
        """Names of tensors that differ now from the digests of the last `compare`; None: none since a load."""
        return self.differing(self._compared)[0] if self._compared else None

    @torch.no_grad()
    def differing(self, digests: Mapping[str, TensorDigest]) -> tuple[tuple[str, ...], int]:
        """Names of tensors in memory that are missing or differ in any bit from the published tensors with these
        digests, and the number of tensors compared, missing ones included. A weight that is not the sum of its base and
        adapters is named too, and so is one whose copy for a matmul kernel has other numbers. A tensor published in
        another dtype than the engine's was rounded when it was loaded, so it is not compared. A tensor on a GPU is
        compared by its sums, if its digest has them."""
        held = {name: self._held(name) for name in digests}
        there = {name: tensor for name, tensor in held.items() if tensor is not None}
        alike = {name: tensor for name, tensor in there.items() if name_of(tensor.dtype) == digests[name].dtype}
        away = {name: tensor for name, tensor in alike.items() if digests[name].sums and is_away(tensor)}
        sums = {name: TensorDigest(digests[name].dtype, "", one) for name, one in texts(away).items()}
        found = {name: digest_of_tensor(one) for name, one in alike.items() if name not in away} | sums
        lost = [name for name, tensor in held.items() if tensor is None]
        added = [f"{layer}.weight" for layer in self._bases if not self._is_sum(layer)]
        copied = [f"{name} (copy)" for name, one in self._products.items() if not one.kernel.holds(one.weight)]
        return (*lost, *differing(digests, found), *added, *copied), len(alike) + len(lost)

    def _held(self, name: str) -> Tensor | None:
        """The tensor in memory for a published name; for a weight with adapters, its base weight; None if there is
        none."""
        base = self._bases.get(name.removesuffix(".weight"))
        return base if base is not None else self._parameters.get(name, self._adapters.get(name))

    def _is_sum(self, layer: str) -> bool:
        parameter = self._parameters[f"{layer}.weight"]
        return _same(parameter, self._with_adapters(layer).to(parameter.dtype))

    def _with_adapters(self, layer: str) -> Tensor:
        base = self._bases[layer].to(self._parameters[f"{layer}.weight"].device)
        a, b = (self._adapters[layer + kind].to(base.device) for kind in (LORA_A, LORA_B))
        return base + b @ a

    def check(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Refuse a version that does not fit this model exactly. Raises TornPublication if a name is missing or
        unknown, a shape differs, or adapters would be added to base weights that were loaded only in part."""
        shapes = {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}
        if self._beside:
            shapes = {name: tuple(parameter.shape) for name, parameter in self._beside.items()}
        elif _is_of_adapters(tensors):
            if self._torn:
                raise TornPublication(f"version {version} has adapters, and its base was loaded only in part")
            shapes = _adapter_shapes(tensors, shapes)
        missing, unknown = shapes.keys() - tensors.keys(), tensors.keys() - shapes.keys()
        if missing or unknown:
            found = ([f"it lacks {_some(missing)}"] if missing else []) + (
                [f"its {_some(unknown)} is unknown"] if unknown else []
            )
            raise TornPublication(f"version {version} is not of this model: {', '.join(found)}")
        for name, shape in shapes.items():
            if tensors[name].shape != shape:
                told = f"{name} is {tuple(tensors[name].shape)}, the model has {shape}"
                raise TornPublication(f"version {version} is not of this model: {told}")


def is_away(tensor: Tensor) -> bool:
    """Whether a tensor is not in host memory, so that hashing would have to copy all of it."""
    return tensor.device.type != "cpu"


def _adapters_of(model: nn.Module) -> dict[str, Tensor]:
    """The matrices A and B of layers that compute W x + B A x, by the names under which they are published. Their scale
    is 1, because the published B includes the scale."""
    found = dict[str, Tensor]()
    for name, parameter in model.named_parameters():
        for kind in (LORA_A, LORA_B):
            layer, part, _ = name.partition(f"{kind}.")
            found |= {layer + kind: parameter} if part else {}
    return found


def _same(parameter: Tensor, expected: Tensor) -> bool:
    """Whether two tensors have equal values. Column-major ones are transposed: `torch.equal` is slow on them."""
    turned = parameter.dim() == 2 and not parameter.is_contiguous()
    return torch.equal(parameter.t(), expected.t()) if turned else torch.equal(parameter, expected)


def _is_of_adapters(tensors: Mapping[str, Tensor]) -> bool:
    return any(name.endswith((LORA_A, LORA_B)) for name in tensors)


def _layers(tensors: Mapping[str, Tensor]) -> list[str]:
    return [name.removesuffix(LORA_A) for name in tensors if name.endswith(LORA_A)]


def _adapter_shapes(tensors: Mapping[str, Tensor], weights: Mapping[str, _Shape]) -> dict[str, _Shape]:
    """Required shapes of A and B for each layer whose A is published, from the rank of A and the shape of the layer's
    weight. Layers that the model does not have are left out."""
    shapes: dict[str, _Shape] = {}
    for layer in _layers(tensors):
        width_out, *width_in = weights.get(f"{layer}.weight", (0,))
        if width_in:  # else there is no such layer, and its A is unknown
            rank = len(tensors[layer + LORA_A])
            shapes |= {layer + LORA_A: (rank, *width_in), layer + LORA_B: (width_out, rank)}
    return shapes


def _some(names: Collection[str]) -> str:
    """The alphabetically first name, and the number of others, as text."""
    return min(names) + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")


_SPARE_TOKENS = 1024  # room in the prover's cache
_LEAST = float(torch.finfo(torch.float32).min) / 2  # tokens removed by a filter have less
Ints = npt.NDArray[np.int64]


class Prover:
    """Scores text with the model of an engine's `policy` over a KV cache of its own, so completions are not touched.
    `vocabulary`: number of token ids. `most`: most tokens computed together; fewer if their logits would exceed
    `model.packed.logprobs.CHUNK_LOGITS`."""

    def __init__(self, policy: DecodePolicy, vocabulary: int, most: int) -> None:
        self._model, self._bytes = policy.model, _SPARE_TOKENS * policy.layout.bytes_per_token
        self._policy: DecodePolicy | None = DecodePolicy(self._model, self._bytes)
        self._layout, self._most = policy.layout, min(most, rows_of_chunk(policy.layout.device, vocabulary))

    def _scored(self, logprobs: Callable[[DecodePolicy], Tensor]) -> Tensor:
        """Log-probabilities that `logprobs` computes with the policy. After an error, or a result that is not finite,
        the next call has a new policy: the cache may hold rows, or NaN, which no mask keeps out (0 * nan is nan)."""
        policy = self._policy if self._policy is not None else DecodePolicy(self._model, self._bytes)
        self._policy = None
        found = logprobs(policy)
        self._policy = policy if bool(found.isfinite().all()) else None
        return found

    def text(self, token_ids: Sequence[int]) -> tuple[tuple[float, ...], int]:
        """Log-probabilities of all tokens but the first of a text of at least three tokens, at temperature 1, and the
        number of last tokens that were decoded one at a time over the KV cache."""
        text = np.asarray(token_ids, np.int64)
        decoded = min(DECODED, len(text) - 2)
        found = self._scored(lambda policy: _logprobs(policy.forward_of_text(text[:-1], decoded), text[1:]))
        return tuple(found.tolist()), decoded

    def texts(self, texts: Sequence[Sequence[int]]) -> Iterator[tuple[int, tuple[float, ...]]]:
        """Yield the log-probabilities of all tokens but the first of each text, at temperature 1 without filters, piece
        by piece, as (index of the text, its next numbers); none for a text of one token. A piece has at most `most`
        tokens, and at most `CHUNK_LOGITS` logits. The weights must stay the same between two pieces."""
        for number, text in enumerate(np.asarray(one, np.int64) for one in texts):
            for begin, piece in self._forwards([text[:-1]] if len(text) > 1 else []):
                wanted = partial(_next_logprobs, piece, text[1 + begin :])
                yield number, tuple(self._scored(wanted).tolist())

    def sampled(
        self, completions: Completions, rows: Sequence[int], version: int, wanted: int, most: int
    ) -> tuple[tuple[float, float], ...]:
        """Recompute, without a KV cache, the log-probabilities of about `wanted` tokens that `version` sampled in
        `rows`. Returns (reported, recomputed) pairs; empty if there are no such tokens. `most`: largest number of
        tokens fed to the model in all. Rows with a grammar, and tokens that a filter removes this time, are left
        out."""
        chosen = _chosen(completions, rows, version, wanted, most)
        if not chosen:
            return ()
        texts = [completions.context(row) for row in chosen]
        starts = np.cumsum([0, *map(len, texts)])
        places = [completions.sampled_with(row, version) for row in chosen]
        columns = zip(*map(completions.tokens_at, chosen, places), strict=True)
        tokens, told = (np.concatenate(column) for column in columns)
        before = np.concatenate([start + place - 1 for start, place in zip(starts, places, strict=False)])
        rows_N = np.repeat(chosen, list(map(len, places)))
        settings, again = completions.sampling, np.zeros(len(tokens))

        def logprobs(policy: DecodePolicy, begin: int, piece: Callable[[DecodePolicy], Tensor]) -> Tensor:
            logits_LV = piece(policy)
            here = np.flatnonzero((before >= begin) & (before < begin + len(logits_LV)))
            logits_NV = logits_LV[torch.from_numpy(before[here] - begin).to(logits_LV.device)]
            temperatures, filtered = settings.temperatures[rows_N[here]], settings.filtered(rows_N[here])
            found = _logprobs(tempered(logits_NV, temperatures, filtered), tokens[here])
            again[here] = found.numpy(force=True)
            return found

        for begin, piece in self._forwards(texts):
            self._scored(partial(logprobs, begin=begin, piece=piece))
        # Rounding may move a filter's edge; a token that it removes this time has no log-probability.
        return tuple(pair for pair in zip(told.tolist(), again.tolist(), strict=True) if pair[1] > _LEAST)

    def _forwards(self, texts: Sequence[Ints]) -> Iterator[tuple[int, Callable[[DecodePolicy], Tensor]]]:
        """Yield forward passes that give the logits after every token of the texts, in order; with each, the number of
        tokens before it. Texts that are short enough are computed together, longer ones in pieces."""
        if sum(map(len, texts)) <= self._most:
            yield from [(0, lambda policy: policy.forward_of_texts(texts))] if texts else []
            return
        before = 0
        for text in texts:
            cache = TextCache(self._layout, len(text))
            for start in range(0, len(text), self._most):
                piece = text[start : start + self._most]
                yield before + start, partial(DecodePolicy.forward_of_piece, text=cache, token_ids=piece)
            before += len(text)


def joined(pieces: Iterable[tuple[int, tuple[float, ...]]], texts: int) -> list[tuple[float, ...]]:
    """All numbers of each of `texts` texts, from the pieces of `Prover.texts`.

    >>> joined([(0, (-0.5,)), (0, (-1.0,)), (2, (-2.0,))], 3)
    [(-0.5, -1.0), (), (-2.0,)]
    """
    found = [list[float]() for _ in range(texts)]
    for number, logprobs in pieces:
        found[number] += logprobs
    return [tuple(one) for one in found]


def _chosen(completions: Completions, rows: Sequence[int], version: int, wanted: int, most: int) -> list[int]:
    """The shortest rows that together have `wanted` tokens sampled by `version`; fewer if their texts would exceed
    `most` tokens. Rows with a grammar are left out."""
    chosen, found = list[int](), 0
    for row in sorted(rows, key=lambda row: completions.lengths[row]):
        most -= int(completions.lengths[row])
        if found >= wanted or most < 0:
            break
        if row not in completions.matchers and (count := len(completions.sampled_with(row, version))):
            chosen.append(row)
            found += count
    return chosen


def _next_logprobs(piece: Callable[[DecodePolicy], Tensor], tokens: Ints, policy: DecodePolicy) -> Tensor:
    """Log-probability of the token after each token of a piece of a text. `piece` computes the logits of the piece;
    `tokens`: the text from the second token of the piece on."""
    logits_LV = piece(policy)
    return _logprobs(logits_LV, tokens[: len(logits_LV)])


def _logprobs(logits_NV: Tensor, tokens_N: Ints) -> Tensor:
    return logits_NV.log_softmax(-1).gather(1, torch.from_numpy(tokens_N[:, None]).to(logits_NV.device))[:, 0]
