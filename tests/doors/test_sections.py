"""Promises: a part's section is its signature.

- Of every built-in the keys, defaults, bounds and descriptions on docs/reference/recipe.md are those of its function.
- A part of the user's own has its section in the same way: its numbers are checked, kept with their defaults when the
  recipe is recorded, and given to the function; and its mistakes are those of any section.
- Parts of one name from the folders of two recipes are not confused.
"""

import inspect
import math
import re
import sys
import tomllib
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import annotated_types
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel
from torch import Tensor

from stretto.core.errors import RecipeError
from stretto.doors.door import Door, Part, Section, declare, fact
from stretto.launch.recipe.recipe import load_recipe, to_toml, validate
from stretto.trainer.objective.corrections import CORRECTIONS
from stretto.trainer.objective.estimators import ESTIMATORS
from stretto.trainer.objective.surrogates import LOSSES
from tests.launch.running import ROOT, TINY

PAGE = (ROOT / "docs" / "reference" / "recipe.md").read_text(encoding="utf-8")
SECTIONED: tuple[Door[Any], ...] = (LOSSES, CORRECTIONS, ESTIMATORS)
PARTS = [(door, kind) for door in SECTIONED for kind in door.built_in]
SIGNS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}


def rows(door: Door[Any], kind: str) -> dict[str, tuple[str, str, str]]:
    """Default, allowed and meaning of each key of a section, on the page."""
    chapter = PAGE.partition(f'\n## `[{door.key}]`, `kind = "{kind}"`\n')[2].partition("\n## ")[0]
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in chapter.splitlines() if "|" in line][2:]
    return {key.strip("`"): (default.strip("`"), allowed, meaning) for key, default, allowed, meaning in found}


def written(door: Door[Any], kind: str) -> Iterator[tuple[str, str, dict[str, float], str]]:
    """Name, default, bounds and description of each number, as the function has them."""
    part = door.load(kind)
    selection = fact(part, "selection", None)
    for function in (part, *((selection,) if selection else ())):
        hints = typing.get_type_hints(function, localns={"Tensor": Tensor}, include_extras=True)
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.kind is not parameter.KEYWORD_ONLY:
                continue
            (field,) = get_args(hints[name])[1:]
            bounds = {
                sign: getattr(one, sign) for one in field.metadata for sign in SIGNS if isinstance(one, bound_of(sign))
            }
            yield name, str(parameter.default), bounds, str(field.description)


def bound_of(sign: str) -> Any:
    return getattr(annotated_types, sign.capitalize())


@pytest.mark.parametrize(("door", "kind"), PARTS, ids=[kind for _, kind in PARTS])
def test_the_page_says_of_a_built_in_what_its_signature_says(door: Door[Any], kind: str) -> None:
    page, own = rows(door, kind), {"kind", "anchor", "credit"}
    for name, default, bounds, description in written(door, kind):
        shown, allowed, meaning = page.pop(name)
        assert shown in (default, default.lower(), "–" if default == "None" else default)
        assert re.findall(r"[≥>≤<] [\d.]+", allowed) == [f"{SIGNS[sign]} {bound:g}" for sign, bound in bounds.items()]
        assert meaning in (description, "″")
        assert f" | {description} |\n" in PAGE
    assert page.keys() <= own
    about = inspect.cleandoc(door.load(kind).__doc__ or "").partition("\n\n")[0].replace("\n", " ")
    assert f'`kind = "{kind}"`\n\n{about}\n' in PAGE


@pytest.mark.parametrize(("door", "kind"), PARTS, ids=[kind for _, kind in PARTS])
def test_a_built_in_is_bound_to_the_numbers_of_its_section(door: Door[Any], kind: str) -> None:
    section = door(kind)
    bound: Any = door.bound(section)
    assert bound.func is door.load(kind)
    assert bound.keywords == {name: getattr(section, name) for name in bound.keywords}
    assert type(section).model_validate_json(section.model_dump_json()) == section


