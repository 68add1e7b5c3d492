"""Accuracies are compared if they are answers to the same: the same prompts, completions of each, and seed.

- A resumed run may ask something else. Then the best policy, `patience` and `goal` go by the evaluations that asked
  what it asks now, whatever the others came to; so do the alarm of a falling accuracy and the initial accuracy.
- An old line does not tell its prompts and its seed: there their numbers decide.
"""

import asyncio
import tempfile
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.records import Prompt, Sampling
from stretto.launch.assemble.evaluations import evaluations
from stretto.launch.preflight.plan import Plan
from stretto.launch.recipe.sections import EvaluationConfig
from stretto.loop.evaluation import Evaluations, Evaluator
from stretto.loop.records.evaluation import Evaluation
from stretto.store.run_folder import RunFolder
from stretto.store.series.metrics import EvaluationLine, alike, read_evaluations
from stretto_report.audit.evidence import fallen
from tests.loop.desk import Desk
from tests.store.lines import evaluation_line
from tests.store.make import ledger_at

PROMPTS = [Prompt(id=str(at), token_ids=(at,), text="", answer=str(at)) for at in range(4)]
#: Prompts, completions of each, and seed.
ASKED = st.tuples(st.sampled_from([PROMPTS[:2], PROMPTS[2:], PROMPTS]), st.integers(1, 2), st.integers(0, 1))
#: What the processes of a run ask, and the accuracies that they find, in tenths.
PROCESSES = st.lists(st.tuples(ASKED, st.lists(st.integers(0, 10), max_size=4)), min_size=1, max_size=5)
LEAST = 0.05


def begun(folder: RunFolder, desk: Desk, asked: Any, patience: int, goal: float) -> Evaluations:
    """The evaluations of a process of the run."""
    prompts, samples, seed = asked
    config = EvaluationConfig(samples=samples, seed=seed, patience=patience, goal=goal, every=1, least_gain=LEAST)
    recipe = SimpleNamespace(evaluation=config, rewards=SimpleNamespace(deciding=""))
    nobody = cast(Any, None)
    held_out = Evaluator(prompts, Sampling(max_tokens=4), seed, nobody, nobody, nobody)
    plan = cast(Plan, SimpleNamespace(recipe=recipe, sets=()))
    return evaluations(plan, folder, held_out, desk.recorder, lambda sentence: None)


async def evaluated(process: Evaluations, step: int, asked: Any, right: int) -> None:
    async def found() -> Evaluation:
        prompts, samples, _ = asked
        share = right / 10 * len(prompts) * samples  # no whole number: an accuracy of tenths for any number of prompts
        return Evaluation(step, len(prompts), cast(int, share), undecided=0, tokens=1, per_prompt=samples)

    (one,) = process._all
    one._evaluate = found
    await process.evaluate(step)


@given(PROCESSES, st.integers(1, 3), st.sampled_from([0.5, 0.8]))
def test_a_run_goes_by_evaluations_that_asked_what_it_asks(
    processes: list[tuple[Any, list[int]]], patience: int, goal: float
) -> None:
    step, found = 0, list[tuple[Any, float]]()
    shared = tempfile.TemporaryDirectory(dir="/dev/shm")  # a disk would take milliseconds for each commit
    with shared as name, RunFolder.create(Path(name) / "run") as folder:
        for asked, accuracies in processes:
            with ledger_at(folder.ledger) as ledger:
                desk = Desk(folder, ledger)
                process = begun(folder, desk, asked, patience, goal)
                for right in accuracies:
                    asyncio.run(evaluated(process, step, asked, right))
                    found.append((asked, right / 10))
                    step += 1
                same = [accuracy for other, accuracy in found if other == asked]
                assert bool(process.why) == has_enough(same, patience, goal)
                if accuracies and found[0][0] == found[-1][0]:
                    assert desk.recorder.initial_accuracy == pytest.approx(found[0][1])
                elif accuracies:
                    assert desk.recorder.initial_accuracy is None
        lines = read_evaluations(folder.metrics).get("", [])
        assert [line.accuracy for line in alike(lines)] == pytest.approx([a for o, a in found if o == found[-1][0]])


def has_enough(accuracies: list[float], patience: int, goal: float) -> bool:
    """By hand, of the accuracies of one evaluation: reached twice in a row at some time, or no longer better."""
    if any(min(pair) >= goal - 1e-9 for pair in pairwise(accuracies)):
        return True
    best, since = -1.0, 0
    for accuracy in accuracies:
        best, since = (accuracy, 0) if accuracy > best + LEAST or best < 0 else (best, since + 1)
    return since >= patience


OLD = evaluation_line(0, 0.9)


@pytest.mark.parametrize(
    ("one", "other", "comparable"),
    [
        (OLD, OLD, True),
        (OLD, msgspec.structs.replace(OLD, samples=512), True),
        (OLD, msgspec.structs.replace(OLD, samples=1024), False),
        (OLD, msgspec.structs.replace(OLD, prompts=500), False),
        (OLD, msgspec.structs.replace(OLD, asked="a"), True),
        (msgspec.structs.replace(OLD, asked="b"), msgspec.structs.replace(OLD, asked="a"), False),
    ],
)
def test_where_lines_tell_less_numbers_decide(one: EvaluationLine, other: EvaluationLine, comparable: bool) -> None:
    for first, last in ((one, other), (other, one)):
        assert (first in alike([first, last])) == comparable


@pytest.mark.parametrize("changed", [{"prompts": 400}, {"samples": 1024}, {"asked": "b"}])
def test_an_accuracy_over_other_questions_has_not_fallen(changed: dict[str, Any]) -> None:
    before = msgspec.structs.replace(OLD, asked="a")
    after = msgspec.structs.replace(before, step=8, accuracy=0.2)
    assert fallen([before, after]) == (before, after)
    other = msgspec.structs.replace(after, **changed)
    assert fallen([before, other]) is None
    again = msgspec.structs.replace(other, step=9, accuracy=0.01)
    assert fallen([before, other, again]) == (other, again)
