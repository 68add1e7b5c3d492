"""Environment of a peer or engine: its own packages, built once in the user's cache and reused until its pins change.

Peers never share stretto's environment: they keep their own pins, and a comparison must not force either side to
change.

    python benchmarks/peers/environment.py PEER    builds it and prints the path of its interpreter

PEER is one of trl, vllm, sglang, openvino, llamacpp, verifiers, agents, worlds, outlets, ray and tinker. llamacpp is
compiled from source, which needs a C++ compiler and some minutes of a core.

Beside this file: ``requirements-<peer>.txt``; ``requirements-<peer>-alone.txt``, packages whose own pins are wrong for
this machine, installed without their dependencies; ``overlay/<peer>``, files copied over the installed packages.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.core.machine import cache_folder

HERE = Path(__file__).resolve().parent
TORCH = "2.13.0"
UV = "0.13.9"
_WITHOUT_TORCH = frozenset({"agents", "llamacpp", "outlets", "ray", "verifiers", "worlds"})
#: What is left out of a library that is built.
_BUILT = {"CMAKE_ARGS": f"-DLLAVA_BUILD=OFF -DCMAKE_PROJECT_llama.cpp_INCLUDE={HERE / 'llamacpp.cmake'}"}
_PACKAGES = "import sysconfig; print(sysconfig.get_path('purelib'))"
#: Packages whose bytecode is written when the environment is made.
_COMPILED = ("vllm", "sglang", "transformers", "torch", "sympy", "fastapi", "pydantic", "openai", "numba")


class PeerUnavailable(RuntimeError):
    """A peer's environment cannot be built, or its script failed; the message ends with the last lines of the program's
    output."""


@dataclass(frozen=True)
class Environment:
    """One virtual environment. Its name is the peer and a hash of the files that it is built from, so other pins give
    another environment."""

    peer: str

    @property
    def folder(self) -> Path:
        return cache_folder() / "environments" / f"{self.peer}-{self._fingerprint()}"

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def requirements(self) -> Path:
        return HERE / f"requirements-{self.peer}.txt"

    @property
    def _alone(self) -> Path:
        return HERE / f"requirements-{self.peer}-alone.txt"

    @property
    def _overlay(self) -> Path:
        return HERE / "overlay" / self.peer

    @property
    def _made(self) -> Path:
        return self.folder / "made"

    def _fingerprint(self) -> str:
        files = [self.requirements, self._alone, *sorted(self._overlay.rglob("*.py"))]
        parts = [TORCH, sys.version.split()[0], *(file.read_text() for file in files if file.exists())]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]

    def ready(self) -> bool:
        """Whether the environment exists, complete, and built from the current pins."""
        return self._made.exists()

    def ensure(self) -> Path:
        """Build the environment unless it is ready, and return the path of its interpreter. Waits if another process is
        building it.

        Raises:
            PeerUnavailable: a package could not be installed; says which, with the installer's output.
        """
        if not self.ready():
            with _alone_here(self.folder.with_suffix(".lock")):
                if not self.ready():
                    self._make()
        return self.python

    def _make(self) -> None:
        _run([sys.executable, "-m", "venv", "--clear", str(self.folder)])
        self._pip(f"uv=={UV}")
        if self.peer not in _WITHOUT_TORCH:
            self._install_torch()
        self._uv("--requirement", str(self.requirements))
        if shutil.which("nvidia-smi") is None:  # what uv finds is built for CUDA, and raises beside torch's CPU build
            _run([str(self.folder / "bin" / "uv"), "pip", "uninstall", "--python", str(self.python), "torchvision"])
        if self._alone.exists():
            self._uv("--no-deps", "--requirement", str(self._alone))
        if self._overlay.exists():
            packages = _run([str(self.python), "-c", _PACKAGES])
            shutil.copytree(self._overlay, packages.strip(), dirs_exist_ok=True)
        self._compile(Path(_run([str(self.python), "-c", _PACKAGES]).strip()))
        self._made.touch()

    def _compile(self, packages: Path) -> None:
        """Compile to bytecode in two processes; otherwise a starting server would compile for minutes, in one."""
        folders = [str(packages / name) for name in _COMPILED if (packages / name).is_dir()]
        _run([str(self.python), "-m", "compileall", "-q", "-j", "2", *folders], check=False)

    def measure(self, script: Path, *words: str, threads: int, seconds: float) -> dict[str, Any]:
        """Run a script of this folder with the peer's interpreter, and return the JSON object in the last line of its
        output.

        Raises:
            PeerUnavailable: the environment cannot be built, or the script failed; says why.
            subprocess.TimeoutExpired: the script took longer than `seconds`.
        """
        # Variables that steer torch's thread pools must be there before torch is imported.
        surroundings = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        command = [str(self.ensure()), str(script), "--threads", str(threads), *words]
        output = _run(command, seconds=seconds, surroundings=surroundings)
        measured: dict[str, Any] = json.loads(output.splitlines()[-1])
        return measured

    def _install_torch(self) -> None:
        """Install torch: the CPU build if there is no NVIDIA driver and an index offers it, otherwise the standard
        build."""
        if shutil.which("nvidia-smi") is None:
            try:
                self._pip(f"torch=={TORCH}+cpu")
            except PeerUnavailable:
                pass
            else:
                return
        self._pip(f"torch=={TORCH}")

    def _pip(self, *arguments: str) -> None:
        # Unlike uv, pip would compile every file: half of the time, and for files that are never imported.
        pip = [str(self.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
        _run([*pip, *arguments])

    def _uv(self, *arguments: str) -> None:
        """Install with uv, which is eight times as fast as pip here. uv does not read pip's settings, so the index is
        passed to it."""
        settings = _run([str(self.python), "-m", "pip", "config", "list"]).splitlines()
        index = [
            line.partition("=")[2].strip("'\"") for line in settings if "index-url=" in line and "extra" not in line
        ]
        surroundings = {"UV_DEFAULT_INDEX": index[-1]} if index else {}
        uv = [str(self.folder / "bin" / "uv"), "pip", "install", "--quiet", "--python", str(self.python)]
        _run([*uv, *arguments], surroundings={**surroundings, **_BUILT, **os.environ})


@contextmanager
def _alone_here(lock: Path) -> Iterator[None]:
    """Hold the lock during the block, so that only one process works there. The lock is released when the process ends,
    however it ends."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _run(
    command: list[str], seconds: float = 1800, surroundings: dict[str, str] | None = None, *, check: bool = True
) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds, env=surroundings)
    if done.returncode and check:
        raise PeerUnavailable(f"{' '.join(command)} failed:\n{done.stderr.strip()[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    try:
        print(Environment(sys.argv[1]).ensure())
    except PeerUnavailable as problem:
        sys.exit(str(problem))
