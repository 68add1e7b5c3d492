"""`stretto study`: train the runs of a study file, and write table, JSON and picture."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from stretto.core.errors import Problem, RecipeError, nearest, several
from stretto.processes.stopping import until_cut_short
from stretto.store.files import write_atomically
from stretto_app.study.conduct import TrainProcesses, conduct
from stretto_app.study.definition import load_study
from stretto_app.study.folder import StudyFolder
from stretto_app.study.picture import draw
from stretto_app.study.summary import StudyResult, summarise, table

SHIPPED = Path(__file__).parent / "shipped"


def perform(
    study: str,
    out: Path | None,
    seeds: int | None = None,
    steps: int | None = None,
    jobs: int | None = None,
    runner: Callable[[StudyFolder], TrainProcesses] = TrainProcesses,
) -> tuple[StudyResult, int]:
    """Train the remaining runs of a study, `jobs` at the same time, and write its results into its folder. Return them
    with the exit code: 0, 1 if runs have failed, or 128 + the signal that stopped the study.

    `study`: file or name. `out`: folder of the study; None: ``studies/NAME``. `seeds`, `steps`: replace those of the
    file, unless None. `jobs`: None: as many as the machine can run. `runner`: makes what trains a run.

    Raises:
        UserError: the study or its folder is wrong; lists every mistake.
        SystemExit: with 130 after a second signal; the current runs have been ended.
    """
    path = find_study(study)
    loaded = load_study(path, seeds, steps)
    with StudyFolder.take(out or Path("studies") / loaded.name, loaded) as folder:
        _say(f"{several(len(loaded.cells), 'cell')}, {several(len(loaded.runs), 'run')} in {folder.path}")
        progress = until_cut_short(conduct(loaded, folder, runner(folder), _say, jobs))
        result = summarise(loaded, progress)
        write_atomically(folder.results, msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
        write_atomically(folder.table, table(result).encode())
        draw(folder.plot, result)
        for file in (folder.table, folder.results, folder.plot):
            _say(f"written to {file}")
    return result, progress.exit_code


def find_study(study: str) -> Path:
    """Path of a study, given as a file or as the name of a built-in study. A folder of this name is no file; a path
    that ends with ``.toml`` need not exist.

    Raises:
        RecipeError: it is not a file, and no built-in study has this name.
    """
    path = Path(study)
    if path.suffix == ".toml" or os.path.isfile(path):
        return path
    names = {file.stem: file for file in (SHIPPED).glob("*.toml")}
    if study not in names:
        remedy = f"{nearest(study, names)}; or give the file of a study"
        found = "is a folder" if os.path.isdir(path) else "no study of this name"
        raise RecipeError([Problem(study, found, remedy)])
    return names[study]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
