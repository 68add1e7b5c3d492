"""What a beginner reads first does what it says.

- ``examples/loop.py`` fits on a page and learns; updates interrupt completions, and no token is older than the bound.
- ``examples/first_run.ipynb`` runs from its first cell to its last within an event loop, as in a kernel, and draws a
  curve; in as many steps as it says its policy comes nearer to the right answers than any single answer is.
"""

from __future__ import annotations

import asyncio
import re
import runpy
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
from matplotlib import pyplot as plt

EXAMPLES = Path(__file__).parents[2] / "examples"
LONGEST_PAGE = 150
ALWAYS_FOUR = 2.5  #: mean distance to the sums and differences of the notebook


def test_the_loop_on_one_page_learns(capsys: pytest.CaptureFixture[str]) -> None:
    assert len((EXAMPLES / "loop.py").read_text().splitlines()) <= LONGEST_PAGE
    page = runpy.run_path(str(EXAMPLES / "loop.py"))
    assert page["judge"]("3", "456789012345") == 1
    assert page["judge"]("3", "456789012346") == pytest.approx(11 / 12)
    assert page["judge"]("3", "4") == pytest.approx(1 / 12)
    rewards, counts = asyncio.run(page["main"](60))
    assert len(rewards) == 60
    assert counts.trained == 60 * 8 * 8  # steps x groups x completions
    assert counts.trained <= counts.issued <= (60 + 1 + 2) * 8 * 8  # equation 3, at the last version
    assert max(rewards[:5]) < 0.25  # guessing: one in ten, and the empty tokens
    assert min(rewards[-5:]) > 0.4
    several = [int(line.split("; ")[1].split()[0]) for line in capsys.readouterr().out.splitlines()]
    assert len(several) == 6
    assert sum(several) > 0  # weights arrived in mid-completion


@pytest.mark.parametrize("steps", [20, pytest.param(120, marks=pytest.mark.long)])
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
