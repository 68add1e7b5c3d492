"""Parts that packages beside the core bring to a run: its machines, which are this machine alone or also others, and
the workflow of the run and of its evaluations: worker processes, or a gateway for agents."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

from stretto.core.engine import Generate
from stretto.core.events import Span
from stretto.core.forest import Tokens
from stretto.core.records import Completion, Prompt, Trajectory, Verdict
from stretto.doors.loading import from_package, is_there
from stretto.launch.assemble.specs import Endpoints
from stretto.launch.preflight.checks import medium_of
from stretto.launch.preflight.plan import Plan
from stretto.launch.recipe.extensions import AgentConfig
from stretto.loop.engines.in_flight import InFlight
from stretto.loop.engines.pool import EnginePool
from stretto.loop.evaluation import Converse
from stretto.loop.records.totals import Tenure
from stretto.loop.trainer_link import StartRanks
from stretto.processes.spawn import Spawner
from stretto.rewards.service.judging import verdict_of
from stretto.rewards.service.wire import Worth
from stretto.rollout.controller import Ticket
from stretto.rollout.single_turn import Score
from stretto.rollout.workflow import PLACE
from stretto.store.ledger.ledger import Ledger
from stretto.store.ledger.reading import UnfinishedGroup
from stretto.store.run_folder import RunFolder

_PACKAGES = ("stretto_app", "stretto_cluster")


@dataclass(frozen=True)
class MachineParts:
    """Arguments for the `Machines` of a run. `report`: writes a log line and records it; `tenure`: identifies this
    conductor among all conductors of the run."""

    plan: Plan
    folder: RunFolder
    endpoints: Endpoints
    engines: EnginePool
    report: Callable[[str], None]
    spawner: Spawner
    tenure: Tenure


class Machines:
    """Services of a run for other machines: the port at which they join, the weights that they receive, the ranks and
    engines that they run.

    This class itself is for a run on one machine and offers none of them; a subclass in `stretto_app` does
    (`machines_of`).
    """

    ranks: StartRanks | None = None  # starts trainer ranks on other machines; None: there are no other machines

    def __init__(self, parts: MachineParts) -> None:
        self._parts = parts

    async def open(self) -> None:
        """Let machines join; this class only logs how weights reach the engines. Raises RecipeError if an address
        cannot be listened on."""
        medium = medium_of(self._parts.plan.recipe)
        self._parts.report(f"weights.medium is {medium.medium}: {medium.reason}")

    async def supervise(self) -> NoReturn:
        """Replace those services for other machines that have died, until an error ends the run. This class has none,
        and waits until it is cancelled. Raises RoleDied if a service has used up its restart budget."""
        await asyncio.get_running_loop().create_future()
        raise AssertionError("nobody sets it")

    def drain_spans(self) -> list[Span]:
        """Return the time spans of other machines since the last call; here none."""
        return []

    async def close(self, why: str, again: bool) -> None:
        """Dismiss all machines and end the services; here nothing. `why`: the reason that machines are given; `again`:
        the run may be resumed, so machines may try to join it again."""


def machines_of(parts: MachineParts) -> Machines:
    """Return the machines of a run, not yet opened. If `stretto_cluster` is installed, a run on this machine alone too
    gets a port at which machines can join, for `stretto scale`. Raises RecipeError if the recipe needs other machines,
    and the package is missing or has another version."""
    if not parts.plan.recipe.has_machines and not is_there(*_PACKAGES):
        return Machines(parts)
    machines: Machines = from_package("stretto_app.extensions.machines:cluster_of", "cluster", *_PACKAGES)(parts)
    return machines


_SESSIONS = "stretto_workflows.sessions"

#: Opens the session of a trajectory (`stretto_workflows.session.Session`), by its id, token ids of its prompt, and its
#: seed.
Open = Callable[[str, Tokens, int], Any]


class _Conversations(Protocol):
    """Generates trajectories by a workflow or by agents (Protocol)."""

    async def __call__(self, ticket: Ticket, /) -> Sequence[Trajectory]:
        """Generate and judge the group of a ticket; returns its trajectories, failed ones included."""

    async def member(self, id: str, prompt: Prompt, member: int, seed: int) -> Trajectory:
        """Generate and judge one trajectory of an evaluation, with this id and seed. `member`: its number among those
        of the prompt, from 0."""


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
    def groups(self, open_session: Open, score: Score, verdict: Callable[[float], Verdict]) -> _Conversations:
        """Return the object that generates trajectories, each in a session from `open_session`. `score`: judges
        completions by the recipe's reward; `verdict`: converts a reward that a workflow gives itself."""


def workflow_pool(
    plan: Plan, log: Path, say: Callable[[str], None] = lambda sentence: None, folder: RunFolder | None = None
) -> Conversing | None:
    """Create the worker processes of the recipe's workflow, or the gateway for its agents, without starting them. None
    if the recipe has neither.

    Args:
        log: log file of the worker processes.
        say: writes a log line.
        folder: run folder; None: an evaluation without a run.

    Raises:
        RecipeError: the package for workflows or for agents is missing or has another version.
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
) -> _Conversations:
    """Return the object that generates the groups of a run by its workflow.

    Args:
        pool: worker processes or gateway, from `workflow_pool`.
        in_flight: generates the turns of the sessions.
        ledger: records the sessions.
        unfinished: groups of an earlier process of the run, whose sessions continue from their record.
        score: judges completions.
    """
    opened = from_package(f"{_SESSIONS}:sessions_of_run", PLACE)(in_flight, ledger, unfinished, renders=True)
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
    """Return the function that converts a workflow's own reward to a verdict, by the recipe's `right` and `wrong`."""
    worth = Worth(right=plan.recipe.rewards.right, wrong=plan.recipe.rewards.wrong)
    return lambda value: verdict_of(value, worth)
