"""The parameters of an engine's model, and how a published version comes into them: whole, or as adapters.

    whole       model.layers.0.self_attn.q_proj.weight = W                  all parameters by name
    adapters    model.layers.0.self_attn.q_proj.lora_A = A, ....lora_B = B  W becomes W + B A (LoRA, arXiv 2106.09685)

Adapters are added to the weights that were loaded last as a whole, those of the model's folder if none were: never to a
sum with earlier ones. So what an engine computes does not depend on how many versions it has seen.

`differing` reads all of it back from memory and compares it with the trainer's digests, which have not come through the
mailbox: what is lost or changed between the publication and these parameters shows there.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from stretto.core.canary import TensorDigest, differing
from stretto.core.errors import TornPublication
from stretto.weights.mailbox import LORA_A, LORA_B
from stretto.weights.shared_memory import digest_of_tensor

_Shape = tuple[int, ...]


class Parameters:
    """All parameters of a model, into which versions are copied; of those with adapters the sum is kept, and what the
    adapters are added to."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = dict(model.named_parameters())
        self._beside = _adapters_of(model)  # of a model that computes W x + B A x: its weights are never changed
        self._bases: dict[str, Tensor] = {}  # without adapters, of the parameters that have had some
        self._adapters: dict[str, Tensor] = {}  # as they were published

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy a version that `check` lets pass."""
        if self._beside:
            for name, parameter in self._beside.items():
                parameter.copy_(tensors[name])
            return
        if not _is_of_adapters(tensors):
            for name, parameter in self._parameters.items():
                if parameter.is_contiguous():
                    parameter.copy_(tensors[name])
                else:  # column by column in memory: torch copies half as fast from the other side
                    parameter.t().copy_(tensors[name].t())
            self._bases.clear()
            self._adapters.clear()
            return
        self._adapters = {name: tensor.to("cpu", torch.float32, copy=True) for name, tensor in tensors.items()}
        for layer in _layers(tensors):
            parameter = self._parameters[f"{layer}.weight"]
            if layer not in self._bases:
                self._bases[layer] = parameter.clone()
            parameter.copy_(self._with_adapters(layer))

    @torch.no_grad()
    def differing(self, digests: Mapping[str, TensorDigest]) -> tuple[tuple[str, ...], int]:
        """The tensors in memory that are not, to the last bit, those of a version with these digests; and how many of
        them were compared: all, but for those of another type than the engine's, which it has rounded."""
        held = {name: self._held(name) for name in digests}
        alike = {name: tensor for name, tensor in held.items() if tensor is not None}
        found = {name: digest_of_tensor(tensor) for name, tensor in alike.items()}
        same_type = {name: one.checksum for name, one in found.items() if one.dtype == digests[name].dtype}
        lost = [name for name, tensor in held.items() if tensor is None]
        sums = [f"{layer}.weight" for layer in self._bases if not self._is_sum(layer)]
        return (*lost, *differing(digests, same_type), *sums), len(same_type) + len(lost)

    def _held(self, name: str) -> Tensor | None:
        """The numbers in memory of a published tensor: of a weight with adapters, those that they are added to."""
        base = self._bases.get(name.removesuffix(".weight"))
        return base if base is not None else self._parameters.get(name, self._adapters.get(name))

    def _is_sum(self, layer: str) -> bool:
        parameter = self._parameters[f"{layer}.weight"]
        return _same(parameter, self._with_adapters(layer).to(parameter.dtype))

    def _with_adapters(self, layer: str) -> Tensor:
        base = self._bases[layer]
        a, b = (self._adapters[layer + kind].to(base.device) for kind in (LORA_A, LORA_B))
        return base + b @ a

    def check(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Refuse what is not exactly of this model.

        Raises:
            TornPublication: a name is missing or unknown, or a shape differs.
        """
        shapes = {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}
        if self._beside:
            shapes = {name: tuple(parameter.shape) for name, parameter in self._beside.items()}
        elif _is_of_adapters(tensors):
            shapes = _adapter_shapes(tensors, shapes)
        missing, unknown = shapes.keys() - tensors.keys(), tensors.keys() - shapes.keys()
        if missing or unknown:
            found = f"lacks {sorted(missing)[:3]}, has unknown {sorted(unknown)[:3]}"
            raise TornPublication(f"version {version} is not of this model: it {found}")
        for name, shape in shapes.items():
            if tensors[name].shape != shape:
                told = f"{name} is {tuple(tensors[name].shape)}, the model has {shape}"
                raise TornPublication(f"version {version} is not of this model: {told}")


def _adapters_of(model: nn.Module) -> dict[str, Tensor]:
    """A and B of the layers that have adapters of their own, by the names under which they are published; their scale
    is 1, for B is published with it."""
    found = dict[str, Tensor]()
    for name, parameter in model.named_parameters():
        for kind in (LORA_A, LORA_B):
            layer, part, _ = name.partition(f"{kind}.")
            found |= {layer + kind: parameter} if part else {}
    return found


def _same(parameter: Tensor, expected: Tensor) -> bool:
    """Whether they are equal; `torch.equal` of a tensor that lies column by column in memory is slow."""
    turned = parameter.dim() == 2 and not parameter.is_contiguous()
    return torch.equal(parameter.t(), expected.t()) if turned else torch.equal(parameter, expected)


def _is_of_adapters(tensors: Mapping[str, Tensor]) -> bool:
    return any(name.endswith((LORA_A, LORA_B)) for name in tensors)


def _layers(tensors: Mapping[str, Tensor]) -> list[str]:
    """The layers that have an A."""
    return [name.removesuffix(LORA_A) for name in tensors if name.endswith(LORA_A)]


def _adapter_shapes(tensors: Mapping[str, Tensor], weights: Mapping[str, _Shape]) -> dict[str, _Shape]:
    """What the adapters of the layers that have an A must be: of the rank that A has, between the layer's widths."""
    shapes: dict[str, _Shape] = {}
    for layer in _layers(tensors):
        width_out, *width_in = weights.get(f"{layer}.weight", (0,))
        if width_in:  # else there is no such layer, and its A is unknown
            rank = len(tensors[layer + LORA_A])
            shapes |= {layer + LORA_A: (rank, *width_in), layer + LORA_B: (width_out, rank)}
    return shapes
