"""The best policy of a run, and the end of a run whose accuracy no longer grows.

- policy/best is the policy of the step whose evaluation was best, even if its own folder is removed meanwhile.
- A run ends after a number of evaluations in a row that were not better; a resumed run remembers those before it.
- Evaluations start every few steps or minutes, and one set never twice at once.
"""

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from stretto.core.records import Update
from stretto.loop.evaluation import BestPolicy, Evaluations, PeriodicEvaluation
from stretto.loop.records.evaluation import Evaluation
from stretto.loop.records.recorder import Recorder
from stretto.store.run_folder import RunFolder
from tests.store.lines import evaluation_line


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    with RunFolder.create(tmp_path / "run") as run:
        yield run


def policy(folder: RunFolder, version: int) -> None:
    folder.policy(version).mkdir()
    (folder.policy(version) / "weights").write_text(f"weights {version}")


def measured(accuracy: float, version: int = 0) -> Evaluation:
    return Evaluation(version=version, prompts=100, right=round(100 * accuracy), undecided=0, tokens=100)


def best_weights(folder: RunFolder) -> str:
    return (folder.policies / "best" / "weights").read_text()


def evaluate(best: BestPolicy, folder: RunFolder, step: int, accuracy: float) -> None:
    policy(folder, step)
    best.hold(step)
    shutil.rmtree(folder.policy(step))  # as the oldest are, beyond trainer.keep_versions
    best.measured(step, measured(accuracy, step + 1))


def test_the_policy_of_the_best_evaluation_is_kept(folder: RunFolder) -> None:
    best = BestPolicy(folder, print, keeps=True)
    for step, accuracy, kept in [(0, 0.1, 0), (5, 0.4, 5), (10, 0.3, 5), (15, 0.4, 5), (20, 0.5, 20)]:
        evaluate(best, folder, step, accuracy)
        assert best_weights(folder) == f"weights {kept}"
    found = json.loads((folder.path / "best.json").read_text())
    assert found == {"step": 20, "version": 21, "accuracy": 0.5, "policy": "policy/best"}
    assert not (folder.policies / "candidate").exists()


def test_a_copy_that_is_left_of_a_policy_which_was_trained_again_is_not_taken_for_it(folder: RunFolder) -> None:
    """After a loss of power the ledger may end before a step whose policy was held."""
    policy(folder, 5)
    BestPolicy(folder, print, keeps=True).hold(5)
    shutil.rmtree(folder.policy(5))
    best = BestPolicy(folder, print, keeps=True)
    policy(folder, 5)
    (folder.policy(5) / "weights").write_text("other weights")
    best.hold(5)
    best.measured(5, measured(0.5, 5))
    assert best_weights(folder) == "other weights"


def test_a_run_ends_after_so_many_evaluations_that_were_not_better(folder: RunFolder) -> None:
    said: list[str] = []
    best = BestPolicy(folder, said.append, keeps=False, patience=2, least_gain=0.05)
    enough = []
    for step, accuracy in enumerate([0.1, 0.14, 0.2, 0.24, 0.25, 0.1]):
        best.measured(step, measured(accuracy))
        enough.append(best.enough)
    assert enough == [False, False, False, False, True, True]
    assert said == ["stops early: 2 evaluations in a row were not better than 0.2000 at step 2 (evaluation.patience)"]
    assert json.loads((folder.path / "best.json").read_text())["policy"] is None


def test_a_run_ends_when_its_goal_is_reached_and_holds(folder: RunFolder) -> None:
    said: list[str] = []
    best = BestPolicy(folder, said.append, keeps=False, goal=0.9, goal_holds=2)
    enough = []
    for step, accuracy in enumerate([0.9, 0.8, 0.91, 0.95, 0.1]):
        best.measured(step, measured(accuracy))
        enough.append(best.enough)
    assert enough == [False, False, False, True, True]
    assert said == ["stops early: accuracy 0.9 reached in 2 evaluations in a row (evaluation.goal)"]
    lines = [evaluation_line(step, accuracy) for step, accuracy in ((2, 0.91), (3, 0.95), (4, 0.1))]
    assert BestPolicy(folder, print, keeps=False, goal=0.9, goal_holds=2, earlier=lines).enough
    assert not BestPolicy(folder, print, keeps=False, goal=0.93, goal_holds=2, earlier=lines).enough
    assert not BestPolicy(folder, print, keeps=False, earlier=lines).enough


def test_a_resumed_run_remembers_and_drops_what_it_will_do_again(folder: RunFolder) -> None:
    first = BestPolicy(folder, print, keeps=True)
    evaluate(first, folder, 4, 0.5)
    evaluate(first, folder, 8, 0.9)
    lines = [evaluation_line(step, accuracy) for step, accuracy in ((4, 0.5), (8, 0.9))]
    again = BestPolicy(folder, print, keeps=True, patience=1, earlier=lines)
    again.measured(12, measured(0.7))
    assert again.enough
    assert best_weights(folder) == "weights 8"
    BestPolicy(folder, print, keeps=True, earlier=lines[:1])  # step 8 is done again
    assert not (folder.policies / "best").exists()
    assert not (folder.path / "best.json").exists()


