"""The law of paths: every public function that takes a path answers one that cannot be used with one message of the
errors' tree, which names the path, and never with an error of the system.

The paths are generated: under a file, a file, a link to nothing, a loop of links, too long, what no file name can hold,
a folder that may not be read, and a disk that takes no byte."""

import os
import resource
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

import stretto
from tests.api.conftest import tiny_recipe
from tests.tiny_policy import SMALL

NOBODY = 65_534
#: Below each of these, or at it, nothing can be read.
Paths = Mapping[str, str]


def paths_in(folder: Path) -> Paths:
    folder.mkdir()
    (folder / "file").write_text("text")
    (folder / "to nothing").symlink_to(folder / "nothing" / "deeper")
    (folder / "one").symlink_to(folder / "other")
    (folder / "other").symlink_to(folder / "one")
    names = {"a file": "file", "under a file": "file/x", "far under a file": "file/x/y", "a link": "to nothing"}
    names |= {"a loop": "one", "under a loop": "one/x", "a long name": "n" * 300, "NUL": "a\0b", "no text": "a\ud800"}
    found = {kind: f"{folder}/{name}" for kind, name in names.items()}
    return found | {"a long path": f"{folder}{'/' + 'd' * 200}" * 25}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stretto.build_model(tmp_path_factory.mktemp("model") / "policy", **SMALL.model_dump(include={"layers"}))


@pytest.fixture(scope="module")
def trainer(model: Path) -> Iterator[stretto.Trainer]:
    made = stretto.Trainer(model, lora=4)
    yield made
    made.close()


Call = Callable[[str], object]


@pytest.fixture
def calls(model: Path, trainer: stretto.Trainer) -> dict[str, Call]:
    recipe = tiny_recipe()
    return {
        "Engine.load": stretto.Engine.load,
        "Trainer": stretto.Trainer,
        "SharedModel": stretto.SharedModel,
        "Trainer.load": trainer.load,
        "open_run": stretto.open_run,
        "train": stretto.train,
        "train, resume": lambda path: stretto.train(path, resume=True),
        "evaluate": lambda path: stretto.evaluate(path, recipe),
        "evaluate, a recipe": lambda path: stretto.evaluate(model, path),
        "build_model": stretto.build_model,
        "Trainer.export": trainer.export,
        "Trainer.export, adapters": lambda path: trainer.export(path, adapters_only=True),
        "Trainer.save": trainer.save,
        "Ledger": stretto.Ledger,
        "train, run_dir": lambda path: stretto.train(recipe, run_dir=path),
    }


READS = ["Engine.load", "Trainer", "SharedModel", "Trainer.load", "open_run"]
WRITES = ["build_model", "Trainer.export", "Trainer.export, adapters", "Trainer.save", "Ledger"]
#: These start a process for each call.
SLOW = ["train", "train, resume", "evaluate", "evaluate, a recipe", "train, run_dir"]
#: What these take: a link to nothing is where they make a folder.
TAKEN = {("Trainer.save", "a link")}


def fault(call: Call, path: str) -> str:
    """What is wrong about the answer to this path; "" if nothing is."""
    try:
        call(path)
    except stretto.UserError as error:
        told = str(error)
        known = path[:40] in told or repr(path)[:40] in told
        return "" if known and len(told.splitlines()) == 1 else f"says {told[:300]!r}"
    except stretto.StrettoError as error:
        return "" if path[:40] in str(error) else f"says {str(error)[:300]!r}"
    except BaseException as error:  # whatever it is, it is what is looked for
        return f"raises a bare {type(error).__name__}: {error}"[:300]
    return "takes it"


@pytest.mark.parametrize("name", [*READS, *WRITES])
def test_a_path_that_cannot_be_used_is_one_message(name: str, calls: dict[str, Call], tmp_path: Path) -> None:
    paths = paths_in(tmp_path / "paths")
    faults = {kind: fault(calls[name], path) for kind, path in paths.items() if (name, kind) not in TAKEN}
    assert {kind: told for kind, told in faults.items() if told} == {}


@pytest.mark.parametrize("name", SLOW)
def test_a_path_of_a_run_that_cannot_be_used_is_one_message(
    name: str, calls: dict[str, Call], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = paths_in(tmp_path / "paths")
    faults = {kind: fault(calls[name], paths[kind]) for kind in ("a long name",)}
    assert {kind: told for kind, told in faults.items() if told} == {}


@contextmanager
def as_nobody() -> Iterator[None]:
    """A folder without permissions may not be read meanwhile, by root either."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.mark.parametrize("name", [*READS, *WRITES])
def test_a_folder_that_may_not_be_read_is_one_message(name: str, calls: dict[str, Call], tmp_path: Path) -> None:
    (closed := tmp_path / "closed").mkdir(0)
    path = str(closed / "folder")
    try:
        with as_nobody():
            assert fault(calls[name], path) == ""
    finally:
        closed.chmod(0o700)


@contextmanager
def full() -> Iterator[None]:
    """A disk that takes no byte of this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("name", WRITES)
def test_a_disk_that_takes_nothing_is_one_message(name: str, calls: dict[str, Call], tmp_path: Path) -> None:
    with full():
        told = fault(calls[name], str(tmp_path / "folder"))
    assert told == ""
