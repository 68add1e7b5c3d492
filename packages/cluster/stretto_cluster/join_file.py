"""``join.json`` of a run folder: address and token for machines that join the run. Imports no torch."""

from __future__ import annotations

from pathlib import Path

import msgspec

from stretto.core.errors import UNREADABLE, Problem, RecipeError
from stretto.core.records import Record

JOIN = "join.json"  #: its name in the run folder
PATIENCE_SECONDS = 120.0


class JoinFile(Record, frozen=True):
    """Content of ``join.json``: addresses and token of a run, for machines that can read its folder, and for `stretto
    scale`."""

    run: str
    token: str
    address: str = ""  # address of the gate for other machines; "" if none can join
    control: str = ""  # address of the gate for commands on the run's own machine
    tls: str = ""  # folder of certificates, as a path on the run's machine; "" for none
    patience: float = PATIENCE_SECONDS  # seconds that the reply to `stretto scale` may take
    before: tuple[str, ...] = ()  # addresses of earlier conductors, which were not informed yet
    superseded: int = 0  # epoch of a newer conductor, which uses a copy of the folder; 0: none


def read_join_file(folder: Path) -> JoinFile:
    """Read the join file of a run.

    Raises:
        RecipeError: the run is not running, or this user cannot read the file.
    """
    try:
        return msgspec.json.decode((folder / JOIN).read_bytes(), type=JoinFile)
    except (OSError, *UNREADABLE) as error:
        found = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise RecipeError([Problem(str(folder / JOIN), found, "give the folder of a run that is going on")]) from None
