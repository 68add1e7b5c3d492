"""The end of all roles: each is waited for, and what goes wrong at it is said. What a killed run has left goes with the
next; what no role has made stays, whatever the run folder says of it."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from contextlib import closing
from pathlib import Path

from stretto.core.errors import DeadlineExceeded
from stretto.launch.assemble.roles import _sweep as sweep
from stretto.launch.assemble.roles import end_all
from stretto.store.folder.run_folder import RunFolder


def test_who_does_not_end_is_told_and_the_others_end() -> None:
    said: list[str] = []
    ended: list[str] = []

    async def stuck() -> None:
        raise DeadlineExceeded("conductor", "engine-0 to end after SIGKILL", 5)

    async def well() -> None:
        await asyncio.sleep(0.01)
        ended.append("trainer")

    asyncio.run(end_all(said.append, stuck(), well()))
    assert ended == ["trainer"]
    assert said == [
        "while the roles were ended: conductor waited 5 s for engine-0 to end after SIGKILL and gave up",
    ]


def test_of_a_folder_that_a_run_names_only_what_roles_make_is_removed(tmp_path: Path) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="stretto-", dir="/tmp") as place,
        RunFolder.create(tmp_path / "run") as run,
        closing(socket.socket(socket.AF_UNIX)) as engine,
    ):
        run.write(".sockets", f"{place}\n")
        engine.bind(f"{place}/engine-0.sock")
        (Path(place) / "engine-1.sock").write_text("no socket")
        (Path(place) / "thesis.tex").write_text("years of work")
        sweep(run, "mailbox")
        assert sorted(path.name for path in Path(place).iterdir()) == ["engine-1.sock", "thesis.tex"]
