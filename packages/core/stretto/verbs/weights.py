"""One version of a policy on its way from a trainer to an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from stretto.core.errors import TornPublication
from stretto.weights.mailbox import LORA_A, LORA_B


@dataclass(frozen=True)
class PolicyWeights:
    """The parameters of a version by name, or its adapters: copies, which further training leaves alone.

    Example::

        weights = stretto.Trainer("model").weights()
        stretto.Engine.load("model").update(weights)
        print(weights.version, weights.bytes)
    """

    version: int
    tensors: Mapping[str, Tensor] = field(repr=False)
    tokenizer: str = ""  # the mark of the model's tokenizer; "": not known

    @property
    def bytes(self) -> int:
        """Their size in memory."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def merged(base: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """A whole policy: the tensors themselves, or, of adapters, W + B A for each W of `base` that has some.

    Raises:
        TornPublication: there is no such W.
    """
    layers = [name.removesuffix(LORA_A) for name in tensors if name.endswith(LORA_A)]
    if not layers:
        return tensors
    if missing := [layer for layer in layers if f"{layer}.weight" not in base]:
        raise TornPublication(f"these adapters are not of this model: it has no layer {missing[0]}")
    sums = {f"{one}.weight": base[f"{one}.weight"] + tensors[one + LORA_B] @ tensors[one + LORA_A] for one in layers}
    return {**base, **sums}