class Desk:
    """Counts what is recorded."""

    def __init__(self) -> None:
        self.evaluated_at: list[tuple[str, int]] = []

    def evaluated(self, evaluation: Evaluation, step: int, name: str = "", asked: str = "") -> None:
        self.evaluated_at.append((name, step))

    def spans(self, spans: object) -> None: ...


def update(step: int) -> Update:
    return Update(step=step, version=step, trained_tokens=1, masked_tokens=0, metrics={})


async def test_each_set_is_evaluated_after_its_own_steps_or_minutes() -> None:
    desk = Desk()
    seconds = 0.05

    async def evaluation() -> Evaluation:
        return measured(0.5)

    recorder = cast(Recorder, desk)
    every_second = PeriodicEvaluation(evaluation, recorder, 2)
    both = Evaluations([every_second, PeriodicEvaluation(evaluation, recorder, 0, seconds / 60, "timed")])
    await both.evaluate(0)
    for step in (1, 2, 3):
        both.after(update(step))
        await both.end()
    await asyncio.sleep(2 * seconds)
    both.after(update(5))
    await both.end()
    assert [at for at in desk.evaluated_at if at[0] == ""] == [("", 0), ("", 2)]
    assert desk.evaluated_at[:2] == [("", 0), ("timed", 0)]
    assert ("timed", 5) in desk.evaluated_at


async def test_an_evaluation_that_is_due_while_one_runs_is_left_out() -> None:
    desk, open_door = Desk(), asyncio.Event()

    async def slow() -> Evaluation:
        await open_door.wait()
        return measured(0.5)

    one = PeriodicEvaluation(slow, cast(Recorder, desk), 1)
    one.after(update(1))
    await asyncio.sleep(0)
    one.after(update(2))
    open_door.set()
    await one.end()
    one.after(update(3))
    await one.end()
    assert desk.evaluated_at == [("", 1), ("", 3)]


def test_an_evaluation_on_record_whose_policy_was_not_yet_kept_is_shown_after_a_resume(folder: RunFolder) -> None:
    """A kill came between its line and ``best.json``; its policy's own folder is gone, or still there."""
    for gone in (True, False):
        evaluate(BestPolicy(folder, print, keeps=True), folder, 0, 0.1)
        cut = BestPolicy(folder, print, keeps=True, earlier=[evaluation_line(0, 0.1)])
        policy(folder, 4)
        if gone:
            cut.hold(4)
            shutil.rmtree(folder.policy(4))
        again = BestPolicy(folder, print, keeps=True, earlier=[evaluation_line(0, 0.1), evaluation_line(4, 0.9)])
        evaluate(again, folder, 8, 0.8)
        assert best_weights(folder) == "weights 4"
        assert json.loads((folder.path / "best.json").read_text())["accuracy"] == 0.9
        shutil.rmtree(folder.policy(4), ignore_errors=True)


def test_policies_that_are_kept_compete_where_the_best_of_all_was_not(folder: RunFolder) -> None:
    """``keep_best`` is given with a resume."""
    best = BestPolicy(folder, print, keeps=True, earlier=[evaluation_line(0, 0.1), evaluation_line(4, 0.9)])
    for step, accuracy, kept in [(8, 0.8, 8), (12, 0.85, 12), (16, 0.82, 12)]:
        evaluate(best, folder, step, accuracy)
        assert best_weights(folder) == f"weights {kept}"


def test_the_best_policy_of_another_set_is_dropped(folder: RunFolder) -> None:
    """``best_of`` is another with a resume."""
    evaluate(BestPolicy(folder, print, keeps=True), folder, 4, 0.3)
    again = BestPolicy(folder, print, keeps=True, earlier=[evaluation_line(0, 0.2), evaluation_line(4, 0.6)])
    assert not (folder.path / "best.json").exists()
    evaluate(again, folder, 8, 0.5)
    assert best_weights(folder) == "weights 8"


async def test_a_step_is_evaluated_once_and_one_that_was_cut_short_is_caught_up() -> None:
    desk = Desk()

    async def evaluation() -> Evaluation:
        return measured(0.5)

    both = Evaluations([PeriodicEvaluation(evaluation, cast(Recorder, desk), 3, earlier=[evaluation_line(0, 0.1)])])
    await both.evaluate(0)
    for version in (2, 4, 5):  # step 3 was due, and has no line
        both.catch_up(version)
        await both.end()
    assert desk.evaluated_at == [("", 3)]
