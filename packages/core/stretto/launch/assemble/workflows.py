"""Workflows of a run and of its evaluations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from stretto.conversation.forest import Tokens
from stretto.conversation.session import Session
from stretto.core.engine import Generate
from stretto.core.records import Completion, Prompt, Trajectory, Verdict
from stretto.doors.packages import from_package
from stretto.launch.preflight.checks import longest_prompt_allowed
from stretto.launch.preflight.plan import Plan
from stretto.launch.recipe.agents import AgentConfig
from stretto.loop.engines.sessions import TrajectorySessions, sessions_of_evaluation
from stretto.loop.evaluation import Converse
from stretto.rewards.service.judging import verdict_of
from stretto.rewards.service.wire import Worth
from stretto.rollout.controller import Ticket
from stretto.store.folder.run_folder import RunFolder
from stretto.worlds.single_turn import Score
from stretto.worlds.workflows.exchange import Services
from stretto.worlds.workflows.group import WorkflowGroups
from stretto.worlds.workflows.pool import WorkflowPool
from stretto.worlds.workflows.rendering import PlainRendering, TemplateRendering


class Conversations(Protocol):
    """Generates trajectories by a workflow or by agents (Protocol)."""

    async def __call__(self, ticket: Ticket, /) -> Sequence[Trajectory]:
        """Generate and judge the group of a ticket."""
        ...

    async def member(self, id: str, prompt: Prompt, member: int, seed: int) -> Trajectory:
        """Generate one trajectory of an evaluation."""
        ...


class AgentGateway(Protocol):
    """Serves a run's policy to agents (`stretto_app.extensions.agents.RunGateway`)."""

    @property
    def ended(self) -> int:
        """Number of trajectories that have ended: a sign of progress."""
        ...

    async def start(self) -> None: ...
    async def close(self) -> None: ...
    def groups(
        self, open_session: Callable[[str, Tokens, int], Session], score: Score, verdict: Callable[[float], Verdict]
    ) -> Conversations: ...


#: Makes trajectories of several turns; has to be started and closed.
Conversing = WorkflowPool | AgentGateway


def workflow_pool(
    plan: Plan, log: Path, say: Callable[[str], None] = lambda sentence: None, folder: RunFolder | None = None
) -> Conversing | None:
    """Worker processes of the recipe's workflow, or the gateway of its agents, not started yet; None if the recipe has
    neither. `folder`: that of the run, if there is one."""
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
    """Generates the groups of a run by its workflow."""
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
    """Generates the trajectories of an evaluation; None: single turns. `count` is called with each turn."""
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
    """Function from a number to a verdict, by the recipe's rewards of right and wrong."""
    worth = Worth(right=plan.recipe.rewards.right, wrong=plan.recipe.rewards.wrong)
    return lambda value: verdict_of(value, worth)
