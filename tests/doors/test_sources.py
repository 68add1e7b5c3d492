"""The check of a user-defined part before its module is imported.

Promises: a name that the source text of a module beside the recipe does not define is refused with the nearest one, and
a module that is nowhere as its import would refuse it; nothing of the user's is run. What a text may define without
saying so, what is broken, and what is elsewhere is left to the import.
"""

import sys
from pathlib import Path

import pytest

from stretto.core.errors import RecipeError
from stretto.doors.loading import check_source, load

RAISES = "raise SystemExit('it was run')\n"
PLAIN = RAISES + "def good(): ...\nclass Kind: ...\nbetter = good\nfrom os import path as where\n"


def checked(folder: Path, name: str, **modules: str) -> str:
    """The message of the check; "" if it says nothing."""
    for module, text in modules.items():
        file = folder / f"{module.replace('__', '/').replace('INIT', '__init__')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    try:
        check_source(name, "rewards.function", "reward", {"math": "stretto_verify.math:judge"}, str(folder))
    except RecipeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", ["good", "Kind", "better", "where", "Kind.method"])
def test_a_name_that_the_text_defines_is_taken(tmp_path: Path, name: str) -> None:
    assert checked(tmp_path, f"mine:{name}", mine=PLAIN) == ""


def test_a_name_that_the_text_does_not_define_is_refused_with_the_nearest(tmp_path: Path) -> None:
    assert checked(tmp_path, "mine:godo", mine=PLAIN) == "rewards.function: 'mine' has no 'godo'; did you mean 'good'?"
    assert checked(tmp_path, "mine:other.part", mine=PLAIN).endswith("has no 'other.part'; allowed: Kind, good")
    assert checked(tmp_path, "pack.inner:godo", pack__inner=PLAIN, pack__INIT=RAISES).endswith("mean 'good'?")


def test_folders_without_an_init_are_packages_at_any_depth(tmp_path: Path) -> None:
    deep = {"outer__middle__inner": PLAIN}
    assert checked(tmp_path, "outer.middle.inner:good", **deep) == ""
    assert checked(tmp_path, "outer.middle.inner:godo", **deep).endswith("has no 'godo'; did you mean 'good'?")


@pytest.mark.parametrize(
    "text",
    [
        "from os.path import *\n",
        "def __getattr__(name): return len\n",
        "globals()['godo'] = len\n",
        "import sys\nsetattr(sys.modules[__name__], 'godo', len)\n",
        "exec('godo = len')\n",
        "if True:\n    for godo in [len]: pass\n",
        "match len:\n    case godo: pass\n",
        "def broken(:\n",
        "deep = " + 100_000 * "-" + "1\n",
    ],
)
def test_a_text_that_does_not_tell_is_left_to_the_import(tmp_path: Path, text: str) -> None:
    assert checked(tmp_path, "mine:godo", mine=text) == ""


@pytest.mark.parametrize("text", ["from .inner import f\n", "import pack.inner\n", "from pack.inner import f\n"])
def test_a_module_that_a_package_imports_is_an_attribute_of_it(tmp_path: Path, text: str) -> None:
    assert checked(tmp_path, "pack:inner.good", pack__INIT=text, pack__inner="def good(): ...\n") == ""
    assert checked(tmp_path, "pack:innr.good").endswith("has no 'innr.good'")


def test_a_package_of_the_environment_comes_before_a_folder_without_an_init(tmp_path: Path) -> None:
    assert checked(tmp_path, "stretto.core.errors:Problem", stretto__core__errors=PLAIN) == ""


def test_a_part_of_the_script_that_runs_is_left_to_the_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    assert checked(tmp_path, "__main__:reward") == ""


def test_a_module_elsewhere_is_left_to_the_import(tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    assert [checked(tmp_path, name) for name in ("json:nothing", "pack.inner:nothing", "math")] == ["", "", ""]


def test_a_module_that_is_nowhere_is_refused_as_its_import_refuses_it(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as refused:
        load("nowhere_at_all:f", "rewards.function", "reward", {})
    assert checked(tmp_path, "nowhere_at_all:f") == str(refused.value)


@pytest.mark.parametrize("name", ["mth", "mine:", ":f", ".mine:f"])
def test_a_name_that_is_none_is_refused_as_its_import_refuses_it(tmp_path: Path, name: str) -> None:
    with pytest.raises(RecipeError) as refused:
        load(name, "rewards.function", "reward", {"math": "stretto_verify.math:judge"})
    assert checked(tmp_path, name) == str(refused.value)
