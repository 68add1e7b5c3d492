"""A folder with a recipe, a model and one finished run in it: what the examples of the docstrings suppose."""

import os
import re
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

import stretto
from stretto import run, sections
from stretto.launch.recipe.recipe import to_toml
from stretto.model.hf.build import build_policy
from tests.api.workshop_rewards import length
from tests.launch.running import children, default_dispositions
from tests.launch.warm import MARK, WarmCommand, children_of, session_server
from tests.tiny_policy import TINY

ROOT = Path(__file__).parents[2]


def tiny_recipe() -> stretto.Recipe:
    """A whole run in seconds, with a reward that is a function."""
    return stretto.Recipe(
        model=sections.ModelConfig(build=TINY),
        task=sections.ArithmeticTask(kind="arithmetic", operands_max=4, prompts=64, held_out=8, demonstrations=0),
        sampling=sections.SamplingConfig(max_tokens=24),
        rollout=sections.RolloutConfig(batch_size=2, group_size=4, max_in_flight=8, max_staleness=1),
        engine=sections.EngineConfig(slots=16),
        rewards=length,  # type: ignore[arg-type]  # a function stands for the section that names it
        trainer=sections.TrainerConfig(steps=3, minibatches=1, checkpoint_every=2),
    )


def warm_process(
    words: Sequence[str], env: Mapping[str, str], pass_fds: Sequence[int], **_: object
) -> WarmCommand:  # as `subprocess.Popen`
    """In place of an interpreter of its own: a process that is forked from one that has imported what a run needs."""
    interpreter, option, module, *arguments = words
    assert option == "-m"
    os.stat(interpreter)
    with default_dispositions():
        mark = {MARK: uuid.uuid4().hex}
        return WarmCommand(arguments, Path.cwd(), {**env, **mark}, module, pass_fds)


def script(file: Path, *arguments: str | Path) -> WarmCommand:
    """``python FILE ARGUMENTS``."""
    return warm_process([sys.executable, "-m", "tests.api.script", *map(str, (file, *arguments))], os.environ, ())


def living() -> list[int]:
    """The processes of runs, and other children of this process."""
    return sorted([*children(), *children_of(session_server().pid)])


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder, which is the working folder as long as a test uses it."""
    folder = tmp_path_factory.mktemp("workshop")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STRETTO_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)  # the processes of a run find this stretto
        patch.setattr(run, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": warm_process}))
        (folder / "recipe.toml").write_text(to_toml(tiny_recipe()))
        build_policy(TINY, folder / "model", seed=1)
        yield folder


@pytest.fixture
def inside(workshop: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(workshop)
    return workshop


@pytest.fixture(scope="session")
def first_run(workshop: Path) -> stretto.Run:
    """A run of three steps that has ended, made as the example of `stretto.train` makes it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workshop)
        names = {"stretto": stretto}
        exec(example(stretto.train), names)
    return cast(stretto.Run, names["run"])


def example(documented: object) -> str:
    """The code of a docstring's example."""
    found = example_in(documented)
    assert found, f"{documented} has no example"
    return found


def example_in(documented: object) -> str:
    """The code of the example in a docstring of its own; empty if there is none."""
    text = vars(documented).get("__doc__") if isinstance(documented, type) else documented.__doc__
    found = re.search(r"\n( *)Example::\n\n((?:\1 {4}.*\n|\n)+)", f"{text}\n")
    return textwrap.dedent(found[2]) if found is not None else ""
