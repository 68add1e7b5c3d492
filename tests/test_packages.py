"""Packages can be installed one by one.

- Each wheel has every file of its package.
- The wheels of core, kernels and verify, and nothing else of stretto, train recipes/arithmetic.toml.
- The wheels that `pip install stretto` brings train the recipe that comes with them, and say which extra has the rest.
- What asks for a package that is missing is refused before anything starts, with the key and the extra to install; a
  name of `import stretto`, when it is imported.
- A package of another version than the core's is refused by name, with both versions.
- Every package has the version of the core, and depends on others of exactly this version, and on one range of versions
  of each third party."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import stretto
import stretto_servers
from stretto.core.errors import UserError
from stretto.doors import loading
from stretto_app.cli.main import main
from stretto_app.extensions.preflight.dry_run import check

ROOT = Path(__file__).parent.parent
PACKAGES = sorted((ROOT / "packages").glob("*/pyproject.toml"))
ARITHMETIC = ROOT / "recipes" / "arithmetic.toml"
SMALL = {
    "task.prompts": 64, "task.held_out": 8, "task.demonstrations": 64, "model.build.hidden_size": 16,
    "model.build.head_dim": 4, "model.build.intermediate_size": 16, "warm_start.steps": 2, "warm_start.warmup_steps": 1,
    "warm_start.threads": 1, "rollout.batch_size": 2, "rollout.group_size": 2, "rollout.max_in_flight": 4,
    "sampling.max_tokens": 8, "trainer.steps": 2, "trainer.warmup_steps": 1, "evaluation.prompts": 4,
    "evaluation.every": 0,
}  # fmt: skip
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


BUILD = """
import os, sys
from setuptools.build_meta import build_wheel
wheels, *folders = sys.argv[1:]
for folder in folders:
    os.chdir(folder)
    build_wheel(wheels)
"""
SOURCES = ("packages", "application", "recipes", "pyproject.toml", "README.md", "LICENSE")
#: Runs the program `stretto` as its wheel declares it.
COMMAND = "from importlib.metadata import entry_points; entry_points(group='console_scripts')['stretto'].load()()"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, zipfile.ZipFile]:
    """The wheel of each package, by its name in Python."""
    folder, copy = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("sources")
    for name in SOURCES:  # what a build leaves behind stays in the copy
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
            )
        else:
            shutil.copy(ROOT / name, copy)
    folders = [copy, *(copy / path.parent.relative_to(ROOT) for path in PACKAGES)]
    built = subprocess.run(
        [sys.executable, "-c", BUILD, folder, *folders], capture_output=True, text=True, timeout=200, check=False
    )
    assert built.returncode == 0, built.stderr[-2000:]
    names = {"stretto_core": "stretto", "stretto": "stretto_app"}
    found = {path.name.partition("-")[0]: zipfile.ZipFile(path) for path in folder.glob("*.whl")}
    return {names.get(name, name): wheel for name, wheel in found.items()}


def installed(folder: Path, wheels: Sequence[zipfile.ZipFile]) -> Path:
    """The interpreter of a new environment that has these wheels and third parties, and no more of stretto."""
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for wheel in wheels:
        wheel.extractall(site)
    for data in site.glob("*.data/data"):
        shutil.copytree(data, folder, dirs_exist_ok=True)
    others = Path(torch.__file__).parents[1]  # read from a .pth file, its own .pth files add nothing
    (site / "third_parties.pth").write_text(f"{others}\n")
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def core_alone(wheels: dict[str, zipfile.ZipFile], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has core, kernels and verify, and no more of stretto."""
    of_core = [wheels[name] for name in ("stretto", "stretto_kernels", "stretto_verify")]
    return installed(tmp_path_factory.mktemp("core-alone"), of_core)


