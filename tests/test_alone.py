"""Promises of the second run of failed tests (`tests/alone.py`): what fails alone stays a failure; what passes alone is
named and is none; more than three failures, and every other exit code, are left as they are.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FAILS = "def test_it():\n    assert False\n"
FAILS_ONCE = """
from pathlib import Path

def test_it():
    been = Path(__file__).with_suffix(".been")
    first = not been.exists()
    been.touch()
    assert not first
"""


def suite(folder: Path, tests: list[str]) -> tuple[int, str]:
    """Run a suite of these tests, and those that failed once more; the last exit code, and what the second run said."""
    (folder / "pyproject.toml").write_text('[tool.pytest.ini_options]\ncache_dir = ".cache/pytest"\n')
    for number, text in enumerate(tests):
        (folder / f"test_{number}.py").write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}

    def python(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", *words], cwd=folder, env=environment, capture_output=True, text=True
        )

    again = python("tests.alone", str(python("pytest").returncode))
    return again.returncode, again.stdout


@pytest.mark.parametrize(
    ("tests", "code", "said"),
    [
        ([FAILS, FAILS_ONCE], 1, "once more, alone: test_0.py::test_it, test_1.py::test_it"),
        ([FAILS_ONCE], 0, "FAILED BESIDE OTHER TESTS, PASSED ALONE, to be mended: test_0.py::test_it"),
        ([FAILS_ONCE] * 4, 1, ""),
        (["import nothing_of_this_name\n"], 2, ""),
    ],
    ids=["fails alone too", "passes alone", "four at once", "cannot be imported"],
)
def test_only_what_passes_alone_is_no_failure(tmp_path: Path, tests: list[str], code: int, said: str) -> None:
    found, printed = suite(tmp_path, tests)
    assert found == code
    assert said in printed
    assert ("alone" in printed) == bool(said)
