"""``join.json`` of a run folder: how a machine joins the run. Imports no torch, like the whole agent."""

from __future__ import annotations

from pathlib import Path

import msgspec

from stretto.core.errors import Problem, RecipeError
from stretto.core.records import Record

JOIN = "join.json"  #: of a run folder: what a machine needs to join
PATIENCE_SECONDS = 120.0


class JoinFile(Record, frozen=True):
    """Content of ``join.json``: addresses and token of a run, for machines that see its folder, and for `stretto
    scale`."""

    run: str
    token: str
    address: str = ""  # of the gate for other machines; "" if none can join
    control: str = ""  # of the gate for commands on the machine of the run
    tls: str = ""  # folder of certificates, where the run sees it; "" for none
    patience: float = PATIENCE_SECONDS  # how long the reply to `stretto scale` may take
    before: tuple[str, ...] = ()  # where other conductors have had the run, here or from a copy, that were not told yet
    superseded: int = 0  # the epoch of a newer conductor, which runs from a copy of the folder; 0: none known


def read_join_file(folder: Path) -> JoinFile:
    """Read the join file of a run.

    Raises:
        RecipeError: the run is not running, or the file is not readable for us.
    """
    try:
        return msgspec.json.decode((folder / JOIN).read_bytes(), type=JoinFile)
    except (OSError, msgspec.MsgspecError) as error:
        found = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise RecipeError([Problem(str(folder / JOIN), found, "give the folder of a run that is going on")]) from None
