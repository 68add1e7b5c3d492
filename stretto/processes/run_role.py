"""How a role's process ends: well, without its conductor, or with an error that it reports to the conductor."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable

from stretto.core.errors import RoleFailed, StrettoError, described
from stretto.core.records import Record
from stretto.processes.channel import ConductorGone


def run_role(part: Callable[[], None], tell: Callable[[Failed], None]) -> int:
    """Run `part`; the exit code of the process. The traceback of an error goes to the role's log."""
    try:
        part()
    except ConductorGone:
        return 0
    except StrettoError as error:
        return _failed(str(error), error.exit_code, tell)
    except OSError as error:
        return _failed(described(error), RoleFailed.exit_code, tell)
    return 0


def _failed(problem: str, exit_code: int, tell: Callable[[Failed], None]) -> int:
    traceback.print_exc()
    with contextlib.suppress(ConductorGone):  # the log has it
        tell(Failed(problem=problem, exit_code=exit_code))
    return exit_code


class Failed(Record, frozen=True, tag=True):
    """The role cannot go on. `problem` is meant for the user; the traceback is in the role's log."""

    problem: str
    exit_code: int
