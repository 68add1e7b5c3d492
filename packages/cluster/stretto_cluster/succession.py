"""Guarantee of a single conductor per run, even if its folder was copied.

Each copy of a run folder has its own lock, but the run's name, its token, and the address of its last conductor are the
same. So a resume first looks for a conductor at that address, and later informs one that comes back. The newer
conductor stays, the older one ends. Machines help: each remembers the newest conductor that it has served
(`messages.Join`).
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec

from stretto.core.deadlines import deadline
from stretto.core.errors import (
    UNREADABLE,
    DeadlineExceeded,
    HandshakeBroken,
    HandshakeRefused,
    MachineLost,
    Problem,
    RecipeError,
    RunFolderError,
    StrettoError,
    WireError,
)
from stretto.loop.records.totals import Tenure
from stretto.processes.http.tls import client_context
from stretto_cluster.address import JOIN, JoinFile, recorded_join_file
from stretto_cluster.handshake import call
from stretto_cluster.messages import TENURE, Look
from stretto_cluster.wire import Wire, connect

UNIX = "unix:"  #: prefix of an address on this machine
_SECONDS = 5.0
_PAUSE_SECONDS = 5.0
_SEARCH_SECONDS = 24 * 3600.0  # after a longer network partition, both conductors go on


class RunSuperseded(StrettoError):
    """Raised if a newer conductor continues the run from a copy of its folder, so that this conductor ends.

    `epoch` and `address`: those of the newer conductor; the address is "" if unknown.
    """

    def __init__(self, run: str, epoch: int, address: str) -> None:
        self.run, self.epoch, self.address = run, epoch, address
        super().__init__(run, epoch, address)

    def __str__(self) -> str:
        where = f" at {self.address}" if self.address else ""
        return (
            f"a newer conductor continues run {self.run}{where} (epoch {self.epoch}), from a copy of its folder: "
            "this one ends"
        )


async def assert_alone(folder: Path, tls: str) -> None:
    """Check that no other conductor of the run replies at its known addresses. Does nothing for a run that never had a
    gate. `tls`: folder of certificates, "" for none.

    Raises:
        RunFolderError: a conductor is alive, so `folder` is a copy; or a newer conductor has continued the run from a
            copy of this folder; or its join file is damaged.
        RecipeError: a certificate is missing or invalid.
    """
    known = recorded_join_file(folder)
    if known is None:  # the run was killed before it had a gate
        return
    places = [address for address in (known.control, known.address, *known.before) if address]
    lives = await asyncio.gather(*(_lives(known, address, tls) for address in places))
    own_run = f"remove {JOIN} from this one, which is then a run of its own"
    if living := [address for address, alive in zip(places, lives, strict=True) if alive]:
        where = "on this machine" if living[0].startswith(UNIX) else f"at {living[0]}"
        found = f"is a copy of the folder of run {known.run}, whose conductor lives {where}"
        raise RunFolderError([Problem(str(folder), found, f"stop that one first; or {own_run}")])
    if known.superseded:
        found = f"a newer conductor (epoch {known.superseded}) has continued run {known.run}, from a copy of it"
        raise RunFolderError([Problem(str(folder), found, f"go on with that copy; or {own_run}")])


async def tell(known: JoinFile, before: str, tenure: Tenure, tls: str, seconds: float = _SEARCH_SECONDS) -> str:
    """Inform the conductor at `before` that a newer one, with this `tenure`, continues the run. Return a sentence about
    the outcome; "" if no conductor is left at that address of this machine, or it is this one. `known`: the run's join
    file; `tls`: folder of certificates; "": no TLS.

    It tries for `seconds`, because that conductor may come back after a network partition.

    Raises:
        RunSuperseded: the other conductor is the newer one.
        DeadlineExceeded: it was not found.
    """
    look, end = Look(known.run, tenure, known.address or known.control), time.monotonic() + seconds
    while time.monotonic() < end:
        theirs: Tenure | None = None
        try:
            theirs = await _asked(known, before, tls, look)
        except MachineLost:
            if before.startswith(UNIX):  # even a suspended process on this machine would accept the connection
                return ""
        except RecipeError:
            pass  # our certificates cannot be read now: they are being renewed, say, in a run that goes on well
        except HandshakeRefused as other:
            return f"nobody at {before} can be told that this conductor has the run now: {other}"
        if theirs is not None:
            if theirs > tenure:
                raise RunSuperseded(known.run, theirs.epoch, before)
            told = f"the conductor at {before}, which continued another copy of this run, was told to end"
            return told if theirs < tenure else ""  # it is this one, at another of its addresses
        await asyncio.sleep(min(_PAUSE_SECONDS, seconds))
    raise DeadlineExceeded("the conductor", f"the one at {before}, to tell it that the run is here now", seconds)


async def _lives(known: JoinFile, address: str, tls: str) -> bool:
    try:
        return await _asked(known, address, tls, Look(known.run)) is not None
    except (MachineLost, HandshakeRefused):
        return False


async def _asked(known: JoinFile, address: str, tls: str, look: Look) -> Tenure | None:
    """Ask the conductor of the run at `address` for its tenure (its age among the conductors of the run), by sending
    `look`; None if it does not reply, or is about to end. `known`: join file, with the token; `tls`: folder of
    certificates, "" for none. Raises MachineLost if nothing listens there, RecipeError for a wrong certificate of ours,
    and HandshakeRefused for another run, token or protocol."""
    try:
        reader, writer = await connect(address, None if address.startswith(UNIX) else client_context(tls))
    except DeadlineExceeded:
        return None
    wire: Wire[Tenure] = Wire(reader, writer, TENURE)
    try:
        said = msgspec.msgpack.encode(look)
        await call(reader, writer, known.token, said, peer=address, seconds=_SECONDS)
        async with deadline("the conductor", f"a word of the one at {address}", _SECONDS):
            return await wire.receive()
    except (HandshakeBroken, DeadlineExceeded):
        return None
    except HandshakeRefused:
        raise
    except (WireError, *UNREADABLE) as error:
        raise HandshakeRefused(address, f"speaks another language: {error}") from None
    finally:
        wire.cut()
