"""Promise: each question of a run has an id of its own, by which an evaluation asks it and a workflow gets its row.

- Sources of one name do not share ids; the ids of every other question are those that its source gives.
- A workflow gets the fields and messages of the question that was drawn, also where rows share prompt and gold answer.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from stretto.core.records import Prompt
from stretto.launch.preflight.plan import Plan, make_plan
from stretto.launch.recipe.recipe import validate
from stretto.rollout.questions import Question, with_own_ids
from stretto_workflows.task import task_of

pytestmark = pytest.mark.usefixtures("untried")
PLAY = {"function": "environment", "settings": {"make": "tests.workflows.guessing:Guessing"}}


def rows_of(path: Path, *rows: tuple[str, str, int]) -> str:
    path.parent.mkdir(exist_ok=True)
    told = [{"prompt": prompt, "answer": answer, "tries": tries} for prompt, answer, tries in rows]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in told))
    return str(path)


def planned(policy: Path, task: dict[str, Any], **sections: Any) -> Plan:
    tree = {"model": {"path": str(policy)}, "task": task, "trainer": {}, "sampling": {"max_tokens": 4}, **sections}
    return make_plan(validate(tree, "recipe.toml"))


def tries(plan: Plan, prompts: tuple[Prompt, ...]) -> list[int]:
    return [task_of(plan.details, prompt, 0, 1).fields["tries"] for prompt in prompts]


def test_held_out_sources_of_one_name_share_no_id(policy: Path, tmp_path: Path) -> None:
    train = rows_of(tmp_path / "train.jsonl", ("1+1=", "2", 0), ("1+2=", "3", 0))
    one = rows_of(tmp_path / "a" / "sums.jsonl", ("2+1=", "3", 0), ("2+2=", "4", 0))
    other = rows_of(tmp_path / "b" / "sums.jsonl", ("3+1=", "4", 0), ("3+2=", "5", 0))
    held_out = [{"data": one}, {"data": other}]
    task = {"kind": "dataset", "sources": [{"data": train}], "held_out_sources": held_out}
    plan = planned(policy, task, evaluation={"sets": [{"name": "again", "source": {"data": one}}]})
    asked = [(prompt.id, prompt.text) for prompt in plan.held_out]
    assert asked == [("sums:1", "2+1="), ("sums:1~2", "3+1="), ("sums:2", "2+2="), ("sums:2~2", "3+2=")]
    assert [prompt.id for prompt in plan.training] == ["train:1", "train:2"]
    assert [prompt.id for _, prompts in plan.sets for prompt in prompts] == ["sums:1", "sums:2"]  # asked apart


def test_a_further_set_that_is_also_trained_on_is_a_warning(policy: Path, tmp_path: Path) -> None:
    rows = [(f"{n}+1=", str(n + 1), 0) for n in range(4)]
    file = rows_of(tmp_path / "rows.jsonl", *rows)
    leaked = rows_of(tmp_path / "set.jsonl", rows[1], ("5+5=", "10", 0))
    task = {"kind": "jsonl", "file": file, "held_out": 1}
    sets = [{"name": "leaked", "source": {"data": leaked}}, {"name": "own", "source": {"data": file}}]
    [told] = [note for note in planned(policy, task, evaluation={"sets": sets}).notes if "evaluation.sets" in note]
    assert told.endswith(f"also trained on, which biases their accuracy: 1; the first is {leaked}:1, as in {file}:2")


def test_a_workflow_gets_the_row_that_was_drawn(policy: Path, tmp_path: Path) -> None:
    rows = [("1+1=", "2", level) for level in range(6)]
    task = {"kind": "jsonl", "file": rows_of(tmp_path / "rows.jsonl", *rows), "held_out": 2}
    plan = planned(policy, task, workflow=PLAY)
    assert (tries(plan, plan.training), tries(plan, plan.held_out)) == ([0, 1, 2, 3], [4, 5])


def test_rows_of_one_number_in_two_files_stay_apart(policy: Path, tmp_path: Path) -> None:
    training = rows_of(tmp_path / "rows.jsonl", ("1+1=", "2", 1), ("1+2=", "3", 2), ("1+3=", "4", 3))
    held_out = rows_of(tmp_path / "others.jsonl", ("1+1=", "2", 4), ("2+2=", "4", 5), ("1+3=", "4", 3))
    task = {"kind": "jsonl", "file": training, "held_out_file": held_out}
    plan = planned(policy, task, workflow=PLAY)
    assert (tries(plan, plan.training), tries(plan, plan.held_out)) == ([1, 2, 3], [4, 5, 3])
    assert [prompt.id for prompt in plan.training] == ["1", "2", "3"]
    assert [prompt.id for prompt in plan.held_out] == ["1~2", "2", "3"]  # only the first could be mistaken
    assert [prompt.id for prompt in planned(policy, task).held_out] == [
        "1",
        "2",
        "3",
    ]  # no workflow, nothing to mistake


def test_a_new_id_is_never_one_that_a_question_has() -> None:
    rows = [Question(id, f"{at}=", "1") for at, id in enumerate(["a", "a~2", "a", "a", "b"])]
    [found] = with_own_ids([rows], apart=True)
    assert [one.id for one in found] == ["a", "a~2", "a~3", "a~4", "b"]
    [late] = with_own_ids([[rows[0], rows[2], rows[1]]], apart=True)
    assert [one.id for one in late] == ["a", "a~2", "a~2~2"]
