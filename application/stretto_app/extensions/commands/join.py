"""`stretto engine --join`, `stretto rank --join` and `stretto scale`: commands that reach a run from outside."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from stretto import __version__
from stretto.core.errors import DeadlineExceeded, HandshakeRefused, MachineLost, Problem, RecipeError, RunFolderError
from stretto.core.machine import VISIBLE, gpus, on_gpus
from stretto.engine.wire import ENGINE_ROLE
from stretto.processes.heartbeat import PARENT, die_with_parent
from stretto.processes.spawn import TOKEN, Spawner
from stretto_cluster.address import JoinFile, read_join_file
from stretto_cluster.agent import Offer, run_agent
from stretto_cluster.handshake import call
from stretto_cluster.messages import ANSWER, Answer, Scale
from stretto_cluster.ranks.messages import RANK_ROLE
from stretto_cluster.wire import Wire, connect

ROLES = {"engine": ENGINE_ROLE, "rank": RANK_ROLE}  #: by the kind of an offer, the module that its places run
_HANDSHAKE_SECONDS = 10.0
_SHOWN = 80  # characters
_LONGEST = 9  # digits of a number of engines, which the run bounds


def offer(
    join: str,
    token: str | None,
    *,
    count: int,
    host: str | None,
    tls: str | None,
    patience: float,
    kind: str = "engine",
) -> Offer:
    """Make the offer of this machine from the command's options (see `Offer`). `join`: address of a run, or its folder
    if this machine can read it. `count`: number of roles of this `kind` ("engine" or "rank"). `patience`: seconds to
    look for the run. `token`, `tls`: None: those of the folder; a missing token comes from the environment, from which
    it is removed. `host`: address at which the run reaches this machine; None: that of its connection to the run.

    Raises:
        RecipeError: the address or the token is missing or invalid, or the run of the folder takes no machines.
    """
    given = os.environ.pop(TOKEN, None)  # removed, because roles of this machine would inherit it
    if Path(join).is_dir():
        known = read_join_file(Path(join))
        if not known.address:
            found = "it is not going on, or takes no machines"
            remedy = 'start the run with cluster.listen="HOST:PORT"'
            raise RecipeError([Problem(f"--join {join}", found, remedy)])
        join, token, tls = known.address, token or known.token, tls or known.tls
    host_part, _, port = join.rpartition(":")
    if not host_part or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise RecipeError([Problem("--join", repr(join), "give the run's address as host:port, or its folder")])
    token = token or given
    if not token:
        remedy = f"give the token of the run's join.json by --token, or in the environment variable {TOKEN}"
        raise RecipeError([Problem("--token", "is missing", remedy)])
    there = [gpu.id for gpu in gpus()]
    has_one = bool(there) or (VISIBLE not in os.environ and any(Path("/dev").glob("nvidia[0-9]*")))
    return Offer(join, token, kind, count, host, tls or "", patience, has_one, len(there), dealt(there, count))


def dealt(ids: Sequence[str], count: int) -> tuple[Mapping[str, str], ...]:
    """Environment variables for each of `count` roles. Each gets the same number of the GPUs `ids`, at least one, and
    GPUs left over are not used. Two roles share a GPU only if there are fewer GPUs than roles. An empty tuple without
    GPUs.

    >>> [place["CUDA_VISIBLE_DEVICES"] for place in dealt(("0", "1", "5", "7"), 2)]
    ['0,1', '5,7']
    """
    if not ids:
        return ()
    each = max(1, len(ids) // count)
    return tuple(on_gpus([ids[(at * each + one) % len(ids)] for one in range(each)]) for at in range(count))


def work(brought: Offer, say: Callable[[str], None], spawner: Spawner) -> None:
    """Serve the run until it ends, or until SIGTERM or Ctrl-C, which drain this machine's roles first. `say` gets log
    lines; `spawner` starts the roles.

    Raises:
        MachineLost: no gate of the run was found in time.
        RecipeError: an address or a certificate is invalid, or the run refuses this machine.
    """
    if (parent := os.environ.pop(PARENT, None)) is not None:
        die_with_parent(int(parent))
    try:
        asyncio.run(_work(brought, say, spawner))
    except HandshakeRefused as refused:
        raise RecipeError([Problem("--join", str(refused), _remedy(refused))]) from None


def _remedy(refused: HandshakeRefused) -> str:
    """Remedy for a refusal; "" if the run's own message has one."""
    if "token" in refused.how:
        return f"give the token of the run's join.json by --token, or in the environment variable {TOKEN}"
    return "give the folder of the run's certificates by --tls" if "TLS" in refused.how else ""


async def _work(brought: Offer, say: Callable[[str], None], spawner: Spawner) -> None:
    leave, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, leave.set)
    say(await run_agent(brought, say, leave, spawner))


def scale(run: Path, changes: list[str]) -> str:
    """Change the number of a run's engines; `changes` are the command's arguments (``engines=N``). Return the run's
    reply.

    Raises:
        RecipeError: `changes` are wrong, the folder has no readable join file, or the run refuses.
        RunFolderError: the run has ended.
        DeadlineExceeded: the run did not reply in time.
        MachineLost: it closed the connection before its reply.
    """
    wanted = dict(change.partition("=")[::2] for change in changes)
    if wanted.keys() != {"engines"} or not (wanted["engines"].isdecimal() and len(wanted["engines"]) <= _LONGEST):
        found = " ".join(changes) or "nothing"
        raise RecipeError([Problem("stretto scale", repr(found[:_SHOWN]), "say engines=N, with a number")])
    known = read_join_file(run)
    if not known.control:
        raise RunFolderError([Problem(str(run), "is not going on", "give the folder of a run that is")])
    answer = asyncio.run(_ask(known, int(wanted["engines"]), run))
    if not answer.done:
        raise RecipeError([Problem(str(run), answer.text)])
    return answer.text


async def _ask(known: JoinFile, engines: int, run: Path) -> Answer:
    try:
        reader, writer = await connect(known.control, None)
        said = msgspec.msgpack.encode(Scale(engines=engines, release=__version__))
        await call(reader, writer, known.token, said, peer="the run", seconds=_HANDSHAKE_SECONDS)
        wire: Wire[Answer] = Wire(reader, writer, ANSWER)
        try:
            async with asyncio.timeout(known.patience):
                answer = await wire.receive()
        finally:
            wire.cut()
    except HandshakeRefused as refused:
        raise RecipeError([Problem(str(run), str(refused), _remedy(refused))]) from None
    except TimeoutError:
        raise DeadlineExceeded("stretto scale", "the run to reply", known.patience) from None
    except MachineLost:
        raise RunFolderError([Problem(str(run), "is not going on", "give the folder of a run that is")]) from None
    if answer is None:
        raise MachineLost("the run", "closed the connection")
    return answer
