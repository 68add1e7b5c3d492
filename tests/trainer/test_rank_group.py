"""Promises of ranks on several machines, with real processes in networks of their own (`other_machine`): rank 0 here,
rank 1 there.

- Rank 1 joins by address and key alone, with its own copy of the model, and trains what one process trains.
- Where its machine does not see the run folder, checkpoints are written by rank 0, and gone on from, all the same.
- A rank that is killed, or whose machine is cut off, ends the trainer with its name, and ends by itself.
- A rank that does not come is named, after a deadline; so is one with a wrong key, or that nobody waits for.
- A rank is let in with the key of its trainer, and with a certificate if the run has them; torch's store is reached at
  the loopback interface, or with the key. The key is good for one trainer, and on no command line.
- A network interface that is not there is named, with those that are."""

import asyncio
import os
import signal
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import distributed

from stretto.core.errors import HandshakeRefused, RecipeError
from stretto.core.machine import interface_of
from stretto.core.records import Batch
from stretto.loop.config import DeadlinesConfig
from stretto.loop.recovery import Recovery
from stretto.loop.trainer_link import TrainerLink
from stretto.model.hf.folder import load_policy
from stretto.model.packed.attention import PACKED_ATTENTION
from stretto.processes.role import RoleProcess
from stretto.store.checkpoints import Checkpoints
from stretto.store.config import StoreConfig
from stretto.store.ledger.ledger import Ledger
from stretto.store.run_folder import RunFolder
from stretto.trainer.config import TrainerConfig
from stretto.trainer.messages import (
    CheckpointSaved,
    Copied,
    PolicySaved,
    Publish,
    Published,
    RanksAwaited,
    Ready,
    SaveCheckpoint,
    SavePolicy,
    Stop,
    Train,
    Trained,
    TrainerSpec,
)
from stretto.trainer.objective.algorithm import AlgorithmConfig
from stretto.trainer.trainer import Trainer
from stretto_cluster.handshake import call
from stretto_cluster.ranks.collectives import LOOPBACK, _no_way, join, open_store
from stretto_cluster.ranks.messages import RANK_ROLE, RankSpec, environment_of
from stretto_cluster.ranks.rank import _as_here
from stretto_cluster.ranks.rank_group import RankGroup, RankIntroduction
from tests.certificates import authority
from tests.tiny_policy import TINY
from tests.tolerances import after_adam, operations_of
from tests.trainer.batches import batch
from tests.trainer.two_machines import HUNG, SAMPLING, SETTINGS, Running, Site, lost, refused, run, running


def weights_of_one_process(site: Site, steps: int) -> dict[str, Any]:
    model = load_policy(site.here / "model", attention=PACKED_ATTENTION)
    trainer = Trainer(model, TrainerConfig.model_validate(SETTINGS), AlgorithmConfig(), SAMPLING)
    for version in range(steps):
        trainer.train(batch(version))
    return {name: weight.clone() for name, weight in trainer.full_parameters()}


def assert_trained(site: Site, folder: Path, steps: int) -> None:
    found = dict(load_policy(folder).named_parameters())
    tolerance = after_adam(steps * 2, operations_of(TINY, backward=True))
    for name, weight in weights_of_one_process(site, steps).items():
        torch.testing.assert_close(found[name].detach(), weight, rtol=0, atol=tolerance, msg=name)


def test_a_rank_on_another_machine_trains_what_one_process_trains_and_goes_on_from_a_checkpoint(site: Site) -> None:
    """The checkpoint is in a folder that the other machine does not see. The second time inside TLS."""

    async def train(checkpoint: Path | None, versions: range, saved: Path, tls: str = "") -> None:
        async with running(site, checkpoint=str(checkpoint) if checkpoint else None, tls=tls) as group:
            await group.start_rank()
            assert (await group.reply(Ready)).version == versions.start
            await group.ask(Publish(), Copied)
            assert (await group.reply(Published)).version == versions.start
            for version in versions:
                assert (await group.ask(Train(batch=batch(version)), Trained)).update.version == version + 1
            await group.ask(SaveCheckpoint(folder=str(saved / "checkpoint")), Copied)
            await group.reply(CheckpointSaved)
            await group.ask(SavePolicy(folder=str(saved / "policy")), PolicySaved)
            await group.channel.send(Stop())
            assert await asyncio.wait_for(group.rank.ended(), 20) == "ended with exit code 0"
            assert await asyncio.wait_for(group.trainer.ended(), 20) == "ended with exit code 0"

    first, second = site.here / "first", site.here / "second"
    for folder in (first, second):
        folder.mkdir()
    run(train(None, range(2), first))
    assert_trained(site, first / "policy", 2)
    files = sorted(path.name for path in (first / "checkpoint").iterdir())
    parts = 1 if site.far.cable else 2  # one, where rank 0 alone can write
    assert files == [*(f"shard-0000{n + 1}-model-00001-of-00001.safetensors" for n in range(parts)), "trainer.json"]
    run(train(first / "checkpoint", range(2, 3), second, str(site.here / "tls")))
    assert_trained(site, second / "policy", 3)


