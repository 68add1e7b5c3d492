"""Find the strongest walls that hold on this machine, by attacking its own sandbox.

Kernel, container and configuration decide in too many ways which walls are possible. So each rung of the ladder is
tried, from the strongest, with all attacks and one honest program. The first rung that holds is used.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from string import Template
from typing import Self

from stretto_verify.sandbox.attacks import ATTACKS, HONEST
from stretto_verify.sandbox.attacks_on_limits import THROUGH, Attack
from stretto_verify.sandbox.config import SandboxConfig
from stretto_verify.sandbox.sandbox import ProgramEnd, Sandbox, SandboxFailed
from stretto_verify.sandbox.walls import Level, Walls, ladder
from stretto_verify.verdicts import Record, SandboxRefused

_DAEMON_SECONDS = 0.5  # the attack's daemon needs 0.3 s to leave its mark


class _Finding(Record, frozen=True):
    """Result of one `attack` (its name) on the walls of one rung: whether they `stopped` it, and in `seen` the end of
    the program's output and how it ended."""

    attack: str
    stopped: bool
    seen: str


class _Rung(Record, frozen=True):
    """Walls of a `level` that were tried: the findings of the attacks, or the `problem` that prevented or ended them,
    else "". `warm`: one guest ran all programs."""

    level: str
    warm: bool
    problem: str
    findings: tuple[_Finding, ...] = ()

    @property
    def holds(self) -> bool:
        return not self.problem and all(finding.stopped for finding in self.findings)

    def __str__(self) -> str:
        if self.problem:
            return f"level {self.level}: {self.problem}"
        through = [finding.attack for finding in self.findings if not finding.stopped]
        how = f"{', '.join(through)} got through" if through else f"{len(self.findings)} attacks stopped"
        return f"level {self.level} ({'warm' if self.warm else 'cold'}): {how}"


class Report(Record, frozen=True):
    """All rungs (walls of a sandbox) that were tried, strongest first. The last one is used."""

    rungs: tuple[_Rung, ...]

    @property
    def level(self) -> Level:
        return Level(self.rungs[-1].level)

    def __str__(self) -> str:
        taken, *others = dict.fromkeys(str(rung) for rung in reversed(self.rungs))
        return "; not ".join([f"sandbox {taken}", *others])


class Baits:
    """Targets of attacks (context manager): a listening port, an abstract socket, a secret file, a path for a mark, a
    process."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        name = f"stretto-{secrets.token_hex(8)}"
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="stretto-baits-", dir="/tmp")))
        folder.chmod(0o777)
        own = (
            Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="stretto-baits-", dir="/dev/shm")))
            / "own"
        )
        own.touch()
        secret = folder / "secret"
        secret.write_text("the answer is 42", encoding="utf-8")
        secret.chmod(0o644)
        self.mark = folder / "mark"
        tcp = self._stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        abstract = self._stack.enter_context(socket.socket(socket.AF_UNIX))
        abstract.bind(f"\0{name}")
        abstract.listen()
        null, bait = subprocess.DEVNULL, {"STRETTO_BAIT": name}
        neighbour = subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, stdout=null, stderr=null, env=bait)
        self._stack.enter_context(neighbour)
        self._values = {
            "PORT": tcp.getsockname()[1],
            "ABSTRACT": name,
            "SECRET": secret,
            "OWN": own,
            "MARK": self.mark,
            "GRADER": os.getpid(),
            "NEIGHBOUR": neighbour.pid,
        }
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def lay(self, program: str) -> str:
        """Return the program with the addresses of the baits in place of ``$PORT`` and the like. Removes an earlier
        mark."""
        self.mark.unlink(missing_ok=True)
        return Template(program).safe_substitute(self._values)


def try_attack(sandbox: Sandbox, attack: Attack, baits: Baits) -> _Finding:
    """Run one attack in the sandbox, and return the finding. An attack that ends without its aim counts as stopped.

    Raises:
        SandboxFailed: the sandbox did not survive the attack, or could not run it.
    """
    ended = sandbox.run({"source": baits.lay(attack.program)}, b"", attack.seconds)
    if "$MARK" in attack.program and "fork" in attack.program:
        until = time.monotonic() + _DAEMON_SECONDS
        while time.monotonic() < until and not baits.mark.exists():
            time.sleep(0.02)
    through = THROUGH in ended.output or baits.mark.exists()
    return _Finding(attack=attack.name, stopped=not through, seen=_seen(ended))


def _seen(ended: ProgramEnd) -> str:
    return f"{ended.output[-100:].decode(errors='replace').strip()} {ended.how}".strip()


def try_rung(walls: Walls, config: SandboxConfig, attacks: Sequence[Attack] = ATTACKS) -> _Rung:
    """Set up these walls, check that an honest program works, and run the attacks that their level must stop, until one
    gets through. Never raises `SandboxFailed`; it becomes the rung's problem."""
    findings: list[_Finding] = []
    problem = ""
    try:
        with Sandbox(walls, config) as sandbox, Baits() as baits:
            honest = sandbox.run({"source": HONEST}, b"1 2 3", 5.0)
            if honest.output != b"12\n":
                problem = f"an honest program fails: {_seen(honest)}"
            for attack in attacks if not problem else ():
                if walls.level <= attack.stopped_by:
                    findings.append(try_attack(sandbox, attack, baits))
                    if not findings[-1].stopped:
                        break
    except SandboxFailed as failure:
        problem = str(failure)
    warm = walls.warm and config.warm
    return _Rung(level=walls.level, warm=warm, problem=problem, findings=tuple(findings))


def probe(config: SandboxConfig, attacks: Sequence[Attack] = ATTACKS) -> tuple[Walls, Report]:
    """Find the strongest walls that hold on this machine, and return them with the report of all rungs tried. It takes
    seconds.

    Raises:
        SandboxRefused: only walls weaker than the configuration allows hold, or for root only level E.
    """
    rungs: list[_Rung] = []
    for walls in ladder(config.warm):
        if walls.level > config.lowest_level and not (walls.level is Level.E and config.unsafe):
            break
        rungs.append(try_rung(walls, config, attacks))
        if rungs[-1].holds and (walls.level is not Level.E or (config.unsafe and os.getuid() != 0)):
            return walls, Report(rungs=tuple(rungs))
    raise _refused(rungs, config)


def _refused(rungs: Sequence[_Rung], config: SandboxConfig) -> SandboxRefused:
    found = "; ".join(map(str, rungs)) or f"nothing is allowed by lowest_level = {config.lowest_level}"
    if config.unsafe and os.getuid() == 0:
        remedy = "unsafe = true is not for root: be another user"
    elif config.lowest_level in ("D", "E"):
        remedy = "install bubblewrap, allow user namespaces, or, if every program is harmless, set unsafe = true"
    else:
        remedy = "install bubblewrap and allow user namespaces, or set a lower lowest_level"
    return SandboxRefused(f"no safe sandbox for programs: {found}", remedy)
