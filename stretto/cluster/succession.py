"""One conductor for each run, though its folder was copied.

A run folder has a lock, and a copy has one of its own. But both have the run's name and token, and the address at
which its last conductor was: who goes on with a copy looks there first, and later tells a conductor that comes back.
The newer one stays. Machines carry the word too: each remembers the newest conductor that it has served
(`cluster.messages.Join`).
"""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path

import msgspec

from stretto.cluster.join_file import JOIN, JoinFile, read_join_file
from stretto.cluster.messages import TENURE, Look, Tenure
from stretto.core.deadlines import deadline
from stretto.core.errors import (
    DeadlineExceeded,
    HandshakeRefused,
    MachineLost,
    Problem,
    RecipeError,
    RunFolderError,
    StrettoError,
    WireError,
)
from stretto.processes.handshake import call
from stretto.processes.tls import client_context
from stretto.processes.wire import Wire, connect

_SECONDS = 5.0
_PAUSE_SECONDS = 5.0


class RunSuperseded(StrettoError):
    """A newer conductor goes on with the run, from a copy of its folder: this one ends, so that there is one.

    `epoch` and `address` are those of the newer one; an address is not always known ("").
    """

    def __init__(self, run: str, epoch: int, address: str) -> None:
        self.run, self.epoch, self.address = run, epoch, address
        super().__init__(run, epoch, address)

    def __str__(self) -> str:
        where = f" at {self.address}" if self.address else ""
        return (
            f"a newer conductor goes on with run {self.run}{where} (epoch {self.epoch}), from a copy of its folder: "
            "this one ends"
        )


def next_tenure(before: Tenure | None) -> Tenure:
    """That of a conductor that begins where `before` was the last one."""
    return Tenure(epoch=1 if before is None else before.epoch + 1, conductor=secrets.token_hex(8))


async def assert_alone(folder: Path, tls: str) -> None:
    """Look where the run's conductors have been; `tls` is the folder of certificates, "" for none.

    Raises:
        RunFolderError: one of them is alive, and has another folder: this one is a copy.
    """
    try:
        known = read_join_file(folder)
    except RecipeError:  # it was killed before it had a gate
        return
    places = [address for address in (known.control, known.address, *known.before) if address]
    tenures = await asyncio.gather(*(_asked(known, address, tls, Look(known.run)) for address in places))
    living = [address for address, tenure in zip(places, tenures, strict=True) if tenure is not None]
    if living:
        where = "on this machine" if living[0] == known.control else f"at {living[0]}"
        found = f"is a copy of the folder of run {known.run}, whose conductor lives {where}"
        remedy = f"stop that one first; or remove {JOIN} from the copy, which is then a run of its own"
        raise RunFolderError([Problem(str(folder), found, remedy)])


async def tell(known: JoinFile, before: str, tenure: Tenure, tls: str) -> bool:
    """Tell the conductor at `before` that a newer one is at `known.address`; returns when it has heard it: True, or
    False where it is this one, at another of its addresses. It may come back at any time, when a network has healed
    say, so there is no deadline.

    Raises:
        RunSuperseded: it is the newer one.
    """
    while (theirs := await _asked(known, before, tls, Look(known.run, tenure, known.address))) is None:
        await asyncio.sleep(_PAUSE_SECONDS)
    if theirs > tenure:
        raise RunSuperseded(known.run, theirs.epoch, before)
    return theirs < tenure


async def _asked(known: JoinFile, address: str, tls: str, look: Look) -> Tenure | None:
    """The tenure of the run's conductor at `address`; None if there is none."""
    try:
        reader, writer = await connect(address, None if address.startswith("unix:") else client_context(tls))
    except (MachineLost, HandshakeRefused, DeadlineExceeded):
        return None
    wire: Wire[Tenure] = Wire(address, reader, writer, TENURE)
    try:
        said = msgspec.msgpack.encode(look)
        await call(reader, writer, known.token, said, peer=address, seconds=_SECONDS)
        async with deadline("the conductor", f"a word of the one at {address}", _SECONDS):
            return await wire.receive()
    except (WireError, msgspec.MsgspecError, DeadlineExceeded):  # another run is there, or it is about to end
        return None
    finally:
        wire.cut()
