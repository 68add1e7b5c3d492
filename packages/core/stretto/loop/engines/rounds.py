"""Rounds: groups that begin together and end together, so that results do not depend on the timing of events.

    admission ─► a round ─┬─► portion 0 ─► an engine without other work ─┐
                          └─► portion 1 ─► an engine without other work ─┴─► judged ─► all groups leave together

The sequences that share a forward pass influence the last bits of its results. In a round, this batch composition
depends on the questions and the weights alone:

- A round consists of all groups that may start when no group is in flight (`rollout.controller.Controller`).
- With n portions, portion k gets the groups k, k + n, k + 2n, ... of the round. A portion runs alone on one engine.
- All groups of a round leave together and in order, so the ledger has a round either in flight or finished.
- After a crash, the whole round is generated again from the first token; after the loss of an engine, its portion is
  (`loop.engines.in_flight.InFlight` without a journal).

Decision 10: docs/explanation/decisions/0010-rounds.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from stretto.core.engine import Generate
from stretto.core.errors import RefusedRequest
from stretto.core.records import Completion, GenerateRequest, Partials, Trajectory
from stretto.rollout.controller import Ticket
from stretto.rollout.single_turn import GroupWorkflow


class _Portion:
    """Groups that one engine generates together. Their requests are sent, in one call, once every group that is still
    in the portion has called `generate`. `ids`: of the groups, in the order of the round."""

    def __init__(self, generate: Generate, ids: Sequence[str]) -> None:
        self._generate = generate
        self._requests: dict[str, GenerateRequest | None] = dict.fromkeys(ids)  # in the order of the round
        self._wanted = set(ids)  # groups that are still in the portion
        self._queues: dict[str, asyncio.Queue[Completion | Exception]] = {}  # of groups that wait in `generate`
        self._sent = False  # reset when the engine is lost
        self._generating: asyncio.Task[None] | None = None

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Completion]:
        """Wait until all groups of the portion have called this, then yield the completions of the group of `request`.

        Raises:
            EngineLost, or another error of the engine: it is raised in all groups that wait here. The portion is sent
                again once they have all called this again.
            RefusedRequest: the engine refused this request; the others of the portion are generated.
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
        """Remove the group with this id, which will not call `generate` again; the others no longer wait for it."""
        self._wanted.discard(id)
        self._send_if_all_have_come()

    def _send_if_all_have_come(self) -> None:
        if not self._sent and self._queues and self._queues.keys() == self._wanted:
            self._sent = True
            self._generating = asyncio.create_task(self._send([r for r in self._requests.values() if r is not None]))

    async def _send(self, requests: Sequence[GenerateRequest]) -> None:
        try:
            await self._divided(requests, set())
        except Exception as error:  # any failure of the engine is raised in every group that waits for the portion
            self._sent = False
            for queue in self._queues.values():
                queue.put_nowait(error)

    async def _divided(self, requests: Sequence[GenerateRequest], delivered: set[tuple[str, int]]) -> None:
        """Send requests together, and put their completions into the groups' queues, except those that are in
        `delivered`, as (group id, member), already; the others are added to it. An engine that refuses one request
        refuses all: then each half of the unfinished requests is sent again, one after the other, until a refused
        request is alone, whose queue gets the error. So what runs together depends on the questions and the weights
        alone."""
        try:
            async for completion in self._generate(*requests):
                place = completion.request, completion.member
                if place not in delivered and place[0] in self._queues:  # else its group ended before, or was cancelled
                    self._queues[place[0]].put_nowait(completion)
                delivered.add(place)
        except RefusedRequest as refused:
            left = [one for one in requests if not {(one.id, n) for n in range(len(one.seeds))} <= delivered]
            if len(left) > 1:
                for half in (left[: len(left) // 2], left[len(left) // 2 :]):
                    await self._divided(half, delivered)
                return
            for request in left or requests[:1]:
                self._requests[request.id] = None
                if request.id in self._queues:
                    self._queues[request.id].put_nowait(refused)


class Rounds:
    """Generates for groups in rounds (`generate`), and releases the groups of a round together (`together`).

    Args:
        generate: sends requests to one engine.
        tickets: returns the tickets of the groups in flight, in the order of their admission.
        portions: number of portions of each round, one for every engine.
    """

    def __init__(self, generate: Generate, tickets: Callable[[], Sequence[Ticket]], portions: int) -> None:
        self._generate, self._tickets, self._count = generate, tickets, portions
        self._portions: dict[str, _Portion] = {}  # portion of each group of the round
        self._gates: dict[str, asyncio.Future[None]] = {}  # by group; resolved in the order of the round
        self._missing: set[str] = set()  # groups not judged yet

    def together(self, workflow: GroupWorkflow) -> GroupWorkflow:
        """Wrap `workflow`. The returned workflow does the same, but returns or raises only when all groups of the round
        are judged or have failed. A group that is cancelled leaves at once."""

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
        """Wait until all groups of the request's portion of the round have called this, then yield the completions of
        the group. Raises the engine's errors, such as EngineLost and RefusedRequest. `request.id` is the id of a group
        in `together`. `least` is ignored: all engines of a round serve the same version."""
        return self._portions[request.id].generate(request)

    async def partials(self, known: Mapping[str, Sequence[int]], patience: float | None) -> Partials:
        """Return an empty dict: tokens in flight are not kept, since an interrupted round starts again as a whole."""
        return {}

    def _begin(self, id: str) -> None:
        """Divide the round into portions when its first group starts; all groups of the round are admitted by then.
        Does nothing for the later groups. `id`: of the group that starts."""
        if id in self._missing:
            return
        ids = [ticket.group_id for ticket in self._tickets()]
        dealt = [ids[k :: self._count] for k in range(self._count)]
        self._portions = {id: portion for some in dealt for portion in [_Portion(self._generate, some)] for id in some}
        self._gates = {id: asyncio.get_running_loop().create_future() for id in ids}
        self._missing = set(ids)

    async def _leave(self, id: str) -> None:
        self._judged(id)
        await self._gates[id]

    def _judged(self, id: str) -> None:
        if (portion := self._portions.get(id)) is None:  # all groups of its round were stopped, and the next has begun
            return
        self._missing.discard(id)
        portion.leave(id)
        if not self._missing:
            # In the next iteration of the event loop, when the last group waits too; else it would leave first.
            asyncio.get_running_loop().call_soon(self._open_gates)

    def _open_gates(self) -> None:
        for gate in self._gates.values():
            if not gate.done():
                gate.set_result(None)
