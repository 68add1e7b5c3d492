"""Two conductors for one run, of whose folder there are copies: in the end there is one.

- Each start raises the epoch of the ledger; the higher tenure stays, and of two alike the name decides.
- A copy is not gone on with while a conductor of the run lives where the folder says.
- A conductor that could not be asked then, and comes back, is told; a machine that has served the newer one says so.
- One that was told ends with the run's name and the newer one's address, and its own folder knows where that is."""

import asyncio
import os
import shutil
import signal
from pathlib import Path

import msgspec
import pytest

from stretto.core.errors import DeadlineExceeded, RunFolderError
from stretto.loop.records.totals import Tenure, next_tenure
from stretto.store.run_folder import RunFolder
from stretto_app.extensions.machines import identity_of, write_join_file
from stretto_cluster import succession
from stretto_cluster.address import JOIN, JoinFile, read_join_file
from stretto_cluster.agent import Offer, run_agent
from stretto_cluster.messages import Dismissed, RunTerms
from stretto_cluster.succession import RunSuperseded, assert_alone, tell
from tests.certificates import authority
from tests.cluster.hosting import FIRST, RUN, TOKEN, hosted, introduction, joined_by_hand, until
from tests.faults.test_company import end_well
from tests.launch.running import Laboratory, said, steps_done, wait_for_step, wait_until

KNOWN = JoinFile(run=RUN, token=TOKEN, address="here:7420")
SECOND = Tenure(epoch=2, conductor="b")


def test_each_start_raises_the_epoch_and_takes_a_name() -> None:
    first = next_tenure(None)
    second, sibling = next_tenure(first), next_tenure(first)
    assert (first.epoch, second.epoch, sibling.epoch) == (1, 2, 2)
    assert first < second
    assert (second < sibling) != (sibling < second)  # one of them gives way, whichever asks


@pytest.mark.parametrize(
    ("served", "gives_way"),
    [
        (None, False),
        (FIRST, False),
        (Tenure(0, "z"), False),
        (Tenure(1, "A"), False),
        (Tenure(1, "b"), True),
        (SECOND, True),
    ],
)
async def test_a_machine_that_has_served_a_newer_conductor_is_not_taken_and_the_older_one_gives_way(
    home: Path, served: Tenure | None, gives_way: bool
) -> None:
    async with hosted(home) as host:
        wire = await joined_by_hand(host.address, introduction(served=served))
        assert isinstance(await wire.receive(), Dismissed if gives_way else RunTerms)
        assert host.superseded == ([(served.epoch, "")] if gives_way and served else [])
        wire.cut()


