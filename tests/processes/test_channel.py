"""The wire between the conductor and a role that does one thing at a time.

- Messages arrive whole and in order, however they were chopped; each wait of the conductor has an end and a name.
- A torn connection is a dead role to the conductor, and the end of all orders to the role.
- A process that has ended is a dead role too, whoever else holds its end of the wire; its last words are read first.
"""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from stretto.core.errors import DeadlineExceeded, RoleDied, WireError
from stretto.core.frames import frame
from stretto.processes.channel import ConductorEnd, RoleEnd
from stretto.trainer.messages import FROM_TRAINER, TO_TRAINER, FromTrainer, Ready, SavePolicy, Stop, ToTrainer

T = TypeVar("T")
READY = Ready(version=3)


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 20))


class Ends:
    """Both ends in one process; the role's end is a copy of the descriptor, as a child process has it."""

    def __init__(self) -> None:
        self.conductor: ConductorEnd[FromTrainer] = ConductorEnd("trainer", FROM_TRAINER, "logs/trainer.txt")
        self.wire = self.conductor.far.dup()
        self.ended = asyncio.Event()

    async def __aenter__(self) -> "Ends":
        await self.conductor.open(self.ended.wait)
        return self

    async def __aexit__(self, *error: object) -> None:
        self.conductor.close()
        self.wire.close()
        await asyncio.sleep(0)


async def test_orders_and_answers_arrive_in_order() -> None:
    def role(descriptor: int) -> None:
        end: RoleEnd[ToTrainer] = RoleEnd(descriptor, TO_TRAINER)
        while (order := end.receive()) is not None and not isinstance(order, Stop):
            assert isinstance(order, SavePolicy)
            end.send(Ready(version=int(order.folder)))
        end._socket.close()

    async with Ends() as ends:
        thread = threading.Thread(target=role, args=(ends.wire.detach(),))
        thread.start()
        for number in range(200):
            await ends.conductor.send(SavePolicy(folder=str(number)))
        answers = [await ends.conductor.receive("to answer", 10) for _ in range(200)]
        await ends.conductor.send(Stop())
        await asyncio.to_thread(thread.join)
    assert [answer.version for answer in answers if isinstance(answer, Ready)] == list(range(200))


async def test_a_message_in_pieces_is_one_message() -> None:
    async with Ends() as ends:
        waiting = asyncio.ensure_future(ends.conductor.receive("to be ready", 10))
        for byte in frame(READY):
            ends.wire.send(bytes([byte]))
            await asyncio.sleep(0)
        assert await waiting == READY


async def test_a_wait_that_is_too_long_names_the_role_and_what_was_awaited() -> None:
    async with Ends() as ends:
        with pytest.raises(DeadlineExceeded, match=r"conductor waited 0\.05 s for trainer to be ready"):
            await ends.conductor.receive("to be ready", 0.05)


async def test_a_torn_connection_is_a_dead_role() -> None:
    async with Ends() as ends:
        ends.wire.send(frame(READY)[:-1])
        ends.wire.close()
        with pytest.raises(RoleDied, match=r"trainer closed its connection; see the end of logs/trainer\.txt"):
            await ends.conductor.receive("to be ready", 10)


async def test_a_role_that_an_order_did_not_reach_is_dead_to_whoever_awaits_its_answer() -> None:
    async with Ends() as ends:
        ends.wire.close()
        with pytest.raises(RoleDied, match="trainer closed its connection"):
            await ends.conductor.send(Stop())
        with pytest.raises(RoleDied, match="trainer closed its connection"):
            await ends.conductor.receive("to say why it ends", 10)


@pytest.mark.parametrize("said", [0, 1, 5_000])
async def test_a_role_has_ended_with_its_process_although_another_one_holds_its_wire(said: int) -> None:
    """5,000 messages fill the wire: what the conductor had not read when the process ended is not lost."""

    async with Ends() as ends:
        ends.wire.setblocking(False)
        held, heard = ends.wire.dup(), list[FromTrainer]()
        for _ in range(said):
            await asyncio.get_running_loop().sock_sendall(ends.wire, frame(READY))
        ends.wire.close()
        ends.ended.set()
        with contextlib.suppress(RoleDied):
            while True:
                heard.append(await ends.conductor.receive("to go on", 10))
        held.close()
    assert len(heard) == said


def test_a_message_that_the_conductor_does_not_take_is_not_sent() -> None:
    near, far = socket.socketpair()
    end: RoleEnd[ToTrainer] = RoleEnd(far.detach(), TO_TRAINER, len(frame(Stop())) - 4)
    end.send(Stop())
    with pytest.raises(WireError, match=r"it has [\d,]+ bytes; at most [\d,]+ are allowed"):
        end.send(SavePolicy("x" * 80))
    assert near.recv(4096) == frame(Stop())
    near.close()
    end._socket.close()


def test_a_role_whose_conductor_is_gone_has_no_more_orders() -> None:
    near, far = socket.socketpair()
    end: RoleEnd[ToTrainer] = RoleEnd(far.detach(), TO_TRAINER)
    near.send(frame(Stop()))
    near.close()
    assert end.receive() == Stop()
    assert end.receive() is None
    end._socket.close()


async def test_a_wire_that_is_closed_while_it_is_being_opened_is_a_dead_role_at_once() -> None:
    end: ConductorEnd[FromTrainer] = ConductorEnd("trainer", FROM_TRAINER)
    wire = end.far.dup()
    opening = asyncio.create_task(end.open(asyncio.Event().wait))
    await asyncio.sleep(0)
    end.close()
    await opening
    with pytest.raises(RoleDied, match="closed its connection"):
        await end.receive("to be ready", 10)
    wire.close()


async def test_a_channel_that_is_closed_before_it_is_opened_is_a_dead_role() -> None:
    end: ConductorEnd[FromTrainer] = ConductorEnd("trainer", FROM_TRAINER)
    end.close()
    assert end.far.fileno() == -1
    with pytest.raises(RoleDied, match="was given up while it was started"):
        await end.open(asyncio.Event().wait)
