"""Promises about docs/tutorials/from_trl.md, held without TRL, whose steps are on record
(`benchmarks/results/from-trl.json`).

- three steps of this trainer give the weights that TRL had after each of them, in each case that is called the same;
- each case that the page calls another training is one;
- the page has every key that `GRPOConfig` adds to transformers', and names no recipe key that does not exist;
- defaults are those of both sides, and every pair of keys whose defaults differ is in the table;
- the table of results is that of the record."""

import json
import math
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from benchmarks.from_trl import CASES, ours, prints, summary, write_model
from benchmarks.report import RESULTS
from stretto.launch.recipe.recipe import Recipe

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "tutorials" / "from_trl.md").read_text(encoding="utf-8")
TRL: dict[str, Any] = json.loads((RESULTS / "from-trl.json").read_text(encoding="utf-8"))["results"]
TOLERANCE = 5e-3  #: One weight whose gradient is noise may move by a tenth of a step: 1.6e-3 of all that move.

RECIPE = Recipe.model_validate({"model": {"build": {}}, "task": {"kind": "arithmetic"}, "trainer": {}}).model_dump()
KEYS = PAGE.split("## Keys")[1].split("## Defaults")[0]
DEFAULTS = PAGE.split("## Defaults that differ")[1].split("## Asynchrony")[0]
_CODE = re.compile(r"`([^`]+)`")


def default_of(key: str) -> Any:
    value: Any = RECIPE
    for part in key.split("."):
        value = value[part]
    return value


def cells(table: str) -> list[list[str]]:
    lines = [line.strip().strip("|").split("|") for line in table.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line] for line in lines]


def names(cell: str) -> list[str]:
    return [code.split("=")[0].split(" ")[0] for code in _CODE.findall(cell)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_three_steps_of_this_trainer_are_three_steps_of_trl(name: str, model: Path) -> None:
    start, *after = ours(model, CASES[name])
    apart = []
    for weights, told in zip(after, TRL["cases"][name]["prints"], strict=True):
        found, expected = prints(start, weights), [float(word) for word in told.split()]
        gap = math.dist(found, expected)
        apart.append(gap / max(math.hypot(*found), math.hypot(*expected)))
    if CASES[name].same:
        assert max(apart) < TOLERANCE
    else:
        assert max(apart) > 1e-3


def test_the_record_is_of_these_cases_and_says_the_same_of_all_weights() -> None:
    assert list(TRL["cases"]) == list(CASES)
    for row in TRL["cases"].values():
        assert (max(row["difference"]) < 1e-4) == row["same"]
    assert summary(TRL) in PAGE


def test_every_key_of_trl_is_on_the_page() -> None:
    told = {word for code in _CODE.findall(PAGE) for word in re.findall(r"\w+\*?", code)}
    told |= {word for cell in cells(KEYS) for word in names(cell[0])}
    families = tuple(word.rstrip("*") for word in told if word.endswith("_*"))
    assert [key for key in TRL["own"] if key not in told and not key.startswith(families)] == []


def test_every_key_of_a_recipe_on_the_page_exists() -> None:
    known = (ROOT / "docs" / "reference" / "recipe.md").read_text(encoding="utf-8")
    for name in {word for row in (*cells(KEYS), *cells(DEFAULTS)) for cell in row for word in names(cell)}:
        section, dot, key = name.strip("[]").rpartition(".")
        if dot and section.split(".")[0] in RECIPE and name.isascii():
            assert f"| `{key.rstrip('*')}` |" in known or f"{name.strip('[]')}]" in known, name


def test_the_defaults_on_the_page_are_those_of_both_sides() -> None:
    assert len(cells(DEFAULTS)) > 10
    for theirs, their_default, ours_, our_default in cells(DEFAULTS):
        (key,), (own,) = names(theirs), names(ours_)
        assert json.loads(_CODE.findall(their_default)[0]) == TRL["defaults"][key], key
        assert json.loads(_CODE.findall(our_default)[0]) == default_of(own), own


def test_no_pair_of_keys_has_defaults_that_differ_and_stand_in_no_table() -> None:
    named = {names(row[0])[0] for row in cells(DEFAULTS)}
    pairs = [(names(row[0]), names(row[1])) for row in cells(KEYS)]
    compared = 0
    for theirs, own in pairs:
        if len(theirs) != len(own):
            continue
        for key, mine in zip(theirs, own, strict=True):
            if key in TRL["defaults"] and mine.split(".")[0] in (
                "trainer",
                "sampling",
                "rollout",
                "seed",
                "evaluation",
            ):
                compared += 1
                assert TRL["defaults"][key] == default_of(mine) or key in named or key in ELSEWHERE, key
    assert compared > 12


#: Off on both sides, each in its own way.
ELSEWHERE = {"mask_truncated_completions", "eval_steps"}


def test_asynchrony_of_trl_is_told_with_its_own_default() -> None:
    assert f"`max_staleness` ({TRL['async_max_staleness']} there too)" in PAGE
    assert default_of("rollout.max_staleness") == TRL["async_max_staleness"]


def test_the_recipe_that_is_called_trl_s_has_its_defaults() -> None:
    told = tomllib.loads(DEFAULTS.split("```toml")[1].split("```")[0])
    expected = {
        "schedule": TRL["defaults"]["lr_scheduler_type"],
        "learning_rate": TRL["defaults"]["learning_rate"],
        "beta2": TRL["defaults"]["adam_beta2"],
        "eps": TRL["defaults"]["adam_epsilon"],
        "weight_decay": TRL["defaults"]["weight_decay"],
        "minibatches": TRL["defaults"]["steps_per_generation"] // TRL["defaults"]["gradient_accumulation_steps"],
        "dtype": "bfloat16" if TRL["defaults"]["bf16"] else "float32",
    }
    assert told["trainer"] == expected
    Recipe.model_validate({"model": {"build": {}}, "task": {"kind": "arithmetic"}} | told)