async def test_an_agent_brings_the_word_from_the_newer_conductor_to_the_older_one(home: Path, tmp_path: Path) -> None:
    """The network takes it from one to the other, as an address that two machines have had does."""
    said: list[str] = []
    async with hosted(home, tenure=SECOND) as newer:
        address = newer.address
        task = asyncio.create_task(run_agent(Offer(address, TOKEN, patience=30.0), said.append, asyncio.Event()))
        await newer.machine()
        for machine in newer.gate.machines.values():
            machine._wire.cut()
        await newer.gate.close("")
    (tmp_path / "older").mkdir()
    async with hosted(tmp_path / "older", listen=address) as older:
        await until(lambda: older.superseded)
        assert older.superseded[0] == (2, "")
        assert not older.joined
        refusal = "is an older conductor than the one that this machine has served; asking again"
        await until(lambda: any(refusal in line for line in said))
    async with hosted(home, listen=address, tenure=SECOND) as newer:
        await newer.machine()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_the_conductor_before_is_told_when_it_can_be_reached_and_not_before(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(succession, "_PAUSE_SECONDS", 0.05)
    async with hosted(home) as host:
        address = host.address
    telling = asyncio.create_task(tell(KNOWN, address, SECOND, ""))
    await asyncio.sleep(0.2)
    assert not telling.done()
    async with hosted(home, listen=address) as host:
        assert await telling == f"the conductor at {address}, which continued another copy of this run, was told to end"
        assert host.superseded == [(2, "here:7420")]
    with pytest.raises(DeadlineExceeded, match=rf"waited 0\.1 s for the one at {address}, to tell it"):
        await tell(KNOWN, address, SECOND, "", 0.1)


async def test_certificates_that_are_renewed_meanwhile_end_no_run(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked for a day, and each time the files are read again."""
    monkeypatch.setattr(succession, "_PAUSE_SECONDS", 0.05)
    theirs = str(authority(tmp_path / "theirs"))
    ours = Path(shutil.copytree(theirs, tmp_path / "ours"))
    async with hosted(home, tls=theirs) as older:
        (ours / "cert.pem").rename(ours / "old.pem")
        telling = asyncio.create_task(tell(KNOWN, older.address, SECOND, str(ours), 20))
        await asyncio.sleep(0.3)
        assert not telling.done()
        (ours / "old.pem").rename(ours / "cert.pem")
        assert "was told to end" in await telling
        assert older.superseded == [(2, "here:7420")]


async def test_who_tells_a_newer_one_gives_way_itself_and_who_meets_itself_does_not(home: Path) -> None:
    async with hosted(home, tenure=SECOND) as host:
        with pytest.raises(RunSuperseded, match=rf"run {RUN} at {host.address} \(epoch 2\), from a copy"):
            await tell(KNOWN, host.address, FIRST, "")
        assert await tell(KNOWN, host.address, SECOND, "") == ""
        assert host.superseded == []


async def test_a_copy_is_refused_while_a_conductor_lives_where_the_folder_says(home: Path, tmp_path: Path) -> None:
    def write(**changes: str | tuple[str, ...]) -> None:
        known = msgspec.structs.replace(KNOWN, **({"address": ""} | changes))
        (tmp_path / JOIN).write_bytes(msgspec.json.encode(known))

    await assert_alone(tmp_path, "")  # no such file
    async with hosted(home) as host:
        control = await host.gate.open(f"unix:{tmp_path}/control")
        for found, where in (({"address": host.address}, f"at {host.address}"), ({"control": control}, "on this")):
            write(**found)
            with pytest.raises(RunFolderError, match=rf"run {RUN}, whose conductor lives {where}.*remove join\.json"):
                await assert_alone(tmp_path, "")
        write(before=("127.0.0.1:1", host.address))
        with pytest.raises(RunFolderError, match="stop that one first"):
            await assert_alone(tmp_path, "")
        write(address=host.address, token="u" * 64)  # somebody else's by now
        await assert_alone(tmp_path, "")
        write(address=host.address, run="another-99")
        await assert_alone(tmp_path, "")
    write(address=host.address, control=control)  # it has ended
    await assert_alone(tmp_path, "")


async def test_at_an_address_that_somebody_else_has_by_now_the_search_ends_with_who_it_is(home: Path) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await reader.read()
        writer.close()

    async def said_of(address: str, known: JoinFile = KNOWN) -> str:
        return await tell(known, address, SECOND, "")

    async with hosted(home, run="another-99") as host:  # with the same token
        assert await said_of(host.address) == (
            f"nobody at {host.address} can be told that this conductor has the run now: "
            f"{host.address} refused: this is run another-99"
        )
        assert "the token is wrong" in await said_of(host.address, msgspec.structs.replace(KNOWN, token="u" * 64))
        assert host.superseded == []
    browser = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with browser:
        assert "speaks another language" in await said_of(f"127.0.0.1:{browser.sockets[0].getsockname()[1]}")
    assert await said_of(f"unix:{home}/control") == ""  # on this machine, so it is known that it has ended


async def test_a_folder_that_a_newer_conductor_has_is_refused_wherever_that_one_is(home: Path, tmp_path: Path) -> None:
    """It has no address, its machine cannot be reached, or it has ended: nobody replies, and it has the later steps."""
    known = msgspec.structs.replace(KNOWN, address="", superseded=2, before=("127.0.0.1:1",))
    (tmp_path / JOIN).write_bytes(msgspec.json.encode(known))
    with pytest.raises(RunFolderError, match=rf"newer conductor \(epoch 2\) has continued run {RUN}, from a copy"):
        await assert_alone(tmp_path, "")


async def test_a_conductor_without_an_address_is_found_by_its_socket_and_tells_by_its_own(home: Path) -> None:
    """On one machine two conductors meet though no other machine can join either of them."""
    known = msgspec.structs.replace(KNOWN, address="", control=f"unix:{home}/newer")
    async with hosted(home) as host:
        assert "was told to end" in await tell(known, await host.gate.open(f"unix:{home}/control"), SECOND, "")
        assert host.superseded == [(2, f"unix:{home}/newer")]


def test_a_conductor_that_was_not_told_is_remembered_over_every_crash_of_the_newer_one(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    first = identity_of(folder)
    write_join_file(folder, first)
    for address in ("first:1", "second:2", "", "third:3", "second:2"):  # of conductors that were killed, one by one
        write_join_file(folder, msgspec.structs.replace(identity_of(folder), address=address))
    write_join_file(folder, msgspec.structs.replace(identity_of(folder), control="unix:/c", superseded=3))
    assert identity_of(folder).before == ("first:1", "second:2", "third:3", "unix:/c")
    assert identity_of(folder).superseded == 3
    assert identity_of(folder).run == first.run


@pytest.mark.long
def test_two_conductors_on_copies_of_one_folder_become_one(laboratory: Laboratory, tmp_path: Path) -> None:
    """The first is stopped, as a machine is that cannot be reached, and comes back when the second goes on."""
    run_dir, copy = tmp_path / "run", tmp_path / "copy"
    settings = ("cluster.listen=127.0.0.1:0", "trainer.steps=100000", "trainer.keep_versions=1")
    with laboratory.train(run_dir, *settings) as first:
        wait_for_step(first, 3)
        shutil.copytree(run_dir, copy)
        refused = laboratory.run("train", "--resume", copy)
        refused.refused(str(copy), "is a copy of the folder of run", "whose conductor lives on this machine")
        shutil.rmtree(copy)
        os.kill(first.process.pid, signal.SIGSTOP)
        shutil.copytree(run_dir, copy)
        with laboratory.start("train", "--resume", copy, run_dir=copy) as second:
            wait_until(lambda: "continues at version" in said(copy), "its start", second)
            wait_for_step(second, steps_done(copy) + 2)
            os.kill(first.process.pid, signal.SIGCONT)
            ended = first.end(60)
            there = read_join_file(copy).address
            ended.failed(f"at {there} (epoch 2), from a copy of its folder: this one ends")
            wait_until(lambda: "which continued another copy of this run, was told to end" in said(copy), "its word")
            laboratory.run("train", "--resume", run_dir).refused(f"whose conductor lives at {there}")
            end_well(second, laboratory, copy)
        laboratory.run("train", "--resume", run_dir).refused("a newer conductor (epoch 2) has continued run")
