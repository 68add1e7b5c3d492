"""Promises about an installation: every recipe comes with it, and a recipe that is not there is told where the
installed one is. Extras that pages name are in tests/complaints/test_installation.py."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

from stretto.core.errors import RecipeError
from stretto.launch.recipe.recipe import load_recipe
from tests.api.reference import page

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = PROJECT["project"]["optional-dependencies"]


def test_every_recipe_is_installed() -> None:
    of_recipes, of_data = PROJECT["tool"]["setuptools"]["data-files"].values()
    installed = {path for pattern in (*of_recipes, *of_data) for path in ROOT.glob(pattern)}
    assert installed == {*(ROOT / "recipes").glob("*.toml"), *(ROOT / "recipes" / "data").iterdir()}
    assert len(installed) > 5


def test_a_recipe_that_is_not_there_is_told_where_one_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    place = tmp_path / next(iter(PROJECT["tool"]["setuptools"]["data-files"])) / "arithmetic.toml"
    place.parent.mkdir(parents=True)
    place.write_bytes((ROOT / "recipes" / "arithmetic.toml").read_bytes())
    with pytest.raises(RecipeError) as refused:
        load_recipe(tmp_path / "recipes" / "arithmetic.toml")
    assert str(refused.value).endswith(f"no such file; stretto was installed with {place}")
    (tmp_path / "empty.toml").touch()
    with pytest.raises(RecipeError, match=f"{place} is a whole one"):
        load_recipe(tmp_path / "empty.toml")
    assert load_recipe(place).trainer.steps > 1


def test_setup_installs_the_extra_of_the_data_with_pinned_versions() -> None:
    default = re.search(r"^EXTRAS \?= ([a-z,]+)#", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert default is not None
    assert default[1] == "data"
    pinned = (ROOT / "requirements" / "test.txt").read_text(encoding="utf-8")
    assert [one for one in EXTRAS["data"] if f"\n{re.split('[<>=]', one)[0]}==" not in pinned] == []


def test_the_page_of_names_is_what_the_code_is() -> None:
    told = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    assert told == page(), "python -m tests.api.reference > docs/reference/api.md"
    assert ":::" not in told
