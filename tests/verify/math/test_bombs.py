"""Completions that are written to stop the worker that judges them.

Promises: none of them is right, and every good completion among them is; no worker is lost for good.
"""

import time

import pytest

from stretto.core.records import Outcome
from stretto.rewards.config import RewardsConfig
from stretto.rewards.service.pool import RewardPool
from stretto.rewards.service.wire import ScoreItem
from tests.verify.math.judged import verdict

BOMBS = {
    "tower": "$9^{9^{9^{9}}}$",
    "power of ten": "$10^{10^{10}}$",
    "factorial": r"$(10^{9})!$",
    "factorials": "$((((9!)!)!)!)!$",
    "sum": r"$\sum_{k=1}^{10^9} \frac{1}{k^k}$",
    "product": r"$\prod_{k=1}^{10^{12}} k$",
    "polynomial": "$x^{100000}-(x+1)^{100000}$",
    "expansion": "$(x+y+z+w)^{200}$",
    "indexed powers": "$" + "+".join(f"x_{{{i}}}^{{{i}}}" for i in range(400)) + "$",
    "braces": "$" + "{" * 3000 + "1" + "}" * 3000 + "$",
    "open braces": r"\boxed{" + "{" * 3000,
    "parentheses": "$" + "(" * 500 + "1" + ")" * 500 + "$",
    "fractions": "$" + r"\frac{1}{" * 300 + "2" + "}" * 300 + "$",
    "binomial": r"$\binom{1000000000}{500000000}$",
    "integral": r"$\int_0^{1} e^{e^{e^{x}}} dx$",
    "sine": r"$\sin(10^{10^{10}})$",
    "divisor": r"$\gcd(10^{10^{10}}, 2)$",
    "chain": "$" + "x^" * 100 + "x$",
    "minus signs": "$" + "-" * 1900 + "1$",
    "product of letters": "$" + "x" * 1900 + "$",
    "formulas that never end": r"\(" * 50_000,
    "dollars": "$" * 100_000,
    "digits": "1" + "0" * 1_000_000,
    "a megabyte": "a" * 2_000_000,
    "denials": "not " * 100_000 + "42",
}
GOOD = (("42", r"So it is \boxed{42}."), (r"$\frac{3}{4}$", "The answer is $0.75$."), ("$(1, 2)$", r"\boxed{(1,2)}"))


@pytest.mark.parametrize("kind", BOMBS)
@pytest.mark.parametrize("gold", ["42", "$x^2+y^2=4$"])
def test_no_bomb_is_right_and_none_is_computed(kind: str, gold: str) -> None:
    start = time.process_time()
    assert verdict(gold, BOMBS[kind]) != "right"
    assert time.process_time() - start < 5.0  # a quarter of a second at most; computed, for ever


def good(count: int) -> list[ScoreItem]:
    return [ScoreItem(prompt="", completion=answer, answer=gold) for gold, answer in (GOOD * count)[:count]]


async def test_bombs_among_good_completions_cost_no_good_one_and_no_slot() -> None:
    bombs = [ScoreItem(prompt="", completion=bomb, answer="42") for bomb in BOMBS.values()]
    mixed = [item for at in range(len(bombs)) for item in (bombs[at % len(bombs)], *good(3))]
    async with RewardPool(RewardsConfig(function="math", workers=2, max_consecutive_undecided=10**6)) as pool:
        verdicts, after = await pool.score(mixed), await pool.score(good(100))
    assert [verdict.outcome for at, verdict in enumerate(verdicts) if at % 4] == [Outcome.RIGHT] * 3 * len(bombs)
    assert not any(verdict.outcome is Outcome.RIGHT for verdict in verdicts[::4])
    assert [verdict.outcome for verdict in after] == [Outcome.RIGHT] * 100
