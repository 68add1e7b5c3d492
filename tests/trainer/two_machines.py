"""A trainer whose rank 1 is on another machine (`other_machine`): what tests of ranks start and look at."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast
from uuid import uuid4

import msgspec

from stretto.core.records import Sampling
from stretto.model.hf.build import build_policy
from stretto.processes.channel import ConductorEnd
from stretto.processes.role import RoleProcess
from stretto.processes.spawn import Spawner
from stretto.trainer.config import TrainerConfig
from stretto.trainer.messages import (
    FROM_TRAINER,
    FromTrainer,
    Publish,
    Published,
    RankLost,
    RanksAwaited,
    SaveCheckpoint,
    SavePolicy,
    Train,
    TrainerSpec,
)
from stretto.weights.folder import remove
from stretto_cluster.ranks.messages import RANK_ROLE, RankSpec, environment_of
from tests.certificates import authority
from tests.launch.warm import session_fork_server
from tests.tiny_policy import TINY
from tests.tolerances import EPS, RATE
from tests.trainer.batches import LONGEST
from tests.trainer.other_machine import OtherMachine, other_machine
from tests.trainer.tiny import spec_of

TRAINER_ROLE = "stretto.trainer.roles.trainer"
SAMPLING = Sampling(max_tokens=LONGEST)
SETTINGS = {"learning_rate": RATE, "eps": EPS, "minibatches": 2, "device": "cpu"}
CONFIG = TrainerConfig.model_validate({**SETTINGS, "ranks": 2, "remote_ranks": 1})
HUNG = 1.5
T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 90))


@dataclass
class Site:
    """Two machines: what rank 0's sees under `here`, and what it does not under `there`."""

    here: Path
    there: Path
    near: Spawner
    far: OtherMachine
    mailboxes: list[str] = field(default_factory=list)

    def spec(self, **changes: Any) -> TrainerSpec:
        self.mailboxes.append(uuid4().hex)
        own: dict[str, Any] = {"mailbox": self.mailboxes[-1], "mailbox_folder": str(self.here), "hung": HUNG}
        own |= {"log": str(self.here / "trainer.txt"), "rank_host": self.far.address}
        return msgspec.structs.replace(spec_of(self.here / "model", CONFIG, SAMPLING), **own | changes)

    def log_of_rank(self) -> str:
        return (self.there / "rank.txt").read_text()


@dataclass
class Running:
    """A trainer and the conductor's end of its channel; the ranks that the conductor starts for it."""

    site: Site
    spec: TrainerSpec
    trainer: RoleProcess
    channel: ConductorEnd[FromTrainer]
    awaited: RanksAwaited
    rank: RoleProcess
    written: list[Published] = field(default_factory=list)

    async def start_rank(self, **wrong: Any) -> None:
        """Start rank 1 on the other machine, as an agent does."""
        tls = str(self.site.there / "tls") if self.spec.tls else ""
        spec = RankSpec.of(self.awaited, 1, self.spec, model=str(self.site.there / "model"), tls=tls)
        secrets = {name: wrong.pop("key", key) for name, key in environment_of(self.awaited).items()}
        await self.rank.start(msgspec.structs.replace(spec, **wrong), 1, environment=secrets)

    async def reply(self, kind: type[T]) -> T:
        """The next message but versions written meanwhile, which come when they come; of these the oldest."""
        if kind is Published and self.written:
            return cast(T, self.written.pop(0))
        while isinstance(reply := await self.channel.receive(f"to send {kind.__name__}", 60), Published):
            self.written.append(reply)
            if kind is Published:
                return cast(T, self.written.pop(0))
        assert isinstance(reply, kind), reply
        return reply

    async def ask(self, order: Train | Publish | SavePolicy | SaveCheckpoint, kind: type[T]) -> T:
        await self.channel.send(order)
        return await self.reply(kind)


@asynccontextmanager
async def running(site: Site, **changes: Any) -> AsyncIterator[Running]:
    """A trainer that waits for its rank."""
    channel: ConductorEnd[FromTrainer] = ConductorEnd("trainer", FROM_TRAINER)
    trainer = RoleProcess("trainer", TRAINER_ROLE, site.here / "trainer.txt", spawner=site.near)
    rank = RoleProcess("rank 1", RANK_ROLE, site.there / "rank.txt", spawner=site.far.spawner)
    spec = site.spec(descriptor=channel.far.fileno(), **changes)
    try:
        await trainer.start(spec, 1, (spec.descriptor,))
        await channel.open(trainer.ended)
        awaited = await channel.receive("to say where ranks join", 60)
        assert isinstance(awaited, RanksAwaited), awaited
        yield Running(site, spec, trainer, channel, awaited, rank)
    finally:
        channel.close()
        await trainer.stop(1.0)
        await rank.stop(0.0)


async def lost(group: Running) -> str:
    """How the trainer says that it has lost its rank; it has ended when this returns."""
    loss = await group.reply(RankLost)
    assert (await asyncio.wait_for(group.trainer.ended(), 20)).startswith("ended with exit code 1")
    return loss.how


async def refused(site: Site, start: Callable[[Running], Coroutine[Any, Any, None]], **changes: Any) -> str:
    """How a trainer says that it has lost a rank which it did not let in, and why; it waits longer where the rank came
    too late to be refused."""
    how = ""
    for seconds in (1.0, 5.0, 25.0):
        async with running(site, assembly=seconds, **changes) as group:
            await start(group)
            assert (await group.rank.ended()).startswith("ended with exit code 1")
            how = await lost(group)
        if not how.endswith(f"within {seconds:g} s"):
            break
    return how


@contextmanager
def two_machines(here: Path, there: Path) -> Iterator[Site]:
    """Rank 0's machine sees `here`, the other `there`."""
    build_policy(TINY, here / "model", seed=1)
    authority(here / "tls")
    for folder in ("model", "tls"):
        shutil.copytree(here / folder, there / folder)
    with session_fork_server() as near, other_machine([RANK_ROLE], hidden=here) as far:
        site = Site(here, there, near, far)
        yield site
        for mailbox in site.mailboxes:
            remove(mailbox, here)
