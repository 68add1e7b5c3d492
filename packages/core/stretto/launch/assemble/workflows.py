"""Assembling the workflow of a run and of its evaluations: worker processes, or a gateway for agents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from stretto.conversation.forest import Tokens
from stretto.conversation.session import Session
from stretto.core.engine import Generate
from stretto.core.records import Completion, Prompt, Trajectory, Verdict
from stretto.doors.loading import from_package
from stretto.launch.preflight.checks import longest_prompt_allowed
from stretto.launch.preflight.plan import Plan
from stretto.launch.recipe.extensions import AgentConfig
from stretto.loop.engines.sessions import TrajectorySessions, sessions_of_evaluation
from stretto.loop.evaluation import Converse
from stretto.rewards.service.judging import verdict_of
from stretto.rewards.service.wire import Worth
from stretto.rollout.controller import Ticket
from stretto.store.run_folder import RunFolder
from stretto.worlds.single_turn import Score
from stretto.worlds.workflows.exchange import Services
from stretto.worlds.workflows.pool import WorkflowGroups, WorkflowPool
from stretto.worlds.workflows.rendering import PlainRendering, TemplateRendering


class Conversations(Protocol):
    """Generates trajectories by a workflow or by agents (Protocol)."""

    async def __call__(self, ticket: Ticket, /) -> Sequence[Trajectory]:
        """Generate and judge the group of a ticket."""

    async def member(self, id: str, prompt: Prompt, member: int, seed: int) -> Trajectory:
        """Generate and judge one trajectory of an evaluation, with this id and seed."""


class AgentGateway(Protocol):
    """Serves a run's policy to agents (`stretto_app.extensions.agents.RunGateway`)."""

    @property
    def ended(self) -> int:
        """Number of trajectories that have ended; the watchdog takes it as progress."""

    async def start(self) -> None: ...
    async def close(self) -> None: ...
    def groups(
        self, open_session: Callable[[str, Tokens, int], Session], score: Score, verdict: Callable[[float], Verdict]
    ) -> Conversations: ...


#: Runs workflows, or serves agents; must be started and closed.
Conversing = WorkflowPool | AgentGateway


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
    if isinstance(config, AgentConfig):
        gateway = from_package("stretto_app.extensions.agents:RunGateway", "workflow.kind", "stretto_gateway")
        agents: AgentGateway = gateway(plan, config, folder, say)
        return agents
    if config is None:
        return None
    run = "" if folder is None else folder.mark
    return WorkflowPool(config, log, hung=plan.recipe.deadlines.hung, say=say, run=run)


def workflow_groups(plan: Plan, pool: Conversing, sessions: TrajectorySessions, score: Score) -> Conversations:
    """Return the object that generates the groups of a run by its workflow.

    Args:
        pool: worker processes or gateway, from `workflow_pool`.
        sessions: opens the session of each trajectory.
        score: judges completions.
    """
    if not isinstance(pool, WorkflowPool):
        return pool.groups(sessions.open, score, _verdict_of(plan))
    return WorkflowGroups(pool, sessions.open, plan.details, _services(plan, pool, score))


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
    opened = sessions_of_evaluation(generate, count)
    if not isinstance(pool, WorkflowPool):
        return pool.groups(opened, score, _verdict_of(plan)).member
    return WorkflowGroups(pool, opened, plan.details, _services(plan, pool, score)).member


def _services(plan: Plan, pool: WorkflowPool, score: Score) -> Services:
    tokenizer = plan.tokenizer
    return Services(
        score,
        tokenizer.decode,
        PlainRendering(lambda text: tokenizer.encode_content(text) if text else ()),
        TemplateRendering(tokenizer) if tokenizer.has_chat_template else None,
        plan.sampling,
        longest_prompt_allowed(plan.recipe, plan.base) + plan.sampling.max_tokens,
        _verdict_of(plan),
        pool.config,
    )


def _verdict_of(plan: Plan) -> Callable[[float], Verdict]:
    worth = Worth(right=plan.recipe.rewards.right, wrong=plan.recipe.rewards.wrong)
    return lambda value: verdict_of(value, worth)
