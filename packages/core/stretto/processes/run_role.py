"""Main function of a role's process: ends it normally, when the conductor is gone, or with a reported error."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable
from pathlib import Path

from stretto.core.errors import OutOfMemory, RoleDied, RoleFailed, StrettoError, UserError, described
from stretto.core.records import Record
from stretto.processes.channel import ConductorGone
from stretto.processes.spawn import describe_exit

_LAST_BYTES = 1 << 16  # of a log


def run_role(part: Callable[[], None], tell: Callable[[Failed], None]) -> int:
    """Run `part`; returns the exit code, 0 also if the conductor is gone. For a StrettoError or OSError, the traceback
    goes to the role's log, and `tell` is called with the message for the conductor."""
    try:
        part()
    except ConductorGone:
        return 0
    except StrettoError as error:
        return _failed(str(error), error.exit_code, tell, again=isinstance(error, OutOfMemory))
    except OSError as error:
        return _failed(described(error), RoleFailed.exit_code, tell)
    return 0


def _failed(problem: str, exit_code: int, tell: Callable[[Failed], None], *, again: bool = False) -> int:
    traceback.print_exc()
    with contextlib.suppress(ConductorGone):  # the log has it
        tell(Failed(problem=problem, exit_code=exit_code, again=again))
    return exit_code


def users_mistake(death: RoleDied) -> RoleFailed | None:
    """Convert the end of a role with the exit code of a UserError to a RoleFailed. Its message is the text after
    ``ROLE: `` at the end of the role's log. None for another end, or if the log has no such line."""
    if death.how != describe_exit(UserError.exit_code):
        return None
    try:
        with Path(death.log).open("rb") as log:
            log.seek(max(0, log.seek(0, 2) - _LAST_BYTES))
            said = "\n" + log.read().decode(errors="replace")
    except OSError:  # the log is gone: how it ended is all that is known
        return None
    _, found, problem = said.rpartition(f"\n{death.role}: ")
    return RoleFailed(death.role, problem.strip(), UserError.exit_code) if found else None


class Failed(Record, frozen=True, tag=True):
    """Message: the role cannot continue. `problem` is meant for the user; the traceback is in the role's log.
    `again`: a new process may succeed, as after a device that was out of memory."""

    problem: str
    exit_code: int
    again: bool = False
