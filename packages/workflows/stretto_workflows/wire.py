"""Messages between the conductor and worker processes of workflows.

    conductor ─ Begin ─► worker ─ TurnOrder, ScoreOrder, CallOrder ─► conductor ─ OrderDone, OrderRefused ─► worker
                                  CallOrder ─► RunCall ─► CallRan ─► OrderDone
                         worker ─ MemberEnded, MemberGone ─► conductor

An *order* is a request of a running workflow to the conductor. `run` is the number of the trajectory on its worker,
`order` the number of an order within the trajectory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stretto.core.errors import Problem
from stretto.core.records import Record
from stretto.rollout.workflow import WorkflowReady
from stretto_workflows.task import TurnReply, WorkflowTask

#: Most bytes of one message.
LARGEST_MESSAGE = 64 << 20


#: Environment variables of a worker, which its descendants inherit: mark of the worker, mark of its run.
MARK, RUN_MARK = "STRETTO_WORKFLOW", "STRETTO_WORKFLOW_RUN"


class WorkflowSpec(Record, frozen=True):
    """Settings of a worker. `function`: name of the workflow. `settings`: arguments of its class, as a JSON object.
    `descriptor`: of the worker's end of the channel. `memory`: limit in bytes. `path`: folder in which the module is
    looked for first; None: none."""

    function: str
    settings: str
    descriptor: int
    memory: int
    path: str | None = None


# To the worker.


class Begin(Record, frozen=True, tag=True):
    """Command to run the workflow on a task. `run`: number of the trajectory on its worker, by which all further
    messages name it."""

    run: int
    task: WorkflowTask


class OrderDone(Record, frozen=True, tag=True):
    """Result of order number `order` of a trajectory (`run`): `reply` of a turn, `score` and `right` of a score, or
    `answer` of a call. The other fields keep their defaults."""

    run: int
    order: int
    reply: TurnReply | None = None
    score: float | None = None
    right: bool = False
    answer: bytes = b""


class OrderRefused(Record, frozen=True, tag=True):
    """Message that order number `order` of a trajectory (`run`) cannot be served; the workflow's method raises a
    `RefusedRequest` with these fields."""

    run: int
    order: int
    field: str
    found: str
    allowed: str


class RunCall(Record, frozen=True, tag=True):
    """Command to make the call of a `CallOrder`, because its result is not on record. `CallRan` is the reply."""

    run: int
    order: int


class GiveUp(Record, frozen=True, tag=True):
    """Command to cancel the trajectory's workflow: it has failed, or its result is no longer needed. The reply is
    `MemberGone`, perhaps after the `MemberEnded` that was under way. From the worker: the workflow no longer waits for
    the result of `order`, a turn or a score."""

    run: int
    order: int = 0


ToWorker = Begin | OrderDone | OrderRefused | RunCall | GiveUp


# From the worker.


class WorkflowRefused(Record, frozen=True, tag=True):
    """Message that the workflow cannot be loaded, with every reason; the process ends."""

    problems: tuple[Problem, ...]


class TurnOrder(Record, frozen=True, tag=True):
    """Request for a completion after `token_ids`, if given, otherwise after `messages`. The first `known` messages are
    the history that ends with the turn `node`; `node` is PROMPT if they are the task's messages, NOTHING if no leading
    messages are known. `tools`: as in Chat Completions. `sampling`: "max_tokens" and "stop", where the workflow gave
    them. `cause`: reason of a branch, for the record."""

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
    """Request of a trajectory (`run`), its order number `order`, for the reward of a text, judged against the gold
    answer `answer`."""

    run: int
    order: int
    text: str
    answer: str


class CallOrder(Record, frozen=True, tag=True):
    """Request to make a call and record its result, or to return the recorded one. `asked`: name and arguments as JSON,
    by which the record is found. `repeatable`: it may be made again after a crash."""

    run: int
    order: int
    asked: bytes
    repeatable: bool


class CallRan(Record, frozen=True, tag=True):
    """Result of a call that the worker has made for order number `order` of a trajectory (`run`); `answer`: encoded by
    the worker."""

    run: int
    order: int
    answer: bytes


class MemberEnded(Record, frozen=True, tag=True):
    """Message that the workflow has returned the reward `value`, or (None) failed with the reason `failure`. `by_turn`:
    rewards by node, or by -1, -2, ... for the first, second, ... turn. `named`: further rewards by name."""

    run: int
    value: float | None = None
    by_turn: Mapping[int, float] = {}
    named: Mapping[str, float] = {}
    failure: str = ""


class MemberGone(Record, frozen=True, tag=True):
    """Message that nothing of a trajectory runs on the worker any more; after its `MemberEnded`, or without one if it
    was abandoned."""

    run: int


Order = TurnOrder | ScoreOrder | CallOrder
FromWorker = WorkflowReady | WorkflowRefused | Order | GiveUp | CallRan | MemberEnded | MemberGone
