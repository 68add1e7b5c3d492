"""The workflow of a run, and of its evaluations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from stretto.core.engine import Generate
from stretto.core.records import Completion, Verdict
from stretto.loop.engines.sessions import TrajectorySessions, sessions_of_evaluation
from stretto.loop.evaluation import Converse
from stretto.rewards.service.judging import verdict_of
from stretto.rewards.service.wire import Worth
from stretto.store.folder.run_folder import RunFolder
from stretto.worlds.single_turn import Score
from stretto.worlds.workflows.exchange import Services
from stretto.worlds.workflows.group import WorkflowGroups
from stretto.worlds.workflows.pool import WorkflowPool
from stretto.worlds.workflows.rendering import PlainRendering, TemplateRendering
from stretto_app.launch.assemble.agents import RunGateway
from stretto_app.launch.preflight.checks import longest_prompt_allowed
from stretto_app.launch.preflight.plan import Plan
from stretto_gateway.agents.groups import AgentGroups
from stretto_gateway.config import AgentConfig

#: What makes trajectories of several turns, with its start and its end.
Conversing = WorkflowPool | RunGateway


def workflow_pool(
    plan: Plan, log: Path, say: Callable[[str], None] = lambda sentence: None, folder: RunFolder | None = None
) -> Conversing | None:
    """The processes of the recipe's workflow, or the gateway of its agents, not started yet; None if it has none.
    `folder`: of the run, if it is one."""
    config = plan.recipe.workflow
    if isinstance(config, AgentConfig):
        return RunGateway(plan, config, folder, say)
    if config is None:
        return None
    run = "" if folder is None else folder.mark
    return WorkflowPool(config, log, hung=plan.recipe.deadlines.hung, say=say, run=run)


def workflow_groups(
    plan: Plan, pool: Conversing, sessions: TrajectorySessions, score: Score
) -> WorkflowGroups | AgentGroups:
    """The groups of a run."""
    if isinstance(pool, RunGateway):
        return pool.groups(sessions.open, score, _verdict_of(plan))
    return WorkflowGroups(pool, sessions.open, plan.details, _services(plan, pool, score))


def conversing(
    plan: Plan,
    pool: Conversing | None,
    generate: Generate,
    score: Score,
    count: Callable[[Completion], None] = lambda completion: None,
) -> Converse | None:
    """The trajectories of an evaluation; None: single turns. `count` gets each turn."""
    if pool is None:
        return None
    opened = sessions_of_evaluation(generate, count)
    if isinstance(pool, RunGateway):
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
    """Of a number, by the recipe's rewards of right and wrong."""
    worth = Worth(right=plan.recipe.rewards.right, wrong=plan.recipe.rewards.wrong)
    return lambda value: verdict_of(value, worth)
