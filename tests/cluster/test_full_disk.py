"""A conductor whose disk is full at any of its writes of ``join.json``.

Promises: an older conductor gives way to a newer one whether or not it can record that; the newer one gets its reply
only once it is recorded; every step of the end is taken, and the first error is raised last.
"""

import asyncio
import errno
import itertools
import os
from pathlib import Path
from typing import cast

import pytest

from stretto.core.errors import RunFolderError
from stretto.core.tasks import each_to_the_end
from stretto.launch.assemble.specs import Endpoints
from stretto.launch.preflight.plan import Plan
from stretto.launch.recipe.recipe import load_recipe
from stretto.loop.engines.pool import EnginePool
from stretto.processes.spawn import FRESH
from stretto.store.run_folder import RunFolder
from stretto_app.extensions import machines
from stretto_app.extensions.machines import Cluster, identity_of, write_join_file
from stretto_cluster.address import JOIN, JoinFile, read_join_file
from stretto_cluster.succession import RunSuperseded, assert_alone
from tests.cluster.hosting import FIRST
from tests.launch.running import TINY

KNOWN = JoinFile(run="run", token="t" * 64)
NEWER = "10.0.0.2:9000"


class _Plan:
    recipe = load_recipe(TINY)


class _NoEngines:
    names: tuple[str, ...] = ()


class FullDisk:
    """Writes ``join.json``, unless the disk is full: `full` says for which writes it is."""

    def __init__(self, full: tuple[bool, ...]) -> None:
        self.full = [*full]

    def write(self, folder: RunFolder, content: JoinFile) -> None:
        if self.full.pop(0):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_join_file(folder, content)


def conductor(folder: RunFolder, said: list[str]) -> Cluster:
    pool, endpoints = cast(EnginePool, _NoEngines()), Endpoints("run", folder.path, folder.path)
    return Cluster(cast(Plan, _Plan()), folder, endpoints, pool, said.append, FRESH, KNOWN, FIRST)


@pytest.mark.parametrize("full", [*itertools.product((False, True), repeat=3)])
async def test_who_is_superseded_gives_way_whichever_write_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: tuple[bool, ...]
) -> None:
    said, disk = list[str](), FullDisk((*full, False))
    monkeypatch.setattr(machines, "write_join_file", disk.write)
    with RunFolder.create(tmp_path / "run") as folder:
        cluster = conductor(folder, said)
        replied = []
        for _ in range(2):
            try:
                cluster._superseded(7, NEWER)
                replied.append(True)
            except OSError:
                replied.append(False)
        failed_before = full[0], full[0] and full[1]
        assert replied == [not failed for failed in failed_before]
        assert len(said) == sum(failed_before)
        with pytest.raises(RunSuperseded, match=f"at {NEWER}"):
            await asyncio.wait_for(cluster.supervise(), 10)
        disk.full = [full[2], False]
        if full[2]:
            with pytest.raises(OSError, match="No space left"):
                await cluster.close("the run has ended", False)
        else:
            await cluster.close("the run has ended", False)
        recorded = not all(full)
        assert (folder.path / JOIN).exists() == recorded
        if recorded:
            known = read_join_file(folder.path)
            assert (known.superseded, known.before, known.address) == (7, (NEWER,), "")


@pytest.mark.parametrize("full", [False, True])
async def test_a_full_disk_skips_no_step_of_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: bool) -> None:
    monkeypatch.setattr(machines, "write_join_file", FullDisk((full,)).write)
    ended = asyncio.Event()

    async def serve() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.set()

    with RunFolder.create(tmp_path / "run") as folder:
        cluster = conductor(folder, [])
        address = await cluster.gate.open("127.0.0.1:0")
        cluster._tasks.add("weights", serve())
        await asyncio.sleep(0)
        if full:
            with pytest.raises(OSError, match="No space left"):
                await cluster.close("the run has ended", False)
        else:
            await cluster.close("the run has ended", False)
    assert ended.is_set()
    host, _, port = address.rpartition(":")
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(host, int(port))


@pytest.mark.parametrize("failing", [*itertools.product((False, True), repeat=3)])
async def test_all_steps_are_taken_and_the_first_error_is_raised(failing: tuple[bool, ...]) -> None:
    taken: list[int] = []

    async def step(number: int) -> None:
        taken.append(number)
        if failing[number]:
            raise OSError(f"step {number}")

    work = each_to_the_end(lambda: step(0), lambda: step(1), lambda: step(2))
    if any(failing):
        with pytest.raises(OSError, match=f"step {failing.index(True)}"):
            await work
    else:
        await work
    assert taken == [0, 1, 2]


@pytest.mark.parametrize("keep", [0, 1, 40])
async def test_a_torn_join_file_is_refused_and_makes_no_new_run(tmp_path: Path, keep: int) -> None:
    """Its name, its token and the conductors that must be told would be lost without a word."""
    with RunFolder.create(tmp_path / "run") as folder:
        write_join_file(folder, JoinFile(run="run", token="t" * 64, before=(NEWER,), superseded=7))
        path = folder.path / JOIN
        path.write_bytes(path.read_bytes()[:keep])
        with pytest.raises(RunFolderError, match=r"join\.json: .*; restore it, or remove it"):
            identity_of(folder)
        with pytest.raises(RunFolderError, match=r"join\.json: "):
            await assert_alone(folder.path, "")
        path.unlink()
        assert identity_of(folder).superseded == 0
        await assert_alone(folder.path, "")
