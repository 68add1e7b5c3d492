"""The file descriptors of a run. Where too few are allowed, libraries say something else: SQLite, "unable to open
database file"."""

from __future__ import annotations

import resource

from stretto.core.errors import Problem, RecipeError

_CONDUCTOR = 32  # its libraries, ledger, logs, locks and event loop
_ENGINE, _RANK, _REWARD_WORKER, _GROUP = 6, 4, 2, 1  # wires, logs, heartbeats; the connection of a group in flight


def descriptors_needed(*, engines: int = 1, ranks: int = 1, reward_workers: int = 1, groups: int = 1) -> int:
    """What the conductor may have open at once, the process of a run that has the most: `groups` are in flight."""
    return _CONDUCTOR + _ENGINE * engines + _RANK * ranks + _REWARD_WORKER * reward_workers + _GROUP * groups


def check_descriptors(needed: int | None = None) -> None:
    """Refuse to start with fewer than `needed`, by default than the smallest run needs.

    Raises:
        RecipeError: with both numbers.
    """
    needed = descriptors_needed() if needed is None else needed
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed != resource.RLIM_INFINITY and allowed < needed:
        found = f"{allowed} may be open at once, and the run needs {needed}"
        raise RecipeError([Problem("file descriptors", found, f"allow them: ulimit -n {needed}")])
