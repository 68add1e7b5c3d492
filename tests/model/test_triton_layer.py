"""Promises of a training step's kernels on a GPU (in Triton's interpreter where there is none):

- values and gradients of fused layers are those of the modules, to rounding; in bfloat16 no further from float32 than
  the modules are;
- log-probabilities, entropies and their gradients are those of torch, together or either alone, at any temperature;
- NaN among logits is not hidden, and tokens that may not be drawn count nothing.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from stretto.model.packed import layer, triton_logprobs, triton_loops
from stretto.model.packed import logprobs as scored
from stretto.model.packed.layer import fuse_layers
from stretto.model.packed.logprobs import chosen_logprobs
from tests.model.families import Family
from tests.model.test_layer import SHAPED, build, packed, relative_error, step
from tests.tolerances import LOGITS, assert_close, operations_of, rounding

pytest.importorskip("triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "_loops", lambda tensor: triton_loops)
    monkeypatch.setattr(triton_logprobs, "computes", lambda logits: True)


@pytest.mark.parametrize("family", SHAPED, ids=str)
def test_values_and_gradients_are_those_of_the_modules(family: Family) -> None:
    model, tokens = build(family), packed(shared=False)
    expected = step(model, tokens)
    assert fuse_layers(model) == 2
    logprobs, *gradients = step(model, tokens)
    assert_close(logprobs, expected[0], operations_of(model.config), size=LOGITS)
    assert_close(gradients, expected[1:], operations_of(model.config, backward=True))
