"""How far two floating-point computations of one number may lie apart: one rule for every test that compares.

An operation rounds its result by at most u, the unit roundoff of the type, relative to its size. A number that n
operations lead to errs by n u at worst, and by LAMBDA √n u in practice: roundings are nearly independent, and with a
probability of 1 - 2 exp(-LAMBDA²/2) or more their sum is no larger (Higham and Mary, 2019, "A new approach to
probabilistic rounding error analysis"). Both sides are rounded, in an order that the processor chooses. Hence

    tolerance = 2 LAMBDA √operations u size

    operations   on the way to one number: the longest sum x how many such sums follow each other, `operations_of` for a
                 model; a gradient goes the way forward and back
    size         the largest number of all that are compared: summands that cancel err by their own size, not by
                 their sum's

So a tolerance is measured on no processor, and grows with type, width and depth alone. What is promised to the last bit
(a replay, a checkpoint, the same calls with the same numbers) is compared with `torch.equal` or `==`."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from stretto.model.hf.config import BuildConfig

LAMBDA = 4.0

#: A formula worked by hand: some ten operations, exponentials and logarithms among them.
FEW = 16

#: Log-probabilities of the tests' own models are above minus this, and their logits of that size.
LOGITS = 10.0

_SUMS_OF_A_LAYER = 8  # norm, projections, scores, mix, projection; norm, up, down
_SUMS_AROUND = 3  # the last norm, the matrix of the vocabulary, the sum of the exponentials


def operations(width: int, layers: int, *, backward: bool = False) -> int:
    """From a token to its log-probability, and back to the first layer."""
    return width * (_SUMS_OF_A_LAYER * layers + _SUMS_AROUND) * (2 if backward else 1)


def operations_of(config: PreTrainedConfig | BuildConfig, *, backward: bool = False) -> int:
    """Of a model."""
    width = max(config.hidden_size, config.intermediate_size)
    layers = config.layers if isinstance(config, BuildConfig) else config.num_hidden_layers
    return operations(width, layers, backward=backward)


def rounding(operations: int = FEW, dtype: torch.dtype = torch.float32, *, size: float = 1.0) -> float:
    """The tolerance; numbers too small for the type may vanish."""
    facts = torch.finfo(dtype)
    return 2 * LAMBDA * math.sqrt(operations) * facts.eps / 2 * size + facts.tiny


#: Of a log-probability: the engine's and the runs' tests have models of at most this width and depth.
EXACT = rounding(operations(64, 3), size=LOGITS)


def assert_close(
    actual: object,
    expected: object,
    operations: int = FEW,
    *,
    dtype: torch.dtype = torch.float32,
    size: float | None = None,
) -> None:
    """Tensors, or sequences of them, to rounding; `dtype` is the one that was computed in."""
    ours, theirs = ([one] if isinstance(one, Tensor) else one for one in (actual, expected))
    assert isinstance(ours, Sequence)
    assert isinstance(theirs, Sequence)
    if size is None:
        size = max((float(one.detach().abs().max()) for one in theirs if one.numel()), default=0.0)
    tolerance = rounding(operations, dtype, size=size)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.to(other.dtype), other, rtol=0, atol=tolerance)


def near(expected: Any, operations: int = FEW, *, size: float | None = None) -> Any:
    """A number or a list of numbers to rounding in float32, for ``==``."""
    if size is None:
        size = max(map(abs, expected), default=0.0) if isinstance(expected, list) else abs(expected)
    return pytest.approx(expected, rel=0, abs=rounding(operations, size=size))


#: Steps of AdamW in tests that compare parameters: eps is large beside gradients, or a step makes whole steps of the
#: rounding in gradients that are almost zero, and the learning rate is as large, so that parameters move.
RATE, EPS = 0.05, 0.1


def after_adam(steps: int, operations: int, *, gradient: float = 1.0) -> float:
    """The tolerance for parameters after steps of RATE · m / (√v + EPS), each of which errs by RATE / EPS times what
    its gradient errs by; `gradient` is the norm that it is clipped to."""
    return steps * RATE / EPS * rounding(operations, size=gradient)
