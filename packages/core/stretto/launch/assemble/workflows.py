"""Assembling the workflow of a run and of its evaluations, which a package beside the core has: worker processes, or a
gateway for agents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from stretto.core.engine import Generate
from stretto.core.forest import Tokens
from stretto.core.records import Completion, Prompt, Trajectory, Verdict
from stretto.doors.loading import from_package
from stretto.launch.preflight.plan import Plan
from stretto.launch.recipe.extensions import AgentConfig
from stretto.loop.engines.in_flight import InFlight
from stretto.loop.evaluation import Converse
from stretto.rewards.service.judging import verdict_of
from stretto.rewards.service.wire import Worth
from stretto.rollout.controller import Ticket
from stretto.rollout.single_turn import Score
from stretto.rollout.workflow import PLACE
from stretto.store.ledger.ledger import Ledger
from stretto.store.ledger.reading import UnfinishedGroup
from stretto.store.run_folder import RunFolder

_SESSIONS = "stretto_workflows.sessions"

#: Opens the session of a trajectory (`stretto_workflows.session.Session`), by its id, token ids of its prompt, and its
#: seed.
Open = Callable[[str, Tokens, int], Any]


class Conversations(Protocol):
    """Generates trajectories by a workflow or by agents (Protocol)."""

    async def __call__(self, ticket: Ticket, /) -> Sequence[Trajectory]:
        """Generate and judge the group of a ticket."""

    async def member(self, id: str, prompt: Prompt, member: int, seed: int) -> Trajectory:
        """Generate and judge one trajectory of an evaluation, with this id and seed."""


class Conversing(Protocol):
    """Runs workflows (`stretto_workflows.run.RunWorkflows`), or serves a run's policy to agents
    (`stretto_app.extensions.agents.RunGateway`); must be started and closed."""

    @property
    def ended(self) -> int:
        """Number of trajectories that have ended; the watchdog takes it as progress."""

    @property
    def pids(self) -> Sequence[int] | None:
        """Process ids of its workers; None: it works in the conductor's process."""

    async def start(self) -> None: ...
    async def close(self) -> None: ...
    def groups(self, open_session: Open, score: Score, verdict: Callable[[float], Verdict]) -> Conversations: ...


def workflow_pool(
    plan: Plan, log: Path, say: Callable[[str], None] = lambda sentence: None, folder: RunFolder | None = None
) -> Conversing | None:
    """Create the worker processes of the recipe's workflow, or the gateway for its agents, without starting them. None
    if the recipe has neither.

    Args:
        log: log file of the worker processes.
        say: writes a log line.
        folder: run folder; None: an evaluation without a run.
    """
    config = plan.recipe.workflow
    if config is None:
        return None
    made: Conversing
    if isinstance(config, AgentConfig):
        gateway = from_package("stretto_app.extensions.agents:RunGateway", "workflow.kind", "stretto_gateway")
        made = gateway(plan, config, folder, say)
    else:
        made = from_package("stretto_workflows.run:RunWorkflows", PLACE)(plan, config, log, folder, say)
    return made


def workflow_groups(
    plan: Plan,
    pool: Conversing,
    in_flight: InFlight,
    ledger: Ledger,
    unfinished: Sequence[UnfinishedGroup],
    score: Score,
) -> Conversations:
    """Return the object that generates the groups of a run by its workflow.

    Args:
        pool: worker processes or gateway, from `workflow_pool`.
        in_flight: generates the turns of the sessions.
        unfinished: groups whose sessions continue from their record.
        score: judges completions.
    """
    opened = from_package(f"{_SESSIONS}:sessions_of_run", PLACE)(in_flight, ledger, unfinished)
    return pool.groups(opened, score, _verdict_of(plan))


def conversing(
    plan: Plan,
    pool: Conversing | None,
    generate: Generate,
    score: Score,
    count: Callable[[Completion], None] = lambda completion: None,
) -> Converse | None:
    """Return the function that generates one trajectory of an evaluation by the recipe's workflow; None if `pool` is
    None: the evaluation has single turns.

    Args:
        generate: sends requests to an engine.
        score: judges completions.
        count: called with each sampled turn.
    """
    if pool is None:
        return None
    opened = from_package(f"{_SESSIONS}:sessions_of_evaluation", PLACE)(generate, count)
    return pool.groups(opened, score, _verdict_of(plan)).member


def _verdict_of(plan: Plan) -> Callable[[float], Verdict]:
    worth = Worth(right=plan.recipe.rewards.right, wrong=plan.recipe.rewards.wrong)
    return lambda value: verdict_of(value, worth)
