"""Check of the number of file descriptors that a run needs. With too few, libraries fail with misleading errors, such
as SQLite's "unable to open database file"."""

from __future__ import annotations

import resource

from stretto.core.errors import Problem, RecipeError
from stretto.processes.tree import open_descriptors

_CONDUCTOR = 32  # its libraries, ledger, logs, locks and event loop
_ENGINE, _RANK, _REWARD_WORKER, _GROUP = 6, 4, 2, 1  # wires, logs, heartbeats; the connection of a group in flight
_AGENT = 3  # its program's output, and its connection; a service's connections
_GUEST = 4  # an engine that joins: its machine's wire, log, counters and tokens; groups in flight count beside it


def descriptors_needed(
    *, engines: int = 1, ranks: int = 1, reward_workers: int = 1, groups: int = 1, agents: int = 0
) -> int:
    """Return the most file descriptors that the conductor will have open at once; no other process has more. Arguments
    are numbers of processes; `groups`: most groups in flight; `agents`: most programs of agents at once."""
    roles = _ENGINE * engines + _RANK * ranks + _REWARD_WORKER * reward_workers
    return _CONDUCTOR + roles + _GROUP * groups + _AGENT * agents


def no_room_for(guests: int) -> str:
    """Return why this process has too few free descriptors for `guests` more engines; "" if it has enough."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    left = allowed - len(open_descriptors())
    if allowed == resource.RLIM_INFINITY or left >= _GUEST * guests:
        return ""
    return (
        f"the run may open {max(left, 0)} more file descriptors, and {guests} more engine(s) need {_GUEST * guests}: "
        "it has to be started with a higher ulimit -n"
    )


def check_descriptors(needed: int | None = None) -> None:
    """Check that this process may open `needed` descriptors (None: as many as the smallest run needs). Raises
    RecipeError if it may not; has both numbers."""
    needed = descriptors_needed() if needed is None else needed
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed != resource.RLIM_INFINITY and allowed < needed:
        found = f"{allowed} may be open at once, and the run needs {needed}"
        raise RecipeError([Problem("file descriptors", found, f"allow them: ulimit -n {needed}")])
