"""Promises of `stretto plan`:

- a recipe and a model's config.json give the layouts as JSON with the keys that others read, best first;
- the lengths are those of the demonstrations, those that a user names, or an assumption that is said;
- the plan of a recipe's own layout goes into the folder of a run, begun or not; a run of another recipe refuses it;
- mistakes are refused with what is allowed."""

import json
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from stretto.core.errors import RunFolderError, UserError
from stretto.launch.recipe.recipe import load_recipe, to_toml
from stretto.launch.recorded import record_recipe
from stretto.store.config import StoreConfig
from stretto.store.ledger.ledger import Ledger
from stretto.store.run_folder import RunFolder
from stretto_app.extensions.commands.machine_choice import PlanChoice
from stretto_app.extensions.commands.plan import as_json, job_of, plan_recipe, rank_share, table
from stretto_app.extensions.commands.plan_picture import draw
from stretto_foresight.planner import predict
from stretto_foresight.planner.machine import machine_of
from stretto_foresight.planner.predict import RunPlan

ROOT = Path(__file__).parents[2]
GPUS = ROOT / "recipes" / "sglang_8gpu.toml"
MODEL = f"model.path={ROOT / 'tests' / 'data' / 'models' / 'qwen2.5_7b'}"
SMALL = [MODEL, "trainer.steps=3", "rollout.batch_size=4", "rollout.group_size=4", "rollout.max_in_flight=8"]


def test_a_config_is_enough_for_the_best_layouts(tmp_path: Path) -> None:
    said: list[str] = []
    choice = PlanChoice("h100", gpus=8, nodes=1, network="400gbit", lengths="lognormal:mean=200,sigma=0.5")
    found = plan_recipe(GPUS, SMALL, choice, said.append)
    layouts = json.loads(as_json(found))["layouts"]
    keys = {"engines", "ranks", "step_seconds", "busy", "staleness", "tokens_per_second", "memory_gib", "hours"}
    assert len(layouts) > 1
    assert all(keys <= layout.keys() and layout["staleness"].keys() == {"mean", "p99"} for layout in layouts)
    assert [one["hours"] for one in layouts] == sorted(one["hours"] for one in layouts)
    assert all(line.startswith("simulating ") for line in said[:-1]), said
    assert said[-1].startswith(
        "warning: most of this is what the profile h100 assumes for any model, 2 s of each train"
    )
    shown = table(found).splitlines()
    assert len(shown) == 4 + len(layouts)
    assert [line for line in shown if line.startswith("eta: rollout.max_staleness, ")] == [shown[-2]]
    assert "the second takes" in shown[-1]
    draw(found, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert rank_share(found.layouts[0]) == layouts[0]["ranks"] / 8
    with pytest.raises(RunFolderError, match=r"--picture .*: cannot be written: No such file"):
        draw(found, tmp_path / "nowhere" / "plan.png")


def test_what_is_assumed_is_said() -> None:
    said: list[str] = []
    job = job_of(GPUS, SMALL, None, said.append)
    assert job.lengths.mean < 2048 / 3
    assert "log-normal with a mean of 683 tokens is assumed" in said[0]
    assert (job.shape.heads, job.shape.kv_heads, job.shape.parameters) == (28, 4, 7_615_616_512)


PACES = """
import time

class Paces:
    def __init__(self, *, calls: int):
        self.left = calls

    def opens(self, may_start, in_flight):
        self.left -= 1
        until = time.monotonic() + 3
        while not self.left and time.monotonic() < until:
            pass
        return may_start
"""


def test_a_pacing_that_does_not_return_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "endless.py").write_text(PACES)
    monkeypatch.setattr(predict, "_PACED", 0.5)
    choice = PlanChoice("h100", gpus=8, nodes=1, network="400gbit", lengths="lognormal:mean=200,sigma=0.5")

    def planned(calls: int) -> RunPlan:
        own = (f"path={tmp_path}", f"rollout.pacing={{kind='endless:Paces', calls={calls}}}")
        return plan_recipe(GPUS, [*SMALL, *own], choice, print)

    assert planned(1_000_000).layouts == plan_recipe(GPUS, SMALL, choice, print).layouts
    with pytest.raises(UserError, match=r"rollout\.pacing: 'endless:Paces' has not returned from a call in 0\.5 s"):
        planned(40)


