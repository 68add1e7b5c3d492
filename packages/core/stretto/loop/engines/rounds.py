"""Rounds: groups that begin together and end together, so that nothing depends on the time of any event.

    admission ─► a round ─┬─► portion 0 ─► an engine without other work ─┐
                          └─► portion 1 ─► an engine without other work ─┴─► judged ─► all groups leave together

Which rows a step computes together decides the last bits of their numbers. Here it follows from the questions and the
weights: a round is every group that may start when none is in flight (`rollout.controller.Controller`), its portions
are dealt by the place in it, and a portion goes to an engine as a whole and is alone there. Which engine that is, and
when, makes no difference. Groups leave a round in its order and in one go, so that the ledger, whenever the run is
killed, knows the round as in flight or as over: the run that goes on asks all of it again, from its first tokens. So
does one that has lost an engine (`loop.engines.in_flight.InFlight` without a journal).
(docs/explanation/decisions/0010-rounds.md)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from stretto.core.engine import Generate
from stretto.core.records import Completion, GenerateRequest, Partials, Trajectory
from stretto.rollout.controller import Ticket
from stretto.worlds.single_turn import GroupWorkflow


class Portion:
    """Groups that one engine generates together; the request is sent when all groups still wanted have arrived."""

    def __init__(self, generate: Generate, ids: Sequence[str]) -> None:
        self._generate = generate
        self._requests: dict[str, GenerateRequest | None] = dict.fromkeys(ids)  # in the order of the round
        self._wanted = set(ids)
        self._queues: dict[str, asyncio.Queue[Completion | Exception]] = {}  # of the groups that have come
        self._sent = False  # and the engine was not lost since
        self._generating: asyncio.Task[None] | None = None

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Completion]:
        """The completions of one group.

        Raises:
            EngineLost: the engine was lost; the portion is requested again when all groups still wanted have come back.
            RefusedRequest: the engine will not serve the portion.
        """
        self._requests[request.id] = request
        queue = self._queues[request.id] = asyncio.Queue()
        self._send_if_all_have_come()
        try:
            for _ in request.seeds:
                completion = await queue.get()
                if isinstance(completion, Exception):
                    raise completion
                yield completion
            self._wanted.discard(request.id)
        finally:
            del self._queues[request.id]
            if not self._queues and self._generating is not None:
                self._generating.cancel()

    def leave(self, id: str) -> None:
        """The group does not come back."""
        self._wanted.discard(id)
        self._send_if_all_have_come()

    def _send_if_all_have_come(self) -> None:
        if not self._sent and self._queues and self._queues.keys() == self._wanted:
            self._sent = True
            self._generating = asyncio.create_task(self._send([r for r in self._requests.values() if r is not None]))

    async def _send(self, requests: Sequence[GenerateRequest]) -> None:
        try:
            async for completion in self._generate(*requests):
                if completion.request in self._queues:  # else it is known from before an engine was lost
                    self._queues[completion.request].put_nowait(completion)
        except Exception as error:  # any failure of the engine is raised in every group that waits for the portion
            self._sent = False
            for queue in self._queues.values():
                queue.put_nowait(error)


class Rounds:
    """Stands between the groups and the engines (`generate`), and between the workflow and the conductor (`together`).

    Args:
        tickets: the groups in flight, in the order of their admission.
        portions: of each round, one for every engine.
    """

    def __init__(self, generate: Generate, tickets: Callable[[], Sequence[Ticket]], portions: int) -> None:
        self._generate, self._tickets, self._count = generate, tickets, portions
        self._portions: dict[str, Portion] = {}  # of each group of the round
        self._gates: dict[str, asyncio.Future[None]] = {}  # through which they leave, in the order of the round
        self._missing: set[str] = set()  # groups that are not judged

    def together(self, workflow: GroupWorkflow) -> GroupWorkflow:
        """The workflow, whose groups leave when the last one of the round is judged, or has failed."""

        async def until_all_are_judged(ticket: Ticket) -> Sequence[Trajectory]:
            self._begin(ticket.group_id)
            try:
                trajectories = await workflow(ticket)
            except Exception:
                await self._leave(ticket.group_id)
                raise
            except asyncio.CancelledError:
                self._judged(ticket.group_id)
                raise
            await self._leave(ticket.group_id)
            return trajectories

        return until_all_are_judged

    def generate(self, request: GenerateRequest, *, least: int = 0) -> AsyncIterator[Completion]:
        """The completions of one group of the round; as for `Portion`. All engines of a round have one version."""
        return self._portions[request.id].generate(request)

    async def partials(self, known: Mapping[str, Sequence[int]], patience: float | None) -> Partials:
        """Nothing: a round that was cut short starts again as a whole."""
        return {}

    def _begin(self, id: str) -> None:
        """The first group of a round finds all the others in flight, too: they were admitted in one go."""
        if id in self._missing:
            return
        ids = [ticket.group_id for ticket in self._tickets()]
        dealt = [ids[k :: self._count] for k in range(self._count)]
        self._portions = {id: portion for some in dealt for portion in [Portion(self._generate, some)] for id in some}
        self._gates = {id: asyncio.get_running_loop().create_future() for id in ids}
        self._missing = set(ids)

    async def _leave(self, id: str) -> None:
        self._judged(id)
        await self._gates[id]

    def _judged(self, id: str) -> None:
        self._missing.discard(id)
        self._portions[id].leave(id)
        if not self._missing:
            # A moment later, when the last group waits, too: else it would be the first to leave.
            asyncio.get_running_loop().call_soon(self._open_gates)

    def _open_gates(self) -> None:
        for gate in self._gates.values():
            if not gate.done():
                gate.set_result(None)
