"""What a beginner reads first does what it says.

- ``examples/loop.py`` fits on a page and learns; updates interrupt completions, and no token is older than the bound.
- Each example of the verbs learns, is short, and imports of stretto its public names alone; the asynchronous one is
  killed, goes on, and has trained no trajectory twice.
- ``examples/first_run.ipynb`` runs from its first cell to its last within an event loop, as in a kernel, and draws a
  curve; in as many steps as it says its policy comes nearer to the right answers than any single answer is."""

import asyncio
import re
import runpy
import signal
from functools import partial
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
from matplotlib import pyplot as plt

from stretto.store.ledger.reading import read_batches
from tests.api.conftest import script
from tests.launch.running import wait_until

EXAMPLES = Path(__file__).parents[2] / "examples"
#: The most lines of each.
LONGEST = {"loop": 100, "grpo_sync": 50, "grpo_async": 80, "sft": 50, "own_loss": 70, "distill": 80, "tool_agent": 80}
ALWAYS_FOUR = 2.5  #: mean distance to the sums and differences of the notebook


def page(name: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


@pytest.mark.parametrize(("name", "most"), LONGEST.items())
def test_an_example_is_short_and_imports_the_public_names_alone(name: str, most: int) -> None:
    text = (EXAMPLES / f"{name}.py").read_text()
    assert len(text.splitlines()) <= most
    assert re.findall(r"^\s*(?:import|from) (stretto\S*)", text, re.MULTILINE) == ["stretto"]
    assert len(set(re.findall(r"\bstretto\.(\w+)", text))) <= 8  # concepts that its reader has to know


@pytest.mark.parametrize("steps", [10, pytest.param(60, marks=pytest.mark.long)])
def test_the_loop_on_one_page_learns(capsys: pytest.CaptureFixture[str], steps: int) -> None:
    loop = page("loop")
    assert loop["judge"]("3", "456789012345") == 1
    assert loop["judge"]("3", "456789012346") == pytest.approx(11 / 12)
    assert loop["judge"]("3", "4") == pytest.approx(1 / 12)
    rewards, ages = asyncio.run(loop["main"](steps))
    assert len(rewards) == steps
    assert 0 <= min(ages) < max(ages) <= 2
    assert max(rewards[:5]) < 0.25  # guessing: one in ten, and the empty tokens
    assert steps == 10 or min(rewards[-5:]) > 0.4
    several = [int(line.split("; ")[1].split()[0]) for line in capsys.readouterr().out.splitlines()]
    assert len(several) == steps // 10
    assert steps == 10 or sum(several) > 0  # weights arrived in mid-completion


def test_the_synchronous_loop_learns() -> None:
    rewards = page("grpo_sync")["main"](40)
    assert max(rewards[:3]) < 0.25 < 0.4 < min(rewards[-3:])


def test_the_asynchronous_loop_goes_on_from_a_kill_and_trains_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where the process writes what it says
    killed = script(EXAMPLES / "grpo_async.py", tmp_path, "7")
    try:
        wait_until((tmp_path / "checkpoints" / "step-000005").exists, "the checkpoint")
    finally:
        killed.kill()
    assert killed.wait(30) == -signal.SIGKILL
    asyncio.run(page("grpo_async")["main"](tmp_path, 7))
    trained = [
        trajectory.id
        for batch in read_batches(tmp_path / "ledger.sqlite", 0, 7)
        for group in batch.groups
        for trajectory in group.trajectories
    ]
    assert len(trained) == len(set(trained)) == 7 * 8 * 8


def test_supervised_fine_tuning_reproduces_what_was_shown() -> None:
    assert page("sft")["main"](100) == 1


def test_a_loss_of_ones_own_brings_pairs_into_order() -> None:
    assert min(page("own_loss")["main"](20)[-5:]) > 0.9


@pytest.mark.parametrize("steps", [2, pytest.param(30, marks=pytest.mark.long)])
def test_a_student_comes_nearer_to_its_teacher(steps: int) -> None:
    distill = page("distill")
    if steps == 2:  # so is a teacher that knows less
        distill["main"].__globals__["taught"] = partial(distill["taught"], steps=20)
    divergences = distill["main"](steps)
    assert 0 < divergences[-1] < (0.85 if steps == 30 else 1.5) * divergences[0]


@pytest.mark.parametrize("steps", [2, pytest.param(14, marks=pytest.mark.long)])
def test_an_agent_learns_to_listen_to_its_tool(steps: int) -> None:
    rewards = page("tool_agent")["main"](steps)
    assert 0 < max(rewards[:2]) < 0.45
    assert steps == 2 or min(rewards[-2:]) > 0.55


@pytest.mark.parametrize("steps", [4, pytest.param(120, marks=pytest.mark.long)])
def test_the_notebook_goes_from_nothing_to_a_learning_curve(
    inside: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], steps: int
) -> None:
    monkeypatch.syspath_prepend(inside)
    drawn: list[int] = []
    monkeypatch.setattr(plt, "show", lambda: drawn.extend(np.size(line.get_xdata()) for line in plt.gca().lines))
    notebook: Any = nbformat.read(EXAMPLES / "first_run.ipynb", as_version=4)  # type: ignore[no-untyped-call]
    nbformat.validate(notebook)
    cells = [cell.source.replace("steps=120", f"steps={steps}") for cell in notebook.cells if cell.cell_type == "code"]

    async def kernel() -> None:
        names: dict[str, object] = {}
        for cell in cells:
            magic, _, rest = cell.partition("\n")
            if magic.startswith("%%writefile "):
                Path(magic.split()[1]).write_text(rest)
            else:
                exec(cell, names)

    asyncio.run(kernel())
    plt.close()
    assert drawn == [steps]
    told = capsys.readouterr().out
    assert "held-out accuracy: [" in told
    before, after = re.findall(r"^v\d+: off by ([\d.]+), (\d+) different answers", told, re.MULTILINE)
    assert float(before[0]) > ALWAYS_FOUR
    if steps == 120:
        assert float(after[0]) < 1.8
        assert int(after[1]) >= 4
