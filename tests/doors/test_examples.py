"""Promises: the examples of examples/doors have at most 40 lines, stand whole on their pages, pass their trial, and
make a run together that keeps every law."""

import csv
import re
from pathlib import Path

from stretto.launch.recipe.recipe import DOORS, load_recipe
from stretto.store.run_folder import RunFolder
from stretto.store.series.metrics import read_metrics
from stretto_app.extensions.preflight.trial import try_parts
from stretto_report.audit.check import check_run
from stretto_servers.make import launch_of
from tests.launch.running import ROOT, TINY, Laboratory
from tests.launch.running import laboratory as laboratory

EXAMPLES = ROOT / "examples" / "doors"
PAGES = ROOT / "docs" / "how_to" / "doors"
LONGEST = 40
OWN = (
    f"path={EXAMPLES}",
    "algorithm.loss={kind='my_losses:quadratic', width=0.3}",
    "algorithm.correction=my_corrections:between",
    "algorithm.advantages=my_advantages:ranks",
    "rollout.filter=['zero_variance', {kind='my_filters:repeated', shortest=4}]",
    "rollout.pacing=my_pacing:Ramp",
    "logging.to=my_tools:Table",
)
ENGINE = ("engine.kind=my_engine:OnSlurm", "engine.python=/opt/vllm/bin/python", "engine.threads=3")


def test_every_door_has_its_page_with_its_example_of_forty_lines() -> None:
    files = sorted(EXAMPLES.glob("*.py"))
    assert all(len(file.read_text().splitlines()) <= LONGEST for file in files)
    shown = {page.stem: re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL) for page in PAGES.glob("*.md")}
    assert sorted(code for codes in shown.values() for code in codes if code.startswith('"""')) == sorted(
        file.read_text() for file in files
    )
    assert len(files) == len(DOORS) == len(shown) - 1  # and an index
    index = (PAGES / "index.md").read_text()
    assert [door.key for door in DOORS if f"`{door.key}`" not in index] == []


def test_the_examples_pass_their_trial(tmp_path: Path) -> None:
    recipe = load_recipe(TINY, [*OWN, *ENGINE])
    assert try_parts(recipe, outlets=True) == []
    launch = launch_of(recipe.engine, "model", 8000)
    assert launch.command[:5] == ("srun", "--ntasks=1", "--overlap", "--cpus-per-task=3", "/opt/vllm/bin/python")


def test_a_run_of_parts_of_ones_own(laboratory: Laboratory, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    laboratory.trained(run_dir, *OWN, "trainer.steps=3")
    folder = RunFolder(run_dir)
    recorded = load_recipe(folder.recipe)
    assert recorded.path == str(EXAMPLES)
    assert recorded.algorithm.loss.model_dump() == {"kind": "my_losses:quadratic", "anchor": "recomputed", "width": 0.3}
    steps, _ = read_metrics(folder.metrics)
    assert [step.step for step in steps] == [1, 2, 3]
    assert all(step.trainer["clip_fraction"] == 0 for step in steps)  # this loss has no clip
    with (run_dir / "table.csv").open() as file:
        assert [row[2] for row in csv.reader(file) if row[1] == "step"] == ["1", "2", "3"]
    assert check_run(run_dir).kept
