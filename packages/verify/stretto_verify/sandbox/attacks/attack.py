"""Attacks on a sandbox: programs that try to reach something outside it, and how their success is detected.

An attack succeeds if it prints THROUGH or leaves its mark on the host. `$PORT`, `$ABSTRACT`, `$SECRET`, `$OWN`,
`$MARK`, `$GRADER` and `$NEIGHBOUR` stand for the baits of `probe.Baits`.
"""

from __future__ import annotations

from dataclasses import dataclass

from stretto_verify.sandbox.walls import Level

THROUGH = b"THROUGH"


@dataclass(frozen=True)
class Attack:
    """One attack. `stopped_by`: the weakest level of sandbox that must stop it."""

    name: str
    program: str
    stopped_by: Level = Level.D
    seconds: float = 2.0


#: Beginning of programs that make system calls by number, on Intel and on ARM.
CALLS = """
import ctypes, os, platform
libc = ctypes.CDLL(None, use_errno=True)
intel = platform.machine() == 'x86_64'
def call(intel_number, arm_number, *arguments):
    return libc.syscall(intel_number if intel else arm_number, *arguments)
"""
