"""Packages can be installed one by one.

- The core, with kernels and verify and nothing else of stretto, trains recipes/arithmetic.toml.
- What asks for a package that is missing is refused before anything starts, with the key and the extra to install; a
  name of `import stretto`, when it is imported.
- A package of another version than the core's is refused by name, with both versions.
- Every package has the version of the core, and depends on others of exactly this version."""

import json
import os
import re
import subprocess
import tomllib
import venv
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import stretto
import stretto_servers
from stretto.core.errors import UserError
from stretto.doors import loading
from stretto_app.extensions.preflight.dry_run import check

ROOT = Path(__file__).parent.parent
PACKAGES = sorted((ROOT / "packages").glob("*/pyproject.toml"))
ARITHMETIC = ROOT / "recipes" / "arithmetic.toml"
SMALL = {
    "task.prompts": 64,
    "task.held_out": 8,
    "task.demonstrations": 64,
    "model.build.hidden_size": 16,
    "model.build.head_dim": 4,
    "model.build.intermediate_size": 16,
    "warm_start.steps": 2,
    "warm_start.warmup_steps": 1,
    "warm_start.threads": 1,
    "rollout.batch_size": 2,
    "rollout.group_size": 2,
    "rollout.max_in_flight": 4,
    "sampling.max_tokens": 8,
    "trainer.steps": 2,
    "trainer.warmup_steps": 1,
    "evaluation.prompts": 4,
    "evaluation.every": 0,
}
TRAINED = f"""
import importlib.util, json, stretto
from stretto.doors.loading import check_packages
run = stretto.train({str(ARITHMETIC)!r}, run_dir="run", **{SMALL!r})
steps = [step.step for step in run]
run.wait()
others = ("app", "report", "gateway", "servers", "cluster", "foresight", "tinker", "verbs", "workflows")
try:
    check_packages("engine.kind", "stretto_servers")
except stretto.RecipeError as error:
    refused = str(error)
print(json.dumps([steps, [name for name in others if importlib.util.find_spec(f"stretto_{{name}}")], refused]))
"""


@pytest.fixture(scope="module")
def core_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has core, kernels, verify and third parties, and no more of stretto."""
    folder = tmp_path_factory.mktemp("core-alone")
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    others = Path(torch.__file__).parents[1]  # read from a .pth file, its own .pth files add nothing
    found = [ROOT / "packages" / "core", ROOT / "packages" / "kernels", ROOT / "packages" / "verify", others]
    (site / "packages.pth").write_text("".join(f"{path}\n" for path in found))
    return folder / "bin" / "python"


def ask(python: Path, cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment = kept | {"STRETTO_CACHE": str(cwd / "cache"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [str(python), *words], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def test_the_core_alone_trains_the_recipe_of_the_demo(core_alone: Path, tmp_path: Path) -> None:
    done = ask(core_alone, tmp_path, "-c", TRAINED)
    assert done.returncode == 0, done.stderr
    steps, others, refused = json.loads(done.stdout.splitlines()[-1])
    assert steps == [1, 2]
    assert others == []
    assert "needs stretto-servers, which is not installed; pip install 'stretto[servers]'" in refused


def test_a_name_of_a_package_that_is_missing_says_how_to_install_it(core_alone: Path, tmp_path: Path) -> None:
    done = ask(core_alone, tmp_path, "-c", "from stretto import RecipeError\nfrom stretto import Trainer")
    assert done.stderr.splitlines()[-1] == (
        "ImportError: stretto.Trainer is part of stretto-verbs; install it: pip install stretto"
    )


def test_the_command_of_the_core_alone_says_how_to_install_the_application(core_alone: Path, tmp_path: Path) -> None:
    done = ask(core_alone, tmp_path, "-m", "stretto", "train", "recipe.toml")
    assert done.returncode == 2
    assert done.stderr == "stretto: python -m stretto: needs stretto, which is not installed; pip install stretto\n"


def told(*overrides: str) -> str:
    """The refusal of a recipe."""
    with pytest.raises(UserError) as refused:
        check(ARITHMETIC, overrides)
    return str(refused.value)


def test_a_missing_package_is_refused_with_its_extra_and_another_version_with_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in the environment above, whose packages are all that `find_spec` finds."""
    asked = {
        'engine.kind="vllm"': ("engine.kind", "stretto-servers", "'stretto[servers]'"),
        'cluster.listen="127.0.0.1:0"': ("cluster", "stretto and stretto-cluster", "'stretto[cluster]'"),
        'logging.to="tensorboard"': ("logging.to", "stretto-report", "stretto"),
        'workflow={function="multi_turn"}': ("workflow.function", "stretto-workflows", "stretto"),
        'workflow={kind="agent"}': ("workflow.kind", "stretto and stretto-gateway", "'stretto[gateway]'"),
        'task={kind="programs"}': ("task.kind", "stretto-workflows", "stretto"),
        "trainer.ranks=2": ("trainer.ranks", "stretto-cluster", "'stretto[cluster]'"),
    }
    ours = {"stretto", "stretto_kernels", "stretto_verify"}
    monkeypatch.setattr(loading, "find_spec", lambda name: find_spec(name) if name in ours else None)
    for override, (place, package, brought_by) in asked.items():
        refused = told(override)
        assert place in refused
        are = "are" if " and " in package else "is"
        assert refused.endswith(f"needs {package}, which {are} not installed; pip install {brought_by}")
    monkeypatch.undo()
    monkeypatch.setattr(stretto_servers, "__version__", "0.0.9")
    versions = f"stretto-servers is version 0.0.9, and stretto-core is version {stretto.__version__}"
    assert versions in told('engine.kind="vllm"')


def test_all_packages_have_one_version_and_depend_on_exactly_this_one() -> None:
    for file in [ROOT / "pyproject.toml", *PACKAGES]:
        project: dict[str, Any] = tomllib.loads(file.read_text())["project"]
        assert project["version"] == stretto.__version__, file
        extras = [line for lines in project.get("optional-dependencies", {}).values() for line in lines]
        for line in [*project["dependencies"], *extras]:
            if line.startswith("stretto-"):
                assert line.partition("==")[2] == stretto.__version__, f"{file}: {line}"
        for init in file.parent.glob("*/__init__.py" if file.parent != ROOT else "application/*/__init__.py"):
            said = re.search(r'^__version__ = "(.*)"$', init.read_text(), re.MULTILINE)
            assert said is not None, init
            assert said[1] == stretto.__version__, init
