"""Promises: a rank is let in with the key of its trainer, and with a certificate if the run has them; torch's store is
reached at the loopback interface, or with the key. The key is good for one trainer, and on no command line.
"""

import asyncio
import socket
from pathlib import Path

import msgspec
import pytest

from stretto.core.errors import HandshakeRefused
from stretto.trainer.messages import Ready
from stretto_cluster.handshake import call
from stretto_cluster.ranks.collectives import LOOPBACK, open_store
from stretto_cluster.ranks.rank_group import RankGroup, RankIntroduction
from tests.certificates import authority
from tests.trainer.two_machines import Running, Site, refused, run, running


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

    assert run(both()) == ("refused: the key is wrong", "refused: there is no rank 5")


def test_a_key_is_good_for_one_trainer(site: Site) -> None:
    assert RankGroup(site.spec())._key != RankGroup(site.spec())._key
