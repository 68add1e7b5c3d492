"""Promises of the paper's runs as recipes:

- `--dry-run` checks each against its model's config.json, and says the memory of a device on both sides;
- models have the parameters that their weights have; three quarters of the devices generate;
- the planner takes a recipe as it is."""

import re
from pathlib import Path

import pytest

from stretto.launch.preflight.questions import Sifted
from stretto.launch.recipe.recipe import load_recipe
from stretto_app.extensions.commands.plan import job_of
from stretto_app.extensions.preflight import paper
from stretto_app.extensions.preflight.dry_run import check
from stretto_foresight.planner.costs import Costs, Layout
from stretto_foresight.planner.layouts import own_layout
from stretto_foresight.planner.machine import machine_of

PAPER = Path(__file__).parents[2] / "recipes" / "paper"
NODES = {"math_1.5b": 16, "math_7b": 24, "math_14b": 32, "math_32b": 48, "code_14b": 32}
TENSOR = {"1.5b": 1, "7b": 1, "14b": 2, "32b": 4}
PARAMETERS = {"1.5b": 1_777_088_000, "7b": 7_615_616_512, "14b": 14_770_033_664, "32b": 32_763_876_352}


@pytest.fixture
def judged_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """No reward and no reader of gold answers are tried, which takes seconds: those of mathematics are in the dry run
    of the memory, those of programs in the long one below."""
    monkeypatch.setattr(paper, "try_reward", lambda config, questions, completions: [])
    monkeypatch.setattr(paper, "sift", lambda config, questions: Sifted(questions))


@pytest.mark.parametrize("name", NODES)
def test_three_quarters_of_the_nodes_generate(name: str) -> None:
    """With the batch, the answers, the bound and the optimizer of table 3."""
    recipe = load_recipe(PAPER / f"{name}.toml")
    assert recipe.rollout.batch_size * recipe.rollout.group_size == 8192
    assert recipe.rollout.max_staleness == (4 if name.startswith("code") else 8)
    assert (recipe.trainer.learning_rate, recipe.trainer.minibatches, recipe.sampling.max_tokens) == (2e-5, 4, 27_648)
    assert recipe.trainer.ranks == NODES[name] * 8 // 4
    layout = Layout(recipe.engine.count, recipe.trainer.ranks, TENSOR[name.partition("_")[2]])
    assert layout.devices == NODES[name] * 8


def test_a_dry_run_counts_heads_that_devices_share_as_often_as_they_are_kept(
    capsys: pytest.CaptureFixture[str], judged_by_others: None
) -> None:
    """28 layers of 2 heads of 128 numbers, keys and values in bfloat16, are 28 KiB a token; each of 4 devices has one
    of the heads, which is on two of them."""
    check(PAPER / "math_1.5b.toml", ["rewards.workers=1", 'engine.arguments=["--tp-size","4"]'])
    assert f"and {28 / 2 / 1024:.3f} MiB for each token in the KV cache" in capsys.readouterr().out


def test_the_folder_has_no_others() -> None:
    assert {path.stem for path in PAPER.glob("*.toml")} == NODES.keys()


def test_a_dry_run_says_the_memory_of_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    """32 ranks: 16 bytes of 1.777e9 parameters are 0.83 GiB each; the weights in bfloat16 are 3.3 GiB."""
    check(PAPER / "math_1.5b.toml", ["rewards.workers=1"])
    told = capsys.readouterr().out
    assert "per device  32 ranks of " in told
    assert len(re.findall(r"GiB, most of it \w+ \(", told)) == 1, "what fills a rank's memory is said once"
    assert "96 engines of 1, 3.3 GiB of weights on each" in told
    assert "nothing was started" in told


@pytest.mark.long
def test_the_reward_of_programs_is_tried_too(capsys: pytest.CaptureFixture[str]) -> None:
    check(PAPER / "code_14b.toml", ["rewards.workers=1"])
    assert "nothing was started" in capsys.readouterr().out


@pytest.mark.parametrize("name", NODES)
def test_the_planner_takes_a_recipe_as_it_is(name: str, judged_by_others: None) -> None:
    """Devices are those of its nodes, and the memory of an H100 suffices."""
    job = job_of(PAPER / f"{name}.toml", ["rewards.workers=1"], None, lambda text: None)
    layout = own_layout(job)
    assert job.shape.parameters == PARAMETERS[name.partition("_")[2]]
    assert layout.devices == NODES[name] * 8
    assert Costs(job, machine_of("h100"), layout).memory().missing < 0
