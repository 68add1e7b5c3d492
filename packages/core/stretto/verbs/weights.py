"""The weights of one version of a policy, which `Trainer.weights` returns and `Engine.update` takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from stretto.core.errors import TornPublication
from stretto.weights.mailbox import LORA_A, LORA_B


@dataclass(frozen=True)
class PolicyWeights:
    """Copies of a version's parameters by name, or of its adapters; further training does not change them.

    Example::

        weights = stretto.Trainer("model").weights()
        stretto.Engine.load("model").update(weights)
        print(weights.version, weights.bytes)
    """

    version: int
    tensors: Mapping[str, Tensor] = field(repr=False)
    tokenizer: str = ""  # hash of the tokenizer's vocabulary (`completion.mark_of`); "": not known

    @property
    def bytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def merged(base: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the parameters of a whole policy.

    If `tensors` are adapters, that is `base` with W + B A for each weight W that has adapters A and B (B is already
    scaled). Otherwise it is `tensors` itself.

    Raises:
        TornPublication: `base` has no such W: the adapters belong to another model.
    """
    layers = [name.removesuffix(LORA_A) for name in tensors if name.endswith(LORA_A)]
    if not layers:
        return tensors
    if missing := [layer for layer in layers if f"{layer}.weight" not in base]:
        raise TornPublication(f"these adapters are not of this model: it has no layer {missing[0]}")
    sums = {f"{one}.weight": base[f"{one}.weight"] + tensors[one + LORA_B] @ tensors[one + LORA_A] for one in layers}
    return {**base, **sums}
