"""Promises: a token is a function of logits, seed and place alone; tokens come as often as their probability says;
log-probabilities are those of the distribution that was sampled from."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.engine.native.sampling import Filtered, draw_by_torch, mix, sample, uniforms
from stretto.model.truncation import Truncation
from stretto_kernels.draw import draw as draw_one
from tests.tolerances import near


def draw(logits: torch.Tensor, temperature: float = 1.0, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rows = len(logits)
    return sample(logits, np.full(rows, temperature, np.float32), np.full(rows, seed, np.uint64), np.arange(rows))


def test_the_generator_is_splitmix64() -> None:
    # The reference implementation, seeded with 1234567, gives these first two outputs.
    golden = np.uint64(0x9E3779B97F4A7C15)
    states = np.array([1234567, 1234567], np.uint64) + np.array([1, 2], np.uint64) * golden
    assert mix(states).tolist() == [6457827717110365317, 3203168211198807973]


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**20))
def test_uniforms_lie_in_the_unit_interval_and_depend_on_seed_and_place(seed: int, place: int) -> None:
    seeds, places = np.array([seed, seed, seed ^ 1], np.uint64), np.array([place, place + 1, place])
    here, next_place, next_seed = uniforms(seeds, places).tolist()
    assert 0 <= here < 1
    assert here != next_place
    assert here != next_seed


def test_a_row_draws_the_same_token_alone_and_among_others() -> None:
    logits, seeds, places = torch.randn(64, 30), np.arange(64, dtype=np.uint64), np.arange(64) % 5
    ones = np.ones(64, np.float32)
    together, _ = sample(logits, ones, seeds, places)
    alone = [sample(logits[r : r + 1], ones[:1], seeds[r : r + 1], places[r : r + 1])[0][0] for r in range(64)]
    assert together.tolist() == alone


@given(
    seed=st.integers(0, 1000),
    tokens=st.sampled_from([1, 2, 63, 64, 65, 200]),
    size=st.sampled_from([0.1, 3.0, 50.0]),
    removed=st.booleans(),
)
def test_the_loop_and_torch_draw_the_same_tokens(seed: int, tokens: int, size: float, removed: bool) -> None:
    """The two add up in different orders: only a target within rounding of the edge of a token may give another one."""
    logits = size * torch.randn(16, tokens, generator=torch.Generator().manual_seed(seed))
    if removed:  # as filters remove tokens, and as a model may
        logits[:, 1::3], logits[:, 2::3] = torch.finfo(torch.float32).min, -torch.inf
    greedy, targets = np.arange(16) % 4 == 0, uniforms(np.full(16, seed, np.uint64), np.arange(16))
    expected, logprobs = draw_by_torch(logits, greedy, targets)
    drawn, found = draw_one(logits, greedy, targets)
    edges = logits.double().softmax(-1).cumsum(-1).numpy()
    for row in np.flatnonzero(drawn != expected):
        assert not greedy[row]
        assert abs(edges[row, min(drawn[row], expected[row])] - targets[row]) <= (tokens + 2) * 2.0**-23
    same = drawn == expected
    assert found[same].tolist() == near(logprobs[same].tolist(), tokens, size=10 * size)


def test_tokens_come_as_often_as_their_probability_says() -> None:
    temperature = 2.0
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])
    draws = 40_000
    tokens, logprobs = draw(probabilities.log().expand(draws, 5), temperature)
    expected = (probabilities.log() / temperature).softmax(-1)
    counts = torch.bincount(torch.from_numpy(tokens), minlength=5)
    assert counts[4] == 0
    chi_squared = float(((counts - draws * expected)[:4] ** 2 / (draws * expected[:4])).sum())
    assert chi_squared < 21.1  # exceeded once in 10,000 with 3 degrees of freedom
    assert logprobs.tolist() == near(expected.log()[tokens].tolist())


def test_numbers_by_hand() -> None:
    # exp(0) : exp(ln 3) = 1 : 3, at temperature 0.5 it is 1 : 9.
    tokens, logprobs = draw(torch.tensor([[0.0, math.log(3.0)]] * 50), temperature=0.5)
    by_hand = np.array([math.log(0.1), math.log(0.9)])
    assert set(tokens.tolist()) == {0, 1}
    assert logprobs.tolist() == near(by_hand[tokens].tolist())


def test_temperature_zero_takes_the_likeliest_token_and_leaves_other_rows_alone() -> None:
    logits = torch.randn(32, 30)
    temperatures = np.where(np.arange(32) % 2, 0.0, 1.0).astype(np.float32)
    seeds, places = np.arange(32, dtype=np.uint64), np.zeros(32, np.int64)
    tokens, logprobs = sample(logits, temperatures, seeds, places)
    sampled, _ = sample(logits, np.ones(32, np.float32), seeds, places)
    assert tokens[1::2].tolist() == logits.argmax(-1)[1::2].tolist()
    assert tokens[::2].tolist() == sampled[::2].tolist()
    assert logprobs.tolist() == near(logits.log_softmax(-1).numpy()[np.arange(32), tokens].tolist(), 30)


BROKEN = [math.nan, math.inf]


@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.parametrize("bad", BROKEN)
def test_logits_that_are_no_distribution_have_no_logprob_and_leave_others_alone(bad: float, temperature: float) -> None:
    logits = torch.randn(3, 7)
    broken = logits.clone()
    broken[1, 4] = bad
    tokens, logprobs = draw(broken, temperature)
    expected_tokens, expected_logprobs = draw(logits, temperature)
    assert np.isnan(logprobs).tolist() == [False, True, False]
    assert tokens[[0, 2]].tolist() == expected_tokens[[0, 2]].tolist()
    assert logprobs[[0, 2]].tolist() == expected_logprobs[[0, 2]].tolist()


def filtered(top_k: list[int], top_p: list[float], min_p: list[float], rows: list[int] | None = None) -> Filtered:
    rows = list(range(len(top_k))) if rows is None else rows
    return Filtered(np.array(rows), Truncation(np.array(top_k), np.array(top_p), np.array(min_p)))


def test_behind_filters_tokens_come_as_often_as_their_probability_says() -> None:
    # Top-p 0.8 leaves 0.5 and 0.3 and 0.15 (0.95): each divided by 0.95.
    draws, log = 40_000, torch.tensor([0.3, 0.02, 0.5, 0.03, 0.15]).log()
    rows = log.expand(draws, 5)
    seeds, places = np.full(draws, 3, np.uint64), np.arange(draws)
    setting = filtered([0] * draws, [0.81] * draws, [0.0] * draws)
    tokens, logprobs = sample(rows, np.ones(draws, np.float32), seeds, places, setting)
    expected = torch.tensor([0.3, 0.0, 0.5, 0.0, 0.15]) / 0.95
    counts = torch.bincount(torch.from_numpy(tokens), minlength=5)
    assert counts[[1, 3]].tolist() == [0, 0]
    wanted = draws * expected[[0, 2, 4]]
    assert float(((counts[[0, 2, 4]] - wanted) ** 2 / wanted).sum()) < 18.4  # once in 10,000 with 2 degrees of freedom
    assert logprobs.tolist() == near(expected.log()[tokens].tolist())


def test_filters_touch_their_own_rows_alone() -> None:
    logits = 3 * torch.randn(48, 40, generator=torch.Generator().manual_seed(4))
    temperatures = np.where(np.arange(48) % 5 == 4, 0.0, 0.7).astype(np.float32)
    seeds, places = np.arange(48, dtype=np.uint64), np.arange(48) % 7
    rows = [r for r in range(48) if r % 3 == 0]
    top_k, top_p, min_p = [r % 4 * 2 for r in rows], [1.0 if r % 2 else 0.8 for r in rows], [r / 480 for r in rows]
    tokens, logprobs = sample(logits, temperatures, seeds, places, filtered(top_k, top_p, min_p, rows))
    free_tokens, free_logprobs = sample(logits, temperatures, seeds, places)
    for r in range(48):
        one = slice(r, r + 1)
        setting = None
        if r in rows:
            at = rows.index(r)
            setting = filtered([top_k[at]], [top_p[at]], [min_p[at]])
        token, logprob = sample(logits[one], temperatures[one], seeds[one], places[one], setting)
        assert (tokens[r], logprobs[r]) == (token[0], logprob[0])
        if r not in rows:
            assert (tokens[r], logprobs[r]) == (free_tokens[r], free_logprobs[r])


@pytest.mark.parametrize("bad", BROKEN)
def test_filters_do_not_hide_logits_that_are_no_distribution(bad: float) -> None:
    _, logprobs = sample(
        torch.tensor([[0.0, bad, 3.0]]),
        np.ones(1, np.float32),
        np.zeros(1, np.uint64),
        np.zeros(1, np.int64),
        filtered([1], [0.5], [0.5]),
    )
    assert np.isnan(logprobs).all()
