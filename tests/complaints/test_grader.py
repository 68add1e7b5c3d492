"""What users suffered: a grader that hangs, or finds everything wrong, from one completion on
(https://github.com/huggingface/Math-Verify/issues/65; verl#5635, verl#5839, AReaL#1426, verifiers#831).

Promise: what hangs Math-Verify, in a burst of ordinary completions that keeps every worker busy, changes no verdict of
the others and costs no worker. In a gold answer it is undecided: the completion is not to blame. In a completion it is
wrong, since the excess is its own (docs/explanation/decisions/0041): never right, and never undecided, which nobody
would unlearn.
A grader that does hang, of which nobody knows whose fault it is, leaves its completion undecided, and no other."""

import asyncio
from pathlib import Path

import pytest

from benchmarks.verifier import typical
from stretto.core.records import Outcome, Verdict
from stretto.rewards.config import RewardsConfig
from stretto.rewards.service.pool import TIMED_OUT, RewardPool
from stretto.rewards.service.wire import ScoreItem

TOWER = r"\boxed{\dfrac{5^{\left(5^{\left(5^{\left(5^5\right)}\right)} - 4\right)} - 5}{16}}"
NOISE = "{@Neillier 1276915 4951077 ник增高人权 국 {1,1-3-10鼓励不停);5个_GENERAL2全校。 _HEADERS1 Orchestra}"
#: Gold answer and completion: of the second string of the thread, either may be what the model or the data has.
HANGING = {
    ("4951077", TOWER): Outcome.WRONG,
    (TOWER.removeprefix(r"\boxed{").removesuffix("}"), "92.5857658508735"): Outcome.UNDECIDED,
    (TOWER.removeprefix(r"\boxed{").removesuffix("}"), r"\boxed{92.5857658508735}"): Outcome.UNDECIDED,
    ("92.5857658508735", NOISE): Outcome.WRONG,
    ("92.5857658508735", rf"\boxed{{{NOISE}}}"): Outcome.WRONG,
    (NOISE, "92.5857658508735"): Outcome.UNDECIDED,
}
GROUPS = 20  # of eight completions
HANGS = """
def reward(prompt, completion, answer):
    while completion == "hangs":
        pass
    return len(completion) % 2
"""


@pytest.mark.parametrize("groups", [GROUPS, pytest.param(125, marks=pytest.mark.long)])
def test_what_hangs_math_verify_amid_hundreds_of_ordinary_completions_changes_no_verdict_of_them(groups: int) -> None:
    ordinary = typical(groups, seed=7)
    bombs = [ScoreItem(prompt="", completion=completion, answer=gold) for gold, completion in HANGING]

    async def scored() -> tuple[list[list[Verdict]], list[list[Verdict]]]:
        async with RewardPool(RewardsConfig(function="math", workers=2, max_consecutive_undecided=10**6)) as pool:
            quiet, workers = [await pool.score(group) for group in ordinary], pool.pids
            burst = await asyncio.gather(*(pool.score([*group, *bombs]) for group in ordinary))
            assert pool.pids == workers, "none was lost"
            return quiet, list(burst)

    quiet, burst = asyncio.run(asyncio.wait_for(scored(), 300))
    outcomes = [[verdict.outcome for verdict in group] for group in quiet]
    assert [[verdict.outcome for verdict in group[:8]] for group in burst] == outcomes
    right = sum(outcome is Outcome.RIGHT for group in outcomes for outcome in group)
    assert 0.6 <= right / (8 * groups) <= 0.8, "two thirds are right: the ordinary ones are judged at all"
    for group in burst:
        assert [verdict.outcome for verdict in group[8:]] == list(HANGING.values())


def test_a_grader_that_hangs_in_a_burst_leaves_its_own_completion_undecided_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "grader_that_hangs.py").write_text(HANGS)
    ordinary = typical(GROUPS, seed=7)
    bomb = ScoreItem(prompt="", completion="hangs", answer="42")
    settings = {"path": str(tmp_path), "workers": 2, "timeout": 0.3, "max_consecutive_undecided": 9}

    async def scored() -> tuple[list[Verdict], list[list[Verdict]]]:
        async with RewardPool(
            RewardsConfig.model_validate({"function": "grader_that_hangs:reward"} | settings)
        ) as pool:
            groups = [[*group, bomb] if number % 10 == 0 else group for number, group in enumerate(ordinary)]
            burst = await asyncio.gather(*map(pool.score, groups))
            return [group.pop() for group in burst if len(group) > 8], burst

    hung, burst = asyncio.run(asyncio.wait_for(scored(), 100))
    assert [verdict.outcome for verdict in hung] == [Outcome.UNDECIDED] * 2
    assert all(verdict.reason.startswith(TIMED_OUT) for verdict in hung)
    lengths = [[float(len(item.completion) % 2) for item in group] for group in ordinary]
    assert [[verdict.reward for verdict in group] for group in burst] == lengths
