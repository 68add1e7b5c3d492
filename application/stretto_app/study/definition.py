"""Definition of a study: one recipe, and the settings in which its runs differ.

recipe = "arithmetic.toml"           # relative to this file
seeds = 5                            # runs of each cell

[settings]                           # in every run
trainer.steps = 600

[grid]                               # every combination is a cell
rollout.max_staleness = [0, 2, 8, inf]

[variants.naive]                     # each variant with each combination
algorithm.loss = "ppo"
[variants.decoupled]
algorithm.loss = "decoupled_ppo"
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from stretto.core.errors import Problem, RecipeError, several
from stretto.launch.preflight.base import digest
from stretto.launch.recipe.file import read_toml
from stretto.launch.recipe.recipe import Recipe, override, parse_recipe, to_toml, validate, validated

VARIANT = "variant"  #: name of the axis of `[variants]`
_MOST_CELLS = 1000


class _StudyFile(BaseModel, extra="forbid", frozen=True):
    """Keys of a study file."""

    recipe: str = Field(min_length=1, description="file of the recipe, relative to the study")
    seeds: int = Field(5, ge=1, le=1000, description="runs of each cell; their seeds go on from the recipe's")
    target: float | None = Field(None, gt=0, le=1, description="held-out accuracy to which seconds are counted")
    settings: dict[str, Any] = Field({}, description="values that replace the recipe's in every run")
    grid: dict[str, Any] = Field({}, description="lists of values, by key; every combination is a cell")
    variants: dict[str, dict[str, Any]] = Field({}, description="named groups of values; each with every combination")


@dataclass(frozen=True)
class PlannedRun:
    """One run of a cell. `cell`: index of the cell; `text`: the resolved recipe as TOML; `digest`: digest of the text,
    which names the run folder."""

    cell: int
    recipe: Recipe
    text: str
    digest: str

    @property
    def seed(self) -> int:
        return self.recipe.seed

    @classmethod
    def of(cls, cell: int, recipe: Recipe) -> PlannedRun:
        text = to_toml(recipe)
        return cls(cell, recipe, text, digest(text))


@dataclass(frozen=True)
class _Cell:
    """One combination of settings, with one run for each seed. `labels`: label by axis, as in ``{"variant": "naive",
    "max_staleness": "8"}``."""

    labels: Mapping[str, str]
    runs: tuple[PlannedRun, ...]

    @property
    def name(self) -> str:
        return _name(self.labels)


@dataclass(frozen=True)
class Study:
    """A validated study. `text`: content of its file. `target`: held-out accuracy to reach; None: none. Example:
    ``load_study(Path("staleness.toml"), seeds=3)``"""

    name: str
    text: str
    cells: tuple[_Cell, ...]
    target: float | None = None

    @property
    def digest(self) -> str:
        """Digest of the recipes of all cells, independent of the number of seeds."""
        return digest(*(cell.runs[0].digest for cell in self.cells))

    @property
    def runs(self) -> tuple[PlannedRun, ...]:
        """All runs: all cells with the first seed, then all with the second, and so on, so that an interrupted study
        still compares all cells."""
        return tuple(itertools.chain.from_iterable(zip(*(cell.runs for cell in self.cells), strict=True)))


@dataclass(frozen=True)
class _Axis:
    name: str
    settings: Mapping[str, Mapping[str, Any]]  # label: values by key


def load_study(path: Path, seeds: int | None = None, steps: int | None = None) -> Study:
    """Read and check a study file and the recipe that it varies. `seeds` and `steps` (`trainer.steps`) replace those of
    the file, unless None.

    Raises:
        RecipeError: lists every mistake of the study, and of its recipe.
    """
    tree, place = read_toml(path), str(path)
    if "recipe" not in tree and "model" in tree:
        remedy = f'this is a recipe; a study has recipe = "{path.name}", and says in [grid] or [variants] what varies'
        raise RecipeError([Problem(f"{place}: recipe", "missing", remedy)])
    problems: list[Problem] = []
    try:
        file = validated(tree, place, _StudyFile)
    except RecipeError as error:
        problems += error.problems
        known = {key: value for key, value in tree.items() if key in _StudyFile.model_fields}
        file = _or_raise(known, place, problems)
    axes, wrong = _axes(file, place)
    problems += wrong
    if not axes and not problems:
        problems.append(Problem(f"{place}: grid", "nothing varies", "give [grid] a list of values, or [variants]"))
    more = {} if steps is None else {"trainer.steps": steps}
    cells, wrong = _cells(path, file, axes, more)
    problems += wrong
    if problems:
        raise RecipeError(problems)
    count = file.seeds if seeds is None else seeds
    return Study(path.stem, path.read_text(encoding="utf-8-sig"), tuple(_seeded(cells, count)), file.target)


def _or_raise(known: Mapping[str, Any], place: str, problems: Sequence[Problem]) -> _StudyFile:
    """Parse the keys of a study that are `known`, so that mistakes of its recipe are found too although it has unknown
    ones. If these keys are wrong too, raise `problems`. `place`: name of the file, for messages."""
    try:
        return validated(known, place, _StudyFile)
    except RecipeError:
        raise RecipeError(problems) from None


def _axes(file: _StudyFile, place: str) -> tuple[list[_Axis], list[Problem]]:
    axes: list[_Axis] = []
    problems: list[Problem] = []
    lists = list(_leaves(file.grid))
    last = Counter(key.rpartition(".")[2] for key, _ in lists)
    for key, values in lists:
        where = f"{place}: grid.{key}"
        labels = [_label(value) for value in values] if isinstance(values, list) else []
        if not isinstance(values, list):
            problems.append(Problem(where, f"{values!r}"[:80], "give a list of values; one for all is in [settings]"))
        elif not values:
            problems.append(Problem(where, "an empty list", "give the values to compare"))
        elif len(set(labels)) < len(labels):
            twice = ", ".join(label for label, count in Counter(labels).items() if count > 1)
            problems.append(Problem(where, f"{twice} is listed twice", "give each value once"))
        else:
            short = key.rpartition(".")[2]
            settings = {label: {key: value} for label, value in zip(labels, values, strict=True)}
            axes.append(_Axis(short if last[short] == 1 else key, settings))
    if file.variants:
        axes.insert(0, _Axis(VARIANT, file.variants))
    if (cells := math.prod(len(axis.settings) for axis in axes)) > _MOST_CELLS:
        problems.append(Problem(f"{place}: grid", several(cells, "cell"), f"a study has {_MOST_CELLS:,} at most"))
        axes = []
    return axes, problems


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _label(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case float():
            return short if float(short := f"{value:g}") == value else repr(value)
        case {"kind": str(kind), **rest}:
            return " ".join([kind, *(f"{key}={_label(inner)}" for key, inner in rest.items())])
    return str(value)


def _name(labels: Mapping[str, str]) -> str:
    return ", ".join(label if axis == VARIANT else f"{axis} = {label}" for axis, label in labels.items())


def _cells(
    path: Path, file: _StudyFile, axes: Sequence[_Axis], more: Mapping[str, Any]
) -> tuple[list[tuple[Mapping[str, str], Recipe]], list[Problem]]:
    """Labels and recipe of every valid cell (one setting of each axis), and the problems; cells are not to be used if
    there are any. `path`: of the study file. `more`: settings that replace those of the file in all cells.

    A problem of all cells is reported once; if the recipe itself has it, at the recipe. A problem of some cells is
    reported with their names.
    """
    source = path.parent / file.recipe
    try:
        base = parse_recipe(source)
    except RecipeError as error:
        return [], list(error.problems)
    inherited = _inherited(base, source)
    cells: list[tuple[Mapping[str, str], Recipe]] = []
    found: dict[Problem, list[str]] = {}
    combinations = list(itertools.product(*(axis.settings.items() for axis in axes)))
    for chosen in combinations:
        labels = {axis.name: label for axis, (label, _) in zip(axes, chosen, strict=True)}
        try:
            tree = deepcopy(base)
            for settings in (file.settings, *(values for _, values in chosen), more):
                override(tree, deepcopy(settings), path.parent)
            cells.append((labels, validate(tree, str(path))))
        except RecipeError as error:
            for problem in error.problems:
                found.setdefault(problem, []).append(_name(labels))
    problems = []
    for problem, names in found.items():
        problem = inherited.get((problem.place.removeprefix(f"{path}: "), problem.found), problem)
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        place = problem.place if len(names) == len(combinations) else f"{problem.place} ({names[0]}{others})"
        problems.append(Problem(place, problem.found, problem.remedy))
    if not problems:
        problems += _unequal(path, cells)
    return cells, problems


def _inherited(base: Mapping[str, Any], source: Path) -> dict[tuple[str, str], Problem]:
    try:
        validate(base, str(source))
    except RecipeError as error:
        return {(one.place.removeprefix(f"{source}: "), one.found): one for one in error.problems}
    return {}


def _unequal(path: Path, cells: Sequence[tuple[Mapping[str, str], Recipe]]) -> Iterator[Problem]:
    """Yield the problems that make the comparison unfair. Every run must train the same number of trajectories, to its
    last step, on equal evaluations, and cells must differ."""
    trained: dict[int, str] = {}
    same: dict[str, str] = {}
    for labels, recipe in cells:
        name, rollout = _name(labels), recipe.rollout
        trained.setdefault(recipe.trainer.steps * rollout.batch_size * rollout.group_size, name)
        seedless = to_toml(recipe.model_copy(update={"seed": 0}))
        if (other := same.setdefault(seedless, name)) != name:  # only the seeds differ, which count up anyway
            found = f"{other!r} and {name!r} are the same runs, or differ in their seeds alone"
            yield Problem(f"{path}: grid", found, "leave out one of them; `seeds` says how many seeds a cell has")
    if len(trained) > 1:
        (few, one), (many, other) = min(trained.items()), max(trained.items())
        counts = f"{one!r} would train {several(few, 'trajectory')} and {other!r} {many:,}"
        remedy = "set trainer.steps beside batch_size and group_size in [variants], so that every cell trains as many"
        yield Problem(f"{path}: grid", counts, remedy)
    for key in ("prompts", "samples", "seed"):
        if len({getattr(recipe.evaluation, key) for _, recipe in cells}) > 1:
            found = "differs between cells, and accuracies over other questions or seeds are not compared"
            yield Problem(f"{path}: evaluation.{key}", found, "set it in [settings]")
    for key in ("patience", "goal"):
        if any(getattr(recipe.evaluation, key) for _, recipe in cells):
            found = "ends runs at different steps, and every run of a study trains the same number of trajectories"
            yield Problem(f"{path}: evaluation.{key}", found, "set it to 0 in [settings]")


def _seeded(cells: Sequence[tuple[Mapping[str, str], Recipe]], seeds: int) -> Iterator[_Cell]:
    for number, (labels, recipe) in enumerate(cells):
        later = (recipe.model_copy(update={"seed": recipe.seed + more}) for more in range(seeds))
        yield _Cell(labels, tuple(PlannedRun.of(number, one) for one in later))
