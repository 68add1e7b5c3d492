"""Several rewards are added up to one verdict.

Promises: the reward is the sum of weight times value, and each value is kept by its name; the first reward that judges
a source says what is right; one that is undecided makes the whole undecided, whatever its weight, and is named; a
single `function` is a sum of one without a name.
"""

import math
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from stretto.core.errors import RewardFunctionError
from stretto.core.records import Outcome, Verdict
from stretto.rewards.config import RewardPart, RewardsConfig
from stretto.rewards.functions import RewardFunction, Undecided
from stretto.rewards.service.judging import LoadedPart, judge_all
from stretto.rewards.service.wire import PartSettings, ScoreItem, Worth
from tests.rewards.scoring import scored

WORTH = Worth(right=1.0, wrong=0.0)
ITEM = ScoreItem(prompt="3+8=", completion="11", answer="11", source="sums")


def returning(value: float | bool) -> RewardFunction:
    return lambda prompt, completion, answer: value


def part(name: str, function: RewardFunction, weight: float = 1.0, sources: tuple[str, ...] = ()) -> LoadedPart:
    return LoadedPart(PartSettings("m:f", "{}", "rewards", name, weight, sources), function)


def raising(prompt: str, completion: str, answer: str) -> bool:
    raise Undecided("the judge is away")


def test_values_are_kept_by_name_and_their_weighted_sum_is_the_reward() -> None:
    parts = [part("correct", returning(True)), part("form", returning(0.5), 0.2), part("length", returning(3), -0.1)]
    verdict = judge_all(parts, ITEM, WORTH)
    assert verdict.reward == pytest.approx(1.0 + 0.1 - 0.3)
    assert (verdict.outcome, verdict.rewards) == (Outcome.RIGHT, {"correct": 1.0, "form": 0.5, "length": 3.0})


@pytest.mark.parametrize(("first", "second", "outcome"), [(True, 0.0, Outcome.RIGHT), (0.4, 9.0, Outcome.WRONG)])
def test_the_first_reward_says_what_is_right(first: float, second: float, outcome: Outcome) -> None:
    """0.4 is below the middle of right (1) and wrong (0), and a sum of 9.4 does not change that."""
    verdict = judge_all([part("a", returning(first), 0.0), part("b", returning(second))], ITEM, WORTH)
    assert (verdict.outcome, verdict.reward) == (outcome, second)


@given(st.lists(st.tuples(st.floats(-10, 10), st.floats(-10, 10) | st.none()), min_size=1, max_size=5))
def test_the_whole_is_decided_exactly_if_every_part_is(drawn: list[tuple[float, float | None]]) -> None:
    parts = [
        part(str(place), raising if value is None else returning(value), weight)
        for place, (weight, value) in enumerate(drawn)
    ]
    verdict = judge_all(parts, ITEM, WORTH)
    undecided = [place for place, (_, value) in enumerate(drawn) if value is None]
    if undecided:
        assert (verdict.outcome, verdict.reward, verdict.rewards) == (Outcome.UNDECIDED, None, {})
        assert verdict.reason == f"{undecided[0]}: the judge is away"
    else:
        assert verdict.reward == pytest.approx(math.fsum(weight * (value or 0.0) for weight, value in drawn), abs=1e-9)
        assert verdict.rewards == {str(place): value for place, (_, value) in enumerate(drawn)}


def test_a_reward_of_other_sources_is_not_asked() -> None:
    parts = [part("code", raising, sources=("programs",)), part("math", returning(False), sources=("sums", "more"))]
    assert judge_all(parts, ITEM, WORTH) == Verdict(Outcome.WRONG, 0.0, rewards={"math": 0.0})
    none = judge_all(parts[:1], ITEM, WORTH)
    assert (none.outcome, none.reason) == (Outcome.UNDECIDED, "no reward judges the completions of source 'sums'")


def test_a_sum_beyond_the_bound_of_rewards_is_undecided() -> None:
    verdict = judge_all([part("a", returning(1e6)), part("b", returning(1e6))], ITEM, WORTH)
    assert (verdict.outcome, verdict.reason) == (
        Outcome.UNDECIDED,
        "the sum of the rewards is 2e+06; it must lie between ±1e+06",
    )


MODULE = """
def form(prompt, completion, answer, level=0):
    return len(completion) + level

def raises(prompt, completion, answer):
    raise ValueError("no digits")
"""


