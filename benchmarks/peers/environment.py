"""The environment of a peer: its own packages, made once under `benchmarks/.envs`, reused while its pins are unchanged.

Peers never share stretto's environment: their pins are theirs, and a comparison must not bend either side.

    python benchmarks/peers/environment.py trl        prints the path of the peer's interpreter
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ENVIRONMENTS = HERE.parent / ".envs"
TORCH = "2.13.0"


class PeerUnavailable(RuntimeError):
    """A peer's environment cannot be made; the message ends with pip's last words."""


@dataclass(frozen=True)
class Environment:
    """One virtual environment, named after its peer; what goes in is ``requirements-<peer>.txt`` beside this file."""

    peer: str

    @property
    def folder(self) -> Path:
        return ENVIRONMENTS / self.peer

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def requirements(self) -> Path:
        return HERE / f"requirements-{self.peer}.txt"

    @property
    def _stamp(self) -> Path:
        return self.folder / "made-from"

    @property
    def _alone(self) -> Path:
        """Packages whose own pins are wrong for this machine, installed last and without what they ask for."""
        return HERE / f"requirements-{self.peer}-alone.txt"

    def _fingerprint(self) -> str:
        pins = [path.read_text() for path in (self.requirements, self._alone) if path.exists()]
        return hashlib.sha256("\n".join([TORCH, *pins]).encode()).hexdigest()

    def ready(self) -> bool:
        """Whether the environment is there and was made from the pins as they stand."""
        return self._stamp.is_file() and self._stamp.read_text() == self._fingerprint()

    def ensure(self) -> Path:
        """Make the environment unless it is ready; the path of its interpreter.

        Raises:
            PeerUnavailable: pip could not install a package, with what it said.
        """
        if not self.ready():
            _run([sys.executable, "-m", "venv", "--clear", str(self.folder)])
            self._install_torch()
            self._pip("--requirement", str(self.requirements))
            if self._alone.exists():
                self._pip("--no-deps", "--requirement", str(self._alone))
            self._stamp.write_text(self._fingerprint())
        return self.python

    def measure(self, script: Path, *words: str, threads: int, seconds: float) -> dict[str, Any]:
        """Run a script of this folder under the peer's interpreter: the JSON object of its last line.

        Raises:
            PeerUnavailable: the environment cannot be made, or the script failed, with what it said.
            subprocess.TimeoutExpired: it took longer than `seconds`.
        """
        # Variables that steer torch's thread pools must be there before torch is imported.
        surroundings = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        command = [str(self.ensure()), str(script), "--threads", str(threads), *words]
        output = _run(command, seconds=seconds, surroundings=surroundings)
        measured: dict[str, Any] = json.loads(output.splitlines()[-1])
        return measured

    def _install_torch(self) -> None:
        """The CPU build where there is no NVIDIA driver and an index offers it, the standard build otherwise."""
        if shutil.which("nvidia-smi") is None:
            try:
                self._pip(f"torch=={TORCH}+cpu")
            except PeerUnavailable:
                pass
            else:
                return
        self._pip(f"torch=={TORCH}")

    def _pip(self, *arguments: str) -> None:
        _run([str(self.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments])


def _run(command: list[str], seconds: float = 1800, surroundings: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds, env=surroundings)
    if done.returncode:
        raise PeerUnavailable(f"{' '.join(command)} failed:\n{done.stderr.strip()[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    print(Environment(sys.argv[1]).ensure())
