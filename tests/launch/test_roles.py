"""The end of all roles: each is waited for, and what goes wrong at it is said."""

from __future__ import annotations

import asyncio

from stretto.core.errors import DeadlineExceeded
from stretto.launch.roles import end_all


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
