"""The workflow of a run, and of its evaluations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from stretto.core.engine import Generate
from stretto.core.records import Completion, Verdict
from stretto.launch.preflight.checks import longest_prompt_allowed
from stretto.launch.preflight.plan import Plan
from stretto.loop.engines.sessions import TrajectorySessions, sessions_of_evaluation
from stretto.loop.evaluation import Converse
from stretto.rewards.service.judging import verdict_of
from stretto.rewards.service.wire import Worth
from stretto.worlds.single_turn import Score
from stretto.worlds.workflows.exchange import Services
from stretto.worlds.workflows.group import WorkflowGroups
from stretto.worlds.workflows.pool import WorkflowPool
from stretto.worlds.workflows.rendering import PlainRendering, TemplateRendering


def workflow_pool(plan: Plan, log: Path, say: Callable[[str], None] = lambda sentence: None) -> WorkflowPool | None:
    """The processes of the recipe's workflow, not started yet; None if it has none."""
    config = plan.recipe.workflow
    return None if config is None else WorkflowPool(config, log, hung=plan.recipe.deadlines.hung, say=say)


def workflow_groups(plan: Plan, pool: WorkflowPool, sessions: TrajectorySessions, score: Score) -> WorkflowGroups:
    """The groups of a run."""
    return WorkflowGroups(pool, sessions.open, plan.details, _services(plan, pool, score))


def conversing(
    plan: Plan,
    pool: WorkflowPool | None,
    generate: Generate,
    score: Score,
    count: Callable[[Completion], None] = lambda completion: None,
) -> Converse | None:
    """The trajectories of an evaluation; None: single turns. `count` gets each turn."""
    if pool is None:
        return None
    opened = sessions_of_evaluation(generate, count)
    return WorkflowGroups(pool, opened, plan.details, _services(plan, pool, score)).member


def _services(plan: Plan, pool: WorkflowPool, score: Score) -> Services:
    tokenizer, rewards = plan.tokenizer, plan.recipe.rewards
    worth = Worth(right=rewards.right, wrong=rewards.wrong)

    def verdict(value: float) -> Verdict:
        return verdict_of(value, worth)

    return Services(
        score,
        tokenizer.decode,
        PlainRendering(lambda text: tokenizer.encode(text, special_tokens=False) if text else ()),
        TemplateRendering(tokenizer) if tokenizer.has_chat_template else None,
        plan.sampling,
        longest_prompt_allowed(plan.recipe, plan.base) + plan.sampling.max_tokens,
        verdict,
        pool.config,
    )
