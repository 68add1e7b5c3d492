r"""Verdicts on completions: mathematics by comparison with a gold answer, programs by tests in a sandbox.

from stretto_verify import judge_math, judge_program

judge_math(r"so it is \boxed{1/2}", "0.5").verdict                                      # "right"
judge_program("print(int(input()) + 1)", [{"stdin": "41", "stdout": "42"}]).verdict     # "right"
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stretto_verify.judging import ProgramJudge, judge_math, judge_program
    from stretto_verify.verdicts import Judged, SandboxRefused, Undecided

__all__ = ["Judged", "ProgramJudge", "SandboxRefused", "Undecided", "judge_math", "judge_program"]

_HOMES = {
    "Judged": "stretto_verify.verdicts",
    "ProgramJudge": "stretto_verify.judging",
    "SandboxRefused": "stretto_verify.verdicts",
    "Undecided": "stretto_verify.verdicts",
    "judge_math": "stretto_verify.judging",
    "judge_program": "stretto_verify.judging",
}


def __getattr__(name: str) -> object:
    """Value of an offered name; AttributeError for others. Its module is imported when it is first used, so that the
    sandbox alone loads no computer algebra."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


__version__ = "0.1.0"
