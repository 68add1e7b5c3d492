"""Promise: a module that a recipe names, by whatever key, is found beside the recipe, from wherever stretto is started,
and the digest of its file is on record. A key `path` of the user's own stays."""

from pathlib import Path
from typing import Any

import pytest

from stretto.launch.recipe.recipe import DOORS, load_recipe, parse_recipe
from stretto.launch.recorded import digests_of
from tests.launch.running import TINY

WORLD = "class Game:\n    def reset(self, seed):\n        return str(seed)\n"
PARTS = {
    **{door.key: ("", f'{door.key} = "mine:part"') for door in DOORS},
    "rewards.function": ("rewards", 'rewards.function = "mine:part"'),
    "rewards.functions": ("rewards", 'rewards.functions = [{function = "math"}, {function = "mine:part"}]'),
    "workflow.function": ("workflow", 'workflow.function = "mine:Part"'),
    "workflow.settings.make": ("workflow", 'workflow.function = "environment"\nworkflow.settings.make = "mine:Game"'),
    "workflow.settings": ("workflow", 'workflow.function = "tools"\nworkflow.settings.tools = ["search", "mine:tool"]'),
    "a function of an agent": ("workflow", 'workflow.kind = "agent"\nworkflow.function = "mine:agent"'),
    "a command of an agent": ("workflow", 'workflow.kind = "agent"\nworkflow.command = ["python", "mine.py"]'),
}


def folder_of(section: str, tree: dict[str, Any]) -> object:
    return (tree[section] if section else tree).get("path")


@pytest.mark.parametrize("key", PARTS)
def test_a_module_is_found_beside_the_recipe_by_each_key_that_names_one(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section, text = PARTS[key]
    (here := tmp_path / "here").mkdir()
    monkeypatch.chdir(here)
    (here / "mine.py").write_text(WORLD)
    (tmp_path / "recipe.toml").write_text(text)
    assert folder_of(section, parse_recipe(tmp_path / "recipe.toml")) is None, "such a module is elsewhere alone"
    (tmp_path / "mine.py").write_text(WORLD)
    assert folder_of(section, parse_recipe(tmp_path / "recipe.toml")) == str(tmp_path)
    if section:
        (tmp_path / "recipe.toml").write_text(f'{text}\n{section}.path = "elsewhere"')
        assert folder_of(section, parse_recipe(tmp_path / "recipe.toml")) == str(tmp_path / "elsewhere")


def test_the_file_of_an_environment_is_on_record(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(WORLD)
    flow = '[workflow]\nfunction = "environment"\nsettings = { make = "mine:Game", instructions = "Note: play." }\n'
    (tmp_path / "recipe.toml").write_text(f"{TINY.read_text()}{flow}")
    first = digests_of(load_recipe(tmp_path / "recipe.toml"))
    (tmp_path / "mine.py").write_text(f"{WORLD}\n# changed\n")
    second = digests_of(load_recipe(tmp_path / "recipe.toml"))
    assert first["mine:Game"] != second["mine:Game"]
    assert first.keys() - {"mine:Game"} == {"tests.launch.rewards_for_tests:length"}
