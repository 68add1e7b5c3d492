"""Whether stretto works with the lowest versions that `pyproject.toml` allows of what it names itself.

    make test-lowest          gigabytes and minutes: no part of the other checks

uv resolves the dependencies and the extras below to their lowest versions (what they need themselves is the newest that
fits), in an environment of its own in the user's cache. There every module of all packages is imported, and a small run
trains three steps. A bound that is too low ends here with the name that an old version lacks."""

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.peers.environment import UV
from stretto.core.machine import cache_folder

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ("data", "grammars", "reasoning")
SECONDS = 3600

PACKAGES = [init.parent.name for where in ("application", "packages/*") for init in ROOT.glob(f"{where}/*/__init__.py")]
IMPORTS = """
import importlib, pkgutil, sys
broken = []
packages = [(one.__path__, f"{one.__name__}.") for one in map(importlib.import_module, sys.argv[1:])]
for module in (module for package in packages for module in pkgutil.walk_packages(*package)):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except ImportError as error:
        broken.append(f"{module.name}: {error}")
sys.exit("\\n".join(broken) or 0)
"""
RECIPE = """
[model.build]
alphabet = "0123456789+-="
context_length = 64
[task]
kind = "arithmetic"
operands_max = 4
held_out = 16
[warm_start]
steps = 5
[sampling]
max_tokens = 16
[rollout]
batch_size = 2
group_size = 2
[trainer]
steps = 3
[evaluation]
prompts = 8
"""


def environment() -> Path:
    """The interpreter of the environment, made unless it is there for the same `pyproject.toml` of every package."""
    projects = [ROOT / "pyproject.toml", *sorted(ROOT.glob("packages/*/pyproject.toml"))]
    project = "".join(one.read_text(encoding="utf-8") for one in projects)
    key = hashlib.sha256(f"{project}{UV}{sys.version}".encode()).hexdigest()[:12]
    folder = cache_folder() / "environments" / f"lowest-{key}"
    python, versions = folder / "bin" / "python", folder / "lowest.txt"
    if not (folder / "made").exists():
        run(sys.executable, "-m", "venv", "--clear", folder)
        run(python, "-m", "pip", "install", "--quiet", f"uv=={UV}")
        uv, extras = folder / "bin" / "uv", [word for extra in EXTRAS for word in ("--extra", extra)]
        resolve: list[str | Path] = [
            "pip", "compile", "--quiet", "--resolution", "lowest-direct", "--python", python, *extras,
        ]  # fmt: skip
        run(uv, *resolve, "--output-file", versions, *projects)
        run(uv, "pip", "install", "--quiet", "--python", python, "--requirement", versions)
        (folder / "made").touch()
    return python


def run(*command: str | Path) -> None:
    surroundings = {
        **os.environ,
        "PYTHONPATH": ":".join(map(str, (ROOT, ROOT / "application", *ROOT.glob("packages/*")))),
        "MPLBACKEND": "agg",
    }
    subprocess.run(list(map(str, command)), check=True, cwd=ROOT, env=surroundings, timeout=SECONDS)


def main() -> None:
    python = environment()
    run(python, "-c", IMPORTS, *PACKAGES)
    with tempfile.TemporaryDirectory(prefix="stretto-lowest-") as folder:
        recipe = Path(folder) / "recipe.toml"
        recipe.write_text(RECIPE, encoding="utf-8")
        run(python, "-m", "stretto", "train", recipe, "--run-dir", Path(folder) / "run")
        run(python, "-m", "stretto", "check", Path(folder) / "run")
    print("the lowest versions hold")


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as failed:
        sys.exit(f"with the lowest versions that pyproject.toml allows: {' '.join(failed.cmd)[:200]} failed")
