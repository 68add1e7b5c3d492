"""What makes the imports of a role shorter changes nothing that they come to: transformers finds the same names, the
environment is as before, garbage is looked for again."""

import gc
import importlib.metadata
import os
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType

import pytest
import transformers
import uvloop

from stretto_app.forking.imports import (
    SCANS,
    SOURCES,
    distributions_by_package,
    imports_of_roles,
    name_lines,
    read_once,
)

MODELS = Path(transformers.__file__).parent / "models"


def anew(name: str) -> ModuleType:
    """A module that is imported already, another time."""
    spec = find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def scanners() -> tuple[ModuleType, ModuleType]:
    """One that reads each file once, and one as it is."""
    quick, plain = anew(SCANS), anew(SCANS)
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


@pytest.mark.parametrize("patch", [read_once, name_lines])
def test_a_version_without_these_functions_stays_as_it_is(patch: Callable[[ModuleType], None]) -> None:
    module = ModuleType("another")
    before = dict(vars(module))
    patch(module)
    assert vars(module) == before


def test_torch_names_the_same_lines() -> None:
    quick, plain = anew(SOURCES), anew(SOURCES)
    name_lines(quick)
    for level in (1, 2):
        found = [module.get_source(level) for module in (quick, plain)]
        assert found[0] == found[1]


def test_each_package_is_found_in_its_distributions() -> None:
    every = importlib.metadata.packages_distributions()
    assert {name: sorted(found) for name, found in distributions_by_package().items()} == {
        name: sorted(found) for name, found in every.items() if "." not in name
    }


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder of distributions."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


def distribution(folder: Path, name: str, **files: str) -> None:
    """Write the metadata of a distribution."""
    place = folder / f"{name}-1.0.dist-info"
    place.mkdir()
    for file, text in {"METADATA": f"Metadata-Version: 2.1\nName: {name}\n\nName: not a header\n", **files}.items():
        (place / file).write_text(text)


def test_packages_are_read_from_the_names_of_files(installed: Path) -> None:
    distribution(installed, "first", RECORD='../../bin/tool.py,,\n"wide/__init__.py",,\nwide/a.py,,\nalone.py,,\n')
    distribution(installed, "second", **{"top_level.txt": "wide\n"}, RECORD="hidden/a.py,,\n")
    distribution(installed, "none")
    found = distributions_by_package()
    assert {name: sorted(owners) for name, owners in found.items()} == {"wide": ["first", "second"], "alone": ["first"]}


def test_the_library_answers_again_behind_an_import() -> None:
    library = importlib.metadata.packages_distributions
    with imports_of_roles():
        anew(SCANS)
        assert importlib.metadata.packages_distributions is library


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


def test_where_there_is_no_uvloop_a_conductor_has_the_event_loop_of_asyncio(monkeypatch: pytest.MonkeyPatch) -> None:
    for there, room in ((uvloop, "uvloop"), (None, "asyncio.unix_events")):
        monkeypatch.setitem(sys.modules, "uvloop", there)
        with closing(anew("stretto.processes.event_loop").new_event_loop()) as loop:
            assert type(loop).__module__ == room
