"""Promises of the draw on a GPU (in Triton's interpreter where there is none): it takes the token that the plain way
takes for the same uniform number, whatever temperature and filters; log-probabilities agree to 1e-5; a row whose logits
are no distribution has none, and leaves others alone; nothing of the vocabulary's size is made.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from stretto.engine.native import sampling
from stretto.engine.native.sampling import Filtered, draw_by_torch, draws, sample, tempered
from stretto.model.truncation import Truncation
from stretto_kernels.gpu import draw
from stretto_kernels.gpu.draw import draw_on_device
from tests.tolerances import near
from tests.trainer.scale.counting import LiveBytes

pytest.importorskip("triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NOBODY = np.zeros(0, np.int64)
LAST = 1 - 2.0**-52  # the largest uniform number
Drawn = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]


def assert_drawn(logits: Tensor, temperatures: list[float], uniforms: list[float], given: Filtered | None) -> None:
    """The same tokens; only a target within rounding of the edge of a token may give its neighbour."""
    degrees, targets = np.array(temperatures, np.float32), np.array(uniforms)
    rows, filters = (given.rows, given.truncation.settings) if given is not None else (NOBODY, None)
    tokens, logprobs = draw_on_device(logits.to(DEVICE), degrees, targets, rows, filters)
    kept = tempered(logits, degrees, given)
    expected, known = draw_by_torch(kept, degrees == 0.0, targets)
    edges = kept.double().softmax(-1).cumsum(-1).numpy()
    for row in np.flatnonzero(tokens != expected):
        assert degrees[row] > 0
        assert abs(edges[row, min(tokens[row], expected[row])] - targets[row]) <= logits.shape[1] * 2.0**-23
    same = tokens == expected
    assert same.mean() >= 0.5
    assert np.abs(logprobs - known)[same].max() <= 1e-5
    assert tokens.dtype == np.int64
    assert logprobs.dtype == np.float32


@pytest.mark.parametrize(("size", "block"), [(130, 64), (1, 64), (48, 2048)])
def test_it_takes_the_token_of_the_same_uniform_number(size: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw, "_BLOCK", block)
    logits = 4 * torch.randn(5, size, generator=torch.Generator().manual_seed(size))
    logits[1, : size // 2] = -torch.inf
    logits[2, size // 2] = torch.finfo(torch.float32).min
    logits[3] = 2.0
    assert_drawn(logits, [1.0, 0.6, 0.0, 1.0, 2.5], [0.0, 0.7, 0.5, 0.5, LAST], None)


@pytest.mark.parametrize("room", [16_384, 4])
def test_filters_leave_what_the_plain_way_leaves(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Top-k and top-p with ties at the edge, alone and together, beside min-p and a row without any; whether or not
    the tokens that may be kept have room."""
    monkeypatch.setattr(draw, "_BLOCK", 16)
    monkeypatch.setattr(draw, "_ROOM", room)
    logits = 2 * torch.randn(5, 30, generator=torch.Generator().manual_seed(3))
    logits[0, [3, 9, 11]] = 5.0  # of these top-k 2 keeps all
    logits[1, [4, 20]] = logits[1].max()
    logits[2, [0, 1]] = torch.tensor([0.0, -0.0])
    given = Filtered(
        np.array([0, 1, 2, 4]),
        Truncation(np.array([2, 0, 12, 40]), np.array([1.0, 0.4, 0.7, 1.0]), np.array([0.0, 0.0, 0.05, 0.3])),
    )
    assert_drawn(logits, [1.0, 0.7, 1.3, 1.0, 1.0], [0.99, LAST, 0.8, 0.3, 0.9], given)


def test_rows_that_are_no_distribution_have_no_log_probability_and_leave_others_alone() -> None:
    logits = torch.randn(4, 9)
    logits[0, 4], logits[1, 2], logits[2] = torch.nan, torch.inf, -torch.inf
    ones, targets = np.ones(4, np.float32), np.full(4, 0.6)
    tokens, logprobs = draw_on_device(logits.to(DEVICE), ones, targets, NOBODY, None)
    assert np.isnan(logprobs).tolist() == [True, True, True, False]
    expected, known = draw_by_torch(logits[3:], np.array([False]), targets[3:])
    assert tokens[3] == expected[0]
    assert logprobs[3] == near(float(known[0]), 9)
    assert set(tokens[:3].tolist()) <= set(range(9))


@pytest.fixture
def by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Drawn]:
    """`sample` as on a GPU."""

    def drawn(*arguments: object) -> Drawn:
        with monkeypatch.context() as patch:
            patch.setattr(sampling, "draws", lambda device: True)
            return sample(*arguments)  # type: ignore[arg-type]

    return drawn


def test_an_engine_samples_by_it_with_grammars_too(by_the_kernel: Callable[..., Drawn]) -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    degrees, seeds = np.array([0.7, 0.0, 1.0], np.float32), np.arange(3, dtype=np.uint64)
    allowed = np.array([[0b1010, 0], [0b110000, 0b1]], np.int32)
    given = Filtered(np.array([1, 2]), Truncation(np.array([0, 2]), np.array([1.0, 0.9]), np.zeros(2)), allowed)
    tokens = np.zeros(0, np.int64)
    for one in (None, given):
        tokens, logprobs = by_the_kernel(logits.to(DEVICE), degrees, seeds, np.arange(3), one)
        expected, known = sample(logits, degrees, seeds, np.arange(3), one)
        assert tokens.tolist() == expected.tolist()
        assert logprobs.tolist() == near(known.tolist(), 40)
    assert {1, 3}.issuperset(tokens[1:2].tolist())
    assert not draws(torch.device("cpu"))
    assert draws(torch.device("cuda"))


def test_nothing_of_the_vocabularys_size_is_made() -> None:
    logits = torch.randn(2, 4096, device=DEVICE)
    with LiveBytes() as bytes_:
        draw_on_device(logits, np.ones(2, np.float32), np.full(2, 0.5), NOBODY, None)
    assert 0 < bytes_.peak < logits.nbytes + 4096, "the logits themselves, and settings"
