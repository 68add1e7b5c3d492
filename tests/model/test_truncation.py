"""Promises: what top-k, top-p and min-p leave is what their definitions say, one after the other; equals stay or go
together; rows do not touch each other; a nucleus of any size is found."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.records import Sampling
from stretto.model.truncation import _FIRST_RANKED, Truncation, truncate


def kept(probabilities: list[float], **settings: float) -> list[int]:
    logits = torch.tensor([probabilities], dtype=torch.float64).log().float()
    left = truncate(logits, Truncation.of(Sampling(max_tokens=1, **settings)))  # type: ignore[arg-type]
    return (left.softmax(-1)[0] > 0).nonzero()[:, 0].tolist()


SHARES = [0.08, 0.4, 0.2, 0.02, 0.3]


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [1, 4]),
        ({"top_k": 5}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.69}, [1, 4]),
        ({"top_p": 0.71}, [1, 2, 4]),
        ({"top_p": 1e-9}, [1]),
        ({"min_p": 0.45}, [1, 2, 4]),
        ({"min_p": 0.55}, [1, 4]),
        ({"min_p": 1.0}, [1]),
        # Of 0.4, 0.3, 0.2 (sum 0.9), top-p 0.75 wants 0.675: two tokens. Of all, it would take three.
        ({"top_k": 3, "top_p": 0.75}, [1, 4]),
        ({"top_p": 0.75}, [1, 2, 4]),
        ({"top_k": 4, "top_p": 0.95, "min_p": 0.45}, [1, 2, 4]),
        ({"top_k": 4, "top_p": 0.95, "min_p": 0.1}, [0, 1, 2, 4]),
    ],
)
def test_sets_by_hand(settings: dict[str, float], tokens: list[int]) -> None:
    assert kept(SHARES, **settings) == tokens


@pytest.mark.parametrize("settings", [{"top_k": 2}, {"top_p": 0.5}, {"top_p": 0.5, "top_k": 2}, {"min_p": 0.6}])
def test_tokens_as_likely_as_the_last_one_that_is_kept_are_kept(settings: dict[str, float]) -> None:
    assert kept([0.1, 0.25, 0.4, 0.25], **settings) == [1, 2, 3]
    assert kept([0.25] * 4, **settings) == [0, 1, 2, 3]


def plain(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The definitions, word by word, in float64."""
    weights = np.exp(logits.astype(np.float64) - logits.max())
    ranked = np.argsort(-weights, kind="stable")
    tokens = [t for t in ranked if not top_k or weights[t] >= weights[ranked[top_k - 1]]]
    total, reached, nucleus = sum(weights[t] for t in tokens), 0.0, list[int]()
    for token in tokens:
        if reached >= top_p * total and weights[token] < weights[nucleus[-1]]:
            break
        nucleus.append(int(token))
        reached += weights[token]
    return {t for t in (nucleus if top_p < 1 else tokens) if weights[t] >= min_p}


@given(st.data())
def test_rows_with_different_settings_get_what_the_definitions_say(data: st.DataObject) -> None:
    # Halves apart, so that no set hangs on a rounding, with equals in plenty.
    rows, width = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 12))
    halves = st.lists(st.integers(-8, 8), min_size=width, max_size=width)
    logits = np.array([data.draw(halves) for _ in range(rows)], np.float32) / 2
    top_k = [data.draw(st.integers(0, width)) for _ in range(rows)]
    top_p = [data.draw(st.sampled_from([1.0, 0.0123, 0.3337, 0.777, 0.951])) for _ in range(rows)]
    min_p = [data.draw(st.sampled_from([0.0, 0.1, 0.45, 0.99])) for _ in range(rows)]
    left = truncate(torch.from_numpy(logits), Truncation(np.array(top_k), np.array(top_p), np.array(min_p)))
    for r in range(rows):
        ours = set((left[r].softmax(-1) > 0).nonzero()[:, 0].tolist())
        assert ours == plain(logits[r], top_k[r], top_p[r], min_p[r])


def test_a_nucleus_larger_than_what_is_ranked_first_is_found_and_small_ones_beside_it_too() -> None:
    width = 6 * _FIRST_RANKED
    flat = torch.linspace(0, 1e-2, width)  # nearly all of them are needed
    logits = torch.stack([flat, torch.linspace(0, 40, width), flat])
    settings = Truncation(np.array([0, 0, 7]), np.array([0.9, 0.9, 1.0]), np.zeros(3))
    left = (truncate(logits, settings).softmax(-1) > 0).sum(-1).tolist()
    expected = [
        len(plain(row.numpy(), k, p, 0.0)) for row, k, p in zip(logits, (0, 0, 7), (0.9, 0.9, 1.0), strict=True)
    ]
    assert left[1:] == expected[1:]
    assert abs(left[0] - expected[0]) <= 1
    assert left[0] > 5 * _FIRST_RANKED


def test_one_token_stays_whatever_the_filters_say_and_counts_beside_the_others() -> None:
    logits = torch.tensor([[math.log(6.0), math.log(3.0), 0.0]] * 2)
    always = torch.tensor([2, 0])
    left = truncate(logits, Truncation.of(Sampling(max_tokens=1, top_k=1)), always).softmax(-1)
    torch.testing.assert_close(left, torch.tensor([[6 / 7, 0.0, 1 / 7], [1.0, 0.0, 0.0]]))


def test_broken_logits_stay_broken() -> None:
    for bad in (math.nan, math.inf):
        left = truncate(torch.tensor([[0.0, bad, 1.0]]), Truncation.of(Sampling(max_tokens=1, top_k=1, top_p=0.5)))
        assert bool(left.softmax(-1).isnan().any())
