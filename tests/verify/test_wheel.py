"""The wheel of `packages/verify` works by itself: in an environment with its dependencies alone. It loads them when it
is first asked to judge, and neither stretto nor torch at any time."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*words: object, cwd: Path) -> str:
    done = subprocess.run(list(map(str, words)), cwd=cwd, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = f"from setuptools.build_meta import build_wheel; build_wheel({str(folder)!r})"
    copy = folder / "source"
    run("cp", "-r", ROOT / "packages" / "verify", copy, cwd=folder)  # what a build leaves behind stays there
    run(sys.executable, "-c", build, cwd=copy)
    (found,) = folder.glob("stretto_verify-*.whl")
    return found


def test_it_holds_the_package_and_its_types(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {"stretto_verify/py.typed", "stretto_verify/math/parse/reading.py", "stretto_verify/sandbox/guest.py"} <= {
        *names
    }
    assert not [name for name in names if name.startswith("stretto/")]


def test_it_judges_where_neither_stretto_nor_torch_can_be_imported(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    for name in ("stretto", "torch", "transformers"):
        (tmp_path / "installed" / f"{name}.py").write_text("import os\nos._exit(9)  # nobody may try\n")
    program = (
        "import sys; sys.path.insert(0, 'installed')\n"
        "import stretto_verify\n"
        "assert stretto_verify.__file__.endswith('installed/stretto_verify/__init__.py'), stretto_verify.__file__\n"
        "assert not {'sympy', 'pydantic'} & set(sys.modules)\n"
        "print(stretto_verify.judge_math(r'\\boxed{42}', '42').verdict)\n"
        "from stretto_verify import judging\n"
        "judging.probe.__defaults__ = (judging.probe.__defaults__[0][:1],)  # of all attacks, which take seconds\n"
        "print(stretto_verify.judge_program('print(6 * 7)', [{'stdin': '', 'stdout': '42'}]).verdict)\n"
    )
    assert run(sys.executable, "-c", program, cwd=tmp_path) == "right\nright\n"
