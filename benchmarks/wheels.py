"""Does the wheel of stretto work by itself, in an empty environment of each given Python?

    python -m benchmarks.wheels python3.11 python3.12 ...      needs gigabytes and minutes

The wheel is built from this tree. Each environment contains only the wheel and the newest dependencies that its
metadata allows; in it, every module is imported and a small run trains three steps, outside of the repository.
`make test-lowest` tests the lowest versions.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import Table, save
from tests.lowest import IMPORTS, RECIPE, ROOT

_SECONDS = 3600


def run(*words: str | Path, **where: str) -> str:
    """Run a command and return its output.

    Raises:
        RuntimeError: the command failed; the message ends with the last lines of its output.
    """
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, words)),
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        env=clean | {"OMP_NUM_THREADS": "1"},
        cwd=where.get("cwd", "/"),
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, words[:4]))} ended with {done.returncode}: {done.stderr[-600:]}")
    return done.stdout


def tried(interpreter: str, wheels: Sequence[Path], folder: Path) -> dict[str, str]:
    """Test the wheels with one interpreter, and return the results."""
    version = run(interpreter, "-c", "import platform; print(platform.python_version())").strip()
    try:
        run(interpreter, "-m", "venv", "--clear", folder / "venv")
        python = folder / "venv" / "bin" / "python"
        run(python, "-m", "pip", "install", "--quiet", *wheels)
        run(python, "-c", IMPORTS)
        (folder / "recipe.toml").write_text(RECIPE)
        run(folder / "venv" / "bin" / "stretto", "train", "recipe.toml", "--run-dir", "run", cwd=str(folder))
        torch = run(python, "-c", "import torch; print(torch.__version__)").strip()
    except (RuntimeError, subprocess.TimeoutExpired) as failure:
        return {"python": version, "result": str(failure)}
    return {"python": version, "result": "works", "torch": torch}


def main(interpreters: Sequence[str]) -> None:
    table, rows = Table("python", "result"), []
    with tempfile.TemporaryDirectory(prefix="stretto-wheels-") as parent:
        run(
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--wheel-dir",
            parent,
            *(path.parent for path in ROOT.glob("packages/*/pyproject.toml")),
            ROOT,
        )
        wheels = sorted(Path(parent).glob("stretto*.whl"))
        for number, interpreter in enumerate(interpreters):
            folder = Path(parent) / str(number)
            folder.mkdir()
            rows.append(tried(interpreter, wheels, folder))
            table.add(rows[-1]["python"], rows[-1]["result"])
            table.show_last()
            save("wheels", {"rows": rows})


if __name__ == "__main__":
    main(sys.argv[1:])