def test_the_lengths_of_a_warm_start_are_those_of_its_demonstrations() -> None:
    """Demonstrations of the arithmetic recipe are chains such as ``7-5+7=2+7=9``, and an end token."""
    said: list[str] = []
    few = ["task.demonstrations=200", "task.prompts=50", "task.held_out=8", "evaluation.prompts=8"]
    assert 5 < job_of(ROOT / "recipes" / "arithmetic.toml", few, None, said.append).lengths.mean < 60
    assert "demonstrations" in said[0]


def test_a_reference_policy_and_a_critic_are_planned_for() -> None:
    """With adapters the reference is the policy without them, which is no second model and a pass more all the same."""

    def planned(*overrides: str) -> tuple[str, bool, bool]:
        job = job_of(GPUS, [*SMALL, *overrides], "constant:tokens=8", lambda text: None)
        return job.refers, job.reference is not None, job.critic

    assert planned() == ("", False, False)
    assert planned('algorithm.reference={into="reward"}') == ("reward", True, False)
    native = ["engine.kind=native", "engine.addresses=[]", "trainer.lora={rank=4}"]
    assert planned("algorithm.reference={}", *native) == ("loss", False, False)
    assert planned('algorithm.advantages={kind="gae", critic={}}')[2]


@pytest.mark.parametrize("change", ["train_flops=0", "decode_flops=-1", "cores=-2"])
def test_a_machine_of_impossible_numbers_is_refused(tmp_path: Path, change: str) -> None:
    name, number = change.split("=")
    facts = msgspec.to_builtins(machine_of("h100")) | {name: float(number)}
    path = tmp_path / "machine.json"
    path.write_bytes(msgspec.json.encode(facts))
    with pytest.raises(UserError, match=f"is not a machine: Expected `float` >=? 0.*{name}`; measure a machine with"):
        machine_of(str(path))


def test_a_machine_whose_name_no_file_can_have_is_refused() -> None:
    with pytest.raises(UserError, match="no such file, and no machine of this name has a profile"):
        machine_of("h" * 300)


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        (PlanChoice("h100", goal="speed"), "--goal speed: no such goal"),
        (PlanChoice("b100", gpus=8), "did you mean 'a100'|did you mean 'h100'"),
        (PlanChoice("h100", gpus=1), "at least 2"),
        (PlanChoice("h100", gpus=8, nodes=3), "8 GPUs cannot be shared out to 3 nodes"),
        (PlanChoice("h100", gpus=8, network="fast"), "such as 400gbit"),
        (PlanChoice("h100", gpus=8, run=Path("to_come")), "not a run; plan the recipe without --gpus"),
    ],
)
def test_a_mistake_is_refused(choice: PlanChoice, said: str) -> None:
    with pytest.raises(UserError, match=said):
        plan_recipe(GPUS, SMALL, choice, lambda text: None)


OWN = [*SMALL, "trainer.ranks=2", "trainer.activation_checkpointing=true"]


def planned(run: Path, *changes: str) -> str | None:
    choice, said = PlanChoice("h200", lengths="constant:tokens=100", run=run), list[str]()
    found = plan_recipe(GPUS, [*OWN, *changes], choice, said.append).recipe
    assert said == [f"the prediction is in {run}/prediction.json; `stretto inspect {run}` shows it beside the run"]
    return found


def test_a_plan_is_the_prediction_of_a_run_of_its_recipe_alone(tmp_path: Path) -> None:
    """A longer run, or one that is evaluated more often, has the same steps; one with another bound has not."""
    run = tmp_path / "run"
    digest = planned(run)
    saved = json.loads((run / "prediction.json").read_bytes())
    assert saved["recipe"] == digest
    assert saved["layouts"][0]["terms"]["step_seconds"] == saved["layouts"][0]["step_seconds"]
    with RunFolder.create(run) as folder:  # the prediction does not make the folder somebody else's
        recipe = load_recipe(GPUS, OWN)
        folder.write("recipe.toml", to_toml(recipe))
        with closing(Ledger(folder.ledger, StoreConfig())) as ledger:
            record_recipe(ledger, recipe)
    assert planned(run, "trainer.steps=4000", "evaluation.every=7") == digest
    with pytest.raises(RunFolderError, match=rf"another recipe \(digest \w+\) than the run's \(digest {digest}\)"):
        planned(run, "rollout.max_staleness=1")
