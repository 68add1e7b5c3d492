"""One version of a policy on its way from a trainer to an engine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from stretto.model.hf.tokenizer import Tokenizer


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


def mark_of(tokenizer: Tokenizer) -> str:
    """A text that is the same for tokenizers with the same vocabulary, and another one for others."""
    vocabulary = json.dumps(sorted(tokenizer.vocabulary.items()))
    return hashlib.blake2b(vocabulary.encode(), digest_size=16).hexdigest()
