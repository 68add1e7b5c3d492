"""Orders of one trajectory: the requests of its conversations to the conductor."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from stretto.core.errors import RefusedRequest, WireError
from stretto.processes.channel import RoleEnd
from stretto_workflows.task import ChatMessage, TurnReply, TurnScore
from stretto_workflows.wire import (
    CallOrder,
    CallRan,
    GiveUp,
    Order,
    OrderDone,
    OrderRefused,
    RunCall,
    ScoreOrder,
    ToWorker,
    TurnOrder,
)

_ASKED = {TurnOrder: "generate", ScoreOrder: "score", CallOrder: "tool"}  # methods of a conversation

_NOT_MADE = b"CancelledError: the workflow stopped to wait for this call before it was made"


class Orders:
    """Sends the orders of one trajectory to the conductor, and waits for their results. The arguments of `turn`,
    `score` and `call` are those of `TurnOrder`, `ScoreOrder` and `CallOrder` in `wire`. `call` awaits `run`, which
    returns the encoded result, only if the conductor has none on record. All three raise RefusedRequest if the
    conductor refuses the order, or a message would be too large. If a wait for a turn or a score is cancelled, so is
    the order, unless the trajectory is `over`. A call that has begun goes on, and its result is recorded."""

    def __init__(self, run: int, end: RoleEnd[ToWorker]) -> None:
        """Begin without an order. `run`: number of the trajectory on its worker. `end`: the worker's end of the
        channel."""
        self._run, self._end = run, end
        self._newest = 0
        self.over = False  # the conductor has given the trajectory up
        self._waiting: dict[int, asyncio.Future[OrderDone]] = {}
        self._calls: dict[int, Callable[[], Awaitable[bytes]]] = {}
        self._running: set[asyncio.Future[None]] = set()

    async def turn(
        self,
        messages: Sequence[ChatMessage],
        known: int,
        node: int,
        *,
        token_ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]],
        sampling: Mapping[str, Any],
        cause: str,
    ) -> TurnReply:
        asked, given = tuple(messages), tuple(token_ids)
        order = TurnOrder(self._run, self._number(), asked, known, node, given, tuple(tools), sampling, cause)
        reply = (await self._done(order)).reply
        assert reply is not None
        return reply

    async def score(self, text: str, answer: str) -> TurnScore:
        done = await self._done(ScoreOrder(self._run, self._number(), text, answer))
        assert done.score is not None
        return TurnScore.of(done.score, done.right)

    async def call(self, asked: bytes, run: Callable[[], Awaitable[bytes]], repeatable: bool) -> bytes:
        order = CallOrder(self._run, self._number(), asked, repeatable)
        self._calls[order.order] = run
        try:
            return (await self._done(order)).answer
        finally:
            self._calls.pop(order.order, None)

    def take(self, message: OrderDone | OrderRefused | RunCall) -> None:
        """Handle a message of the conductor: begin the call that it commands, or end the wait for an order's result.
        Call it in the event loop of the trajectory."""
        match message:
            case RunCall():
                call = asyncio.ensure_future(self._ran(message.order))
                self._running.add(call)
                call.add_done_callback(self._running.discard)
            case OrderDone() if (waiting := self._waiting.pop(message.order, None)) and not waiting.done():
                waiting.set_result(message)
            case OrderRefused() if (waiting := self._waiting.pop(message.order, None)) and not waiting.done():
                waiting.set_exception(RefusedRequest(message.field, message.found, message.allowed))

    async def _ran(self, order: int) -> None:
        run = self._calls.pop(order, None)
        answer = _NOT_MADE if run is None else await run()
        try:
            self._end.send(CallRan(self._run, order, answer))
        except WireError as error:
            if (waiting := self._waiting.pop(order, None)) and not waiting.done():
                waiting.set_exception(RefusedRequest("tool", "the answer is too long", str(error)))

    async def _done(self, order: Order) -> OrderDone:
        waiting: asyncio.Future[OrderDone] = asyncio.get_running_loop().create_future()
        self._waiting[order.order] = waiting
        try:
            self._end.send(order)
        except WireError as error:
            del self._waiting[order.order]
            raise RefusedRequest(_ASKED[type(order)], "what is asked is too long", str(error)) from None
        try:
            return await waiting
        except asyncio.CancelledError:
            self._waiting.pop(order.order, None)
            if not (self.over or isinstance(order, CallOrder)):
                self._end.send(GiveUp(self._run, order.order))
            raise

    def _number(self) -> int:
        self._newest += 1
        return self._newest