OWN = """
from typing import Annotated, Literal
from pydantic import Field
from stretto.trainer.objective.decoupled_ppo import Terms, ppo

def loss(policy_logprobs, tokens, *, clip: Annotated[float, Field(gt=0, lt=9)] = 0.2, ends: tuple[float, ...] = (1.0,),
         word: Literal["a", "b"] = "a", on=True, needed: int):
    return ppo(policy_logprobs, tokens, clip_low=1.0, clip_high=clip)
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "own_losses.py").write_text(OWN)
    return tmp_path


def recipe_of(folder: Path, **numbers: Any) -> Any:
    tree = tomllib.loads(TINY.read_text()) | {"path": str(folder)}
    return validate(tree | {"algorithm": {"loss": {"kind": "own_losses:loss", **numbers}}}, "recipe.toml")


def test_numbers_of_ones_own_are_recorded_with_their_defaults_and_reach_the_function(own: Path) -> None:
    recipe = recipe_of(own, needed=3, clip=0.5, ends=[1.0, 2.0])
    recorded = tomllib.loads(to_toml(recipe))
    assert recorded["algorithm"]["loss"] == {
        "kind": "own_losses:loss",
        "anchor": "recomputed",
        "clip": 0.5,
        "ends": [1.0, 2.0],
        "word": "a",
        "on": True,
        "needed": 3,
    }
    assert validate(recorded, "recipe.toml") == recipe
    bound: Any = LOSSES.bound(recipe.algorithm.loss)
    assert bound.keywords == {"clip": 0.5, "ends": (1.0, 2.0), "word": "a", "on": True, "needed": 3}


def test_its_mistakes_are_those_of_any_section_and_named_together(own: Path) -> None:
    with pytest.raises(RecipeError) as refused:
        recipe_of(own, clip=9.0, word="c", clp=1, anchor="before")
    assert str(refused.value).splitlines() == [
        "recipe.toml: algorithm.loss.anchor: 'before'; input should be 'recomputed', 'interpolated' or 'behavior'",
        "recipe.toml: algorithm.loss.clip: 9.0; input should be less than 9",
        "recipe.toml: algorithm.loss.word: 'c'; input should be 'a' or 'b'",
        "recipe.toml: algorithm.loss.needed: missing",
        "recipe.toml: algorithm.loss.clp: unknown key; did you mean 'clip'?",
    ]


@given(clip=st.floats(allow_nan=False))
def test_a_bound_of_a_signature_is_one_of_the_recipe(clip: float) -> None:
    section: Any = LOSSES.model("gspo")
    if 0 < clip <= 1:
        assert section(kind="gspo", clip_low=clip) == LOSSES("gspo", clip_low=clip)
    else:
        with pytest.raises(ValueError, match="clip_low"):
            LOSSES("gspo", clip_low=clip)


def test_an_infinite_number_survives_its_json_text() -> None:
    assert CORRECTIONS.model("mask").model_validate_json(CORRECTIONS("mask").model_dump_json()) == CORRECTIONS("mask")
    assert getattr(CORRECTIONS("mask"), "high") == math.inf  # noqa: B009  # a key of this kind alone


def test_the_folder_of_the_recipe_is_looked_in_first_and_two_are_not_confused(tmp_path: Path) -> None:
    for name, clip in (("one", 0.1), ("two", 0.7)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "same_name.py").write_text(OWN.replace("= 0.2", f"= {clip}").replace("needed: int", "needed=1"))
        (folder / "recipe.toml").write_text(f"{TINY.read_text()}\n[algorithm]\nloss = 'same_name:loss'\n")
    clips = [load_recipe(tmp_path / at / "recipe.toml").algorithm.loss.model_dump()["clip"] for at in ("one", "two")]
    assert clips == [0.1, 0.7]
    assert sys.modules["same_name"].__file__ == str(tmp_path / "two" / "same_name.py")


class Named(BaseModel):
    """Two keys of names."""

    tool: typing.Annotated[str, Door("named.tool", "tool", (), {"plain": "builtins:object"}, Section)]


def test_a_key_of_names_holds_no_section() -> None:
    assert Named(tool="plain").tool == "plain"
    with pytest.raises(ValueError, match="plain"):
        Named.model_validate({"tool": {"kind": "builtins:object"}})


def test_facts_are_declared_beside_the_function() -> None:
    @declare(compares=True)
    @declare(along=False)
    def part() -> None: ...

    marked: Part = part
    assert (fact(marked, "compares", False), fact(marked, "along", True), fact(marked, "other", 3)) == (True, False, 3)