def ask(python: Path, cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment = kept | {"STRETTO_CACHE": str(cwd / "cache"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [str(python), *words], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def test_a_wheel_has_every_file_of_its_package(wheels: dict[str, zipfile.ZipFile]) -> None:
    folders = {path.name: path for path in (ROOT / "packages").glob("*/stretto*") if (path / "__init__.py").is_file()}
    folders["stretto_app"] = ROOT / "application" / "stretto_app"
    assert wheels.keys() == folders.keys()
    for name, folder in folders.items():
        files = {str(path.relative_to(folder.parent)) for path in folder.rglob("*") if path.is_file()}
        files = {file for file in files if "__pycache__" not in file}
        packed = {file for file in wheels[name].namelist() if not re.match(r"[\w.]+-[\d.]+\.(dist-info|data)/", file)}
        assert packed == files, name


@pytest.fixture(scope="module")
def application(wheels: dict[str, zipfile.ZipFile], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has what `pip install stretto` brings, and no more of stretto."""
    wanted = project_of(ROOT / "pyproject.toml")["dependencies"]
    brought = [line.partition("==")[0].replace("-", "_") for line in wanted if line.startswith("stretto-")]
    names = ["stretto_app", *("stretto" if name == "stretto_core" else name for name in brought)]
    return installed(tmp_path_factory.mktemp("application"), [wheels[name] for name in names])


def test_what_pip_install_stretto_brings_says_which_extra_has_the_rest(application: Path, tmp_path: Path) -> None:
    refused = ask(application, tmp_path, "-c", COMMAND, "plan", str(recipe_of(application)))
    assert refused.returncode == 2
    assert "stretto-foresight, which is not installed; pip install 'stretto[foresight]'" in refused.stderr


@pytest.mark.long  # the core's wheels train the same recipe each day
def test_what_pip_install_stretto_brings_trains_the_recipe_of_the_demo(application: Path, tmp_path: Path) -> None:
    small = [f"{key}={value}" for key, value in SMALL.items()]
    done = ask(application, tmp_path, "-c", COMMAND, "train", str(recipe_of(application)), "--run-dir", "run", *small)
    assert done.returncode == 0, done.stderr
    assert "held-out accuracy of version 2" in (tmp_path / "run" / "log.txt").read_text()


def recipe_of(python: Path) -> Path:
    """The recipe of the demo that was installed in the environment of an interpreter."""
    return python.parents[1] / "share" / "stretto" / "recipes" / "arithmetic.toml"


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


def test_a_missing_package_is_refused_with_its_extra_another_version_by_both(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("package", loading.ALWAYS)
def test_another_version_of_what_is_always_there_is_refused_by_both(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(f"{package}.__version__", "0.0.9")
    versions = f" is version 0.0.9, and stretto-core is version {stretto.__version__}; all packages"
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert versions in capsys.readouterr().err
    name = {"stretto_app": "evaluate", "stretto_workflows": "Workflow", "stretto_report": ""}.get(package, "Trainer")
    if name:
        with pytest.raises(ImportError, match=versions):
            getattr(stretto, name)


def project_of(file: Path) -> dict[str, Any]:
    """The table `project` of a pyproject.toml."""
    project: dict[str, Any] = tomllib.loads(file.read_text())["project"]
    return project


def test_all_packages_have_one_version_and_depend_on_exactly_this_one_and_one_range_of_third_parties() -> None:
    ranges: dict[str, str] = {}
    for file in [ROOT / "pyproject.toml", *PACKAGES]:
        project = project_of(file)
        assert project["version"] == stretto.__version__, file
        extras = project.get("optional-dependencies", {})
        extras.pop("dev", None)  # what is tested, which may be less
        for line in [*project["dependencies"], *(line for lines in extras.values() for line in lines)]:
            name = re.split("[<>=]", line)[0]
            assert ranges.setdefault(name, line) == line, f"{file}: {line}"
            if line.startswith("stretto-"):
                assert line.partition("==")[2] == stretto.__version__, f"{file}: {line}"
        for init in file.parent.glob("*/__init__.py" if file.parent != ROOT else "application/*/__init__.py"):
            said = re.search(r'^__version__ = "(.*)"$', init.read_text(), re.MULTILINE)
            assert said is not None, init
            assert said[1] == stretto.__version__, init
