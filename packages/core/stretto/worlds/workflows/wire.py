"""Messages between the conductor and worker processes of workflows.

    conductor ─ Begin ─► worker ─ TurnOrder, ScoreOrder, CallOrder ─► conductor ─ OrderDone, OrderRefused ─► worker
                                  CallOrder ─► RunCall ─► CallRan ─► OrderDone
                         worker ─ MemberEnded ─► conductor

A trajectory has the number `run` on its worker, an order of it the number `order`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stretto.core.records import Record
from stretto.worlds.workflows.task import TurnReply, WorkflowTask

#: Bytes of one message at most.
LARGEST_MESSAGE = 64 << 20


#: Environment variables of a worker, and of all that it starts: its own mark, and that of its run.
MARK, RUN_MARK = "STRETTO_WORKFLOW", "STRETTO_WORKFLOW_RUN"


class WorkflowSpec(Record, frozen=True):
    """Settings of a worker. `settings` are the arguments of the workflow's class, as JSON; `memory` is a limit in
    bytes."""

    function: str
    settings: str
    descriptor: int
    memory: int
    path: str | None = None


# To the worker.


class Begin(Record, frozen=True, tag=True):
    """Run the workflow on a task."""

    run: int
    task: WorkflowTask


class OrderDone(Record, frozen=True, tag=True):
    """The result of an order: of a turn, a score or a call."""

    run: int
    order: int
    reply: TurnReply | None = None
    score: float | None = None
    right: bool = False
    answer: bytes = b""


class OrderRefused(Record, frozen=True, tag=True):
    """The order cannot be served; the workflow gets a `RefusedRequest`."""

    run: int
    order: int
    field: str
    found: str
    allowed: str


class RunCall(Record, frozen=True, tag=True):
    """Answer to a `CallOrder` that is not on record: the worker shall make the call."""

    run: int
    order: int


class GiveUp(Record, frozen=True, tag=True):
    """Abandon the trajectory: it has failed, or is no longer wanted."""

    run: int


ToWorker = Begin | OrderDone | OrderRefused | RunCall | GiveUp


# From the worker.


class WorkflowReady(Record, frozen=True, tag=True):
    """The workflow is loaded; carries its requirements (see `Workflow`)."""

    needs_chat_template: str = ""
    words: tuple[str, ...] = ()


class WorkflowRefused(Record, frozen=True, tag=True):
    """The workflow cannot be used; the process ends."""

    place: str
    found: str
    remedy: str


class TurnOrder(Record, frozen=True, tag=True):
    """Request for a completion after `token_ids`, if given, else after `messages`. The first `known` messages end with
    the turn `node` of the trajectory (PROMPT: they are the task's own; NOTHING: they are given)."""

    run: int
    order: int
    messages: tuple[Mapping[str, Any], ...] = ()
    known: int = 0
    node: int = -2
    token_ids: tuple[int, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    sampling: Mapping[str, Any] = {}
    cause: str = ""


class ScoreOrder(Record, frozen=True, tag=True):
    """Request for the reward of a text."""

    run: int
    order: int
    text: str
    answer: str


class CallOrder(Record, frozen=True, tag=True):
    """Request for a recorded call."""

    run: int
    order: int
    asked: bytes
    repeatable: bool


class CallRan(Record, frozen=True, tag=True):
    """Result of a call that the worker has made."""

    run: int
    order: int
    answer: bytes


class MemberEnded(Record, frozen=True, tag=True):
    """The workflow has returned, or failed with a reason; `by_turn` are rewards by node."""

    run: int
    value: float | None = None
    by_turn: Mapping[int, float] = {}
    named: Mapping[str, float] = {}
    failure: str = ""


class MemberGone(Record, frozen=True, tag=True):
    """An abandoned trajectory has ended on the worker."""

    run: int


Order = TurnOrder | ScoreOrder | CallOrder
FromWorker = WorkflowReady | WorkflowRefused | TurnOrder | ScoreOrder | CallOrder | CallRan | MemberEnded | MemberGone
