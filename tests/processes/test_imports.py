"""What makes the imports of a role shorter changes nothing that they come to: transformers finds the same names, the
environment is as before, garbage is looked for again."""

from __future__ import annotations

import gc
import os
import sys
from contextlib import suppress
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType

import pytest
import transformers

from stretto.processes.imports import SCANS, imports_of_roles, read_once

MODELS = Path(transformers.__file__).parent / "models"


def scanner() -> ModuleType:
    """The module that reads the files of transformers, anew."""
    spec = find_spec(SCANS)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def scanners() -> tuple[ModuleType, ModuleType]:
    """One that reads each file once, and one as it is."""
    quick, plain = scanner(), scanner()
    read_once(quick)
    return quick, plain


@pytest.mark.parametrize("model", ["qwen3", "auto", "llama", "gemma3", "clip"])
def test_transformers_finds_the_same_names(scanners: tuple[ModuleType, ModuleType], model: str) -> None:
    quick, plain = scanners
    found = quick.create_import_structure_from_path(str(MODELS / model))
    assert found == plain.create_import_structure_from_path(str(MODELS / model))
    assert quick.create_import_structure_from_path(str(MODELS / model)) is found


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x = 1",
        "x = '__all__'",
        '__all__ = ["a"]',
        'x = 1\n__all__ = ["a", "b"]\n',
        '__all__ = ["a"]\ny = 2\n__all__ = [\n    "b",\n    "c",\n]\nz = 3\n',
        "__all__ += 1]",
    ],
)
def test_the_names_of_a_file_are_those_behind_its_last_list(scanners: tuple[ModuleType, ModuleType], text: str) -> None:
    quick, plain = scanners
    assert quick.fetch__all__(text) == plain.fetch__all__(text)


def test_a_version_of_transformers_without_these_functions_stays_as_it_is() -> None:
    module = ModuleType("another")
    before = dict(vars(module))
    read_once(module)
    assert vars(module) == before


def test_the_environment_and_the_search_for_garbage_are_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    before, finders = dict(os.environ), list(sys.meta_path)
    with suppress(ImportError), imports_of_roles():
        assert (os.environ["OMP_NUM_THREADS"], os.environ["OMP_WAIT_POLICY"]) == ("1", "PASSIVE")
        assert os.environ["HF_HUB_OFFLINE"] == "0"  # the command may ask for data
        assert not gc.isenabled()
        raise ImportError
    assert (dict(os.environ), sys.meta_path, gc.isenabled()) == (before, finders, True)