class Recorded(Recovery):
    """The batches of a run whose ledger has none."""

    def batch(self, step: int) -> Batch:
        return batch(step - 1)


class Agent:
    """Starts rank 1 of each trainer on the other machine."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self.ranks: list[RoleProcess] = []

    async def __call__(self, awaited: RanksAwaited, spec: TrainerSpec) -> None:
        if self.ranks:
            await self.ranks[-1].stop(0.0)
        rank = RoleProcess("rank 1", RANK_ROLE, self._site.there / "rank.txt", spawner=self._site.far.spawner)
        self.ranks.append(rank)
        told = RankSpec.of(awaited, 1, spec, model=str(self._site.there / "model"))
        await rank.start(told, 1, environment=environment_of(awaited))


def test_a_lost_rank_begins_the_group_anew_from_checkpoint_and_batches(site: Site) -> None:
    """The checkpoint is of step 1; the rank is killed after step 2, which is trained again before step 3."""
    said: list[str] = []

    async def scenario(folder: RunFolder, agent: Agent) -> None:
        recovery, loop = Recorded(folder, 2), asyncio.get_running_loop()
        deadlines = DeadlinesConfig(hung=HUNG, start=60.0)
        log, say = site.here / "trainer.txt", said.append
        link = TrainerLink(log, deadlines, recovery, spawner=site.near, elsewhere=agent, say=say)

        def write(part: Path) -> None:
            asyncio.run_coroutine_threadsafe(link.save_checkpoint(part), loop).result(30)

        try:
            await link.start(site.spec())
            await link.train(batch(0))
            await asyncio.to_thread(Checkpoints(folder.checkpoints, 2).save, 1, write)
            await link.train(batch(1))
            os.kill(agent.ranks[-1].pid, signal.SIGKILL)
            assert (await link.train(batch(2))).version == 3
            await link.save_policy(folder.path / "last")
        finally:
            await link.stop(1.0)
            await agent.ranks[-1].stop(1.0)

    with RunFolder.create(site.here / "run") as folder:
        Ledger(folder.ledger, StoreConfig()).close()
        agent = Agent(site)
        run(scenario(folder, agent))
        assert_trained(site, folder.path / "last", 3)
    assert said == ["trainer lost rank 1, which closed its connection: a new one is started at version 2"]
    assert len(agent.ranks) == 2


def test_a_machine_that_is_cut_off_is_given_up_and_its_rank_ends_by_itself(site: Site) -> None:
    """Between two steps, and in a step, where both ranks wait in a collective."""
    if site.far.cable is None:
        pytest.skip("the kernel does not let us make a network")

    async def scenario(trains: bool) -> None:
        async with running(site) as group:
            await group.start_rank()
            await group.reply(Ready)
            site.far.cut()
            try:
                if trains:
                    await group.channel.send(Train(batch=batch(0)))
                assert await lost(group) == f"lost rank 1, which sent no heartbeat for {HUNG:g} s"
                assert (await asyncio.wait_for(group.rank.ended(), 20)).startswith("ended with exit code 1")
            finally:
                site.far.mend()
        assert "rank 0 sent no heartbeat for" in site.log_of_rank()

    run(scenario(trains=False))
    run(scenario(trains=True))


def test_a_rank_that_does_not_come_is_named_and_so_is_a_wrong_one(site: Site) -> None:
    async def nowhere() -> str:
        async with running(site, assembly=1.0) as group:
            return await lost(group)

    assert run(nowhere()) == "lost rank 1: did not join within 1 s"
    assert run(refused(site, lambda group: group.start_rank(key="another"))).endswith("does not have the token")
    assert "rank 0 refused: the token is wrong" in site.log_of_rank()
    with_a_wrong_number = refused(site, lambda group: group.start_rank(rank=7))
    assert run(with_a_wrong_number).endswith("is not wanted: there is no rank 7")


def test_the_interface_of_an_address_is_found(site: Site) -> None:
    assert interface_of("127.0.0.3") == "lo"
    assert interface_of("::1") == "lo"
    assert interface_of(site.far.address) == (site.far.cable or "lo")
    assert interface_of("203.0.113.9") is None  # reserved for documentation: nobody's


def test_a_rank_has_the_folders_and_gpus_of_its_own_machine(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    algorithm = AlgorithmConfig.model_validate({"reference": {"path": "/here/reference", "weight": 0.5}})
    spec = site.spec(algorithm=algorithm.model_dump_json(), kernels="/here/kernels.json", gpus=("0",), share=0.4)
    awaited = RanksAwaited(host="127.0.0.1", port=1, key="k", ranks=(1,))
    there = _as_here(spec, RankSpec.of(awaited, 1, spec, model="/there/model", reference="/there/reference"))
    reference = AlgorithmConfig.model_validate_json(there.algorithm).reference
    assert (there.model, there.kernels) == ("/there/model", None)
    assert (there.gpus, there.share) == (("5", "7"), 1.0), "its GPU is not shared with rank 0's engines"
    assert reference is not None
    assert (reference.path, reference.weight) == ("/there/reference", 0.5)
    assert _as_here(spec, RankSpec(rank=1, host="127.0.0.1", port=1, threads=1)) == spec


@pytest.mark.long
def test_with_certificates_a_rank_without_one_or_with_another_authoritys_is_not_let_in(site: Site) -> None:
    authority(site.there / "theirs")

    async def scenario(tls: str) -> str:
        return await refused(site, lambda group: group.start_rank(tls=tls), tls=str(site.here / "tls"))

    async def both() -> tuple[str, str]:
        return await asyncio.gather(scenario(""), scenario(str(site.there / "theirs")))

    without, with_another = run(both())
    assert "does not speak our TLS" in without
    assert "closed the connection in the handshake of TLS" in with_another
    assert "does not accept our TLS" in site.log_of_rank()


def test_the_store_of_torch_is_at_the_loopback_interface_and_no_way_to_it_without_the_key(site: Site) -> None:
    """Which is on no command line."""
    store = open_store(1)
    socket.create_connection((LOOPBACK, store.port), timeout=5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", store.port), timeout=5)

    async def kept_out(group: Running, rank: int, key: str) -> str:
        reader, writer = await asyncio.open_connection(group.awaited.host, group.awaited.port)
        ours = msgspec.msgpack.encode(RankIntroduction(rank=rank, to_store=True))
        with pytest.raises(HandshakeRefused) as told:
            await call(reader, writer, key, ours, peer="rank 0", seconds=10)
        writer.close()
        return told.value.how

    async def both() -> tuple[str, str]:
        async with running(site) as group:
            await group.start_rank()
            await group.reply(Ready)
            for process in (group.trainer, group.rank):
                assert group.awaited.key not in Path(f"/proc/{process.pid}/cmdline").read_text()
            return await kept_out(group, 1, "another"), await kept_out(group, 5, group.awaited.key)

    assert run(both()) == ("refused: the token is wrong", "refused: there is no rank 5")


def test_a_key_is_good_for_one_trainer(site: Site) -> None:
    assert RankGroup(site.spec())._key != RankGroup(site.spec())._key


NCCL = "NCCL error in: ProcessGroupNCCL.cpp: internal error. Last error: Bootstrap : no socket interface found"


def test_a_rank_that_finds_no_interface_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    try:
        with pytest.raises(RecipeError, match=r"GLOO_SOCKET_IFNAME: 'nosuch0' of rank 0 on .* one of .*lo"):
            join(open_store(1), 0, 1, "cpu")
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()


def test_words_of_nccl_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=eth7")
    found = _no_way(NCCL, 3)
    assert found is not None
    assert str(found).startswith("NCCL_SOCKET_IFNAME: '=eth7' of rank 3 on ")
    assert _no_way("NCCL error: unhandled cuda error", 3) is None