@pytest.fixture
def module(tmp_path: Path) -> str:
    (tmp_path / "rewards_in_parts.py").write_text(MODULE)
    return str(tmp_path)


def test_workers_judge_with_all_rewards_and_a_single_function_has_no_parts(module: str) -> None:
    listed = [
        {"function": "last_number"},
        {"function": "exact_match", "name": "bare", "weight": 0.5},
        {"function": "rewards_in_parts:form", "weight": 0.1},
    ]
    config = RewardsConfig.model_validate({"functions": listed, "path": module})
    items = [ScoreItem("3+8=", "so 11", "11", '{"level": 2}'), ScoreItem("3+8=", "11", "11", '{"level": 2}')]
    assert scored(config, *items) == [
        Verdict(Outcome.RIGHT, 1.0 + 0.1 * 7, rewards={"last_number": 1.0, "bare": 0.0, "form": 7.0}),
        Verdict(Outcome.RIGHT, 1.0 + 0.5 * 1.0 + 0.1 * 4, rewards={"last_number": 1.0, "bare": 1.0, "form": 4.0}),
    ]
    assert scored(RewardsConfig(function="last_number"), *items[:1]) == [Verdict(Outcome.RIGHT, 1.0)]


def test_a_reward_that_raises_leaves_the_completion_undecided_with_its_name(module: str) -> None:
    listed = [{"function": "last_number"}, {"function": "rewards_in_parts:raises", "name": "style", "weight": 0.0}]
    [verdict] = scored(RewardsConfig.model_validate({"functions": listed, "path": module}), ITEM)
    assert (verdict.outcome, verdict.reward, verdict.rewards) == (Outcome.UNDECIDED, None, {})
    assert verdict.reason.startswith("style: the reward raised ValueError in ")


def test_a_function_that_cannot_be_loaded_is_named_with_its_place(module: str) -> None:
    listed = [{"function": "last_number"}, {"function": "rewards_in_parts:from"}]
    with pytest.raises(RewardFunctionError) as caught:
        scored(RewardsConfig.model_validate({"functions": listed, "path": module}), ITEM)
    assert str(caught.value).startswith("rewards.functions.1.function: 'rewards_in_parts' has no 'from'")


Changes = dict[str, object]


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"function": "math", "functions": [{"function": "math"}]}, "give either function ('math') or functions"),
        ({"functions": [{"function": "a:f"}, {"function": "b:f"}]}, "two of the functions are called 'f'"),
        ({"functions": [{"function": "math", "weight": 0.0}]}, "all functions have weight 0"),
        ({"functions": [{"function": "math"}, {"function": "judge"}]}, "needs judge.address and judge.model"),
        ({"functions": [{"function": "code"}], "timeout": 2.0}, "must leave room for code.completion_seconds"),
        ({"functions": [{"function": "math", "name": "a b"}]}, "String should match pattern"),
    ],
)
def test_a_list_that_makes_no_reward_is_refused(section: Changes, words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        RewardsConfig.model_validate(section)
    assert words in str(caught.value)


def test_a_completion_may_take_the_time_of_all_its_rewards() -> None:
    parts = (RewardPart(function="math"), RewardPart(function="code"), RewardPart(function="m:f"))
    assert RewardsConfig(functions=parts).seconds_per_completion == 1.0 + 30.0 + 1.0
    assert RewardsConfig(functions=parts, timeout=40.0).seconds_per_completion == 40.0


@pytest.mark.parametrize(
    ("fields", "has"),
    [('{"level": 3, "topic": "sums"}', "the further fields 'level', 'topic'"), ("", "no further fields")],
)
def test_a_reward_with_a_parameter_that_the_row_lacks_is_undecided_with_the_rows_fields(fields: str, has: str) -> None:
    def graded(prompt: str, completion: str, answer: str, difficulty: int, level: int = 0) -> bool:
        return True

    parts = [part("", cast(RewardFunction, graded))]
    verdict = judge_all(parts, ScoreItem("3+8=", "11", "11", fields), WORTH)
    assert verdict.outcome is Outcome.UNDECIDED
    assert verdict.reason == f"the reward takes 'difficulty', and the row has {has}"
    assert judge_all(parts, ScoreItem("3+8=", "11", "11", '{"difficulty": 2}'), WORTH).reward == 1.0
