"""The recipe of a real pretrained model, without the model.

Promises: its questions are sums with their right answers, and no held-out pair of numbers is trained on; another model
and another device are overrides of the same file.
"""

import json
import re
from pathlib import Path

from stretto.launch.recipe.recipe import load_recipe
from stretto.rollout.questions import Question

RECIPE = Path(__file__).parents[2] / "recipes" / "smollm2.toml"


def pair(question: Question) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", question.text.split("\n")[-1]))


def test_the_sums_are_right_and_the_held_out_pairs_are_never_trained_on() -> None:
    found = load_recipe(RECIPE).task.questions(seed=1)
    assert (len(found.training), len(found.held_out)) == (336, 96)
    for question in (*found.training, *found.held_out):
        assert sum(pair(question)) == int(question.answer), question
    assert not {pair(question) for question in found.training} & {pair(question) for question in found.held_out}


def test_another_model_task_and_device_are_overrides(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}?", "answer": n} for n in range(128)]
    (tmp_path / "mine.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    told = [f"model.path={tmp_path}", f"task.file={tmp_path}/mine.jsonl", "engine.device=cuda", "trainer.device=cuda"]
    recipe = load_recipe(RECIPE, [*told, "sampling.max_tokens=512", "trainer.micro_batch_tokens=8192"])
    assert (recipe.model.path, recipe.engine.device, recipe.trainer.device) == (str(tmp_path), "cuda", "cuda")
    assert len(recipe.task.questions(seed=1).training) == 32
