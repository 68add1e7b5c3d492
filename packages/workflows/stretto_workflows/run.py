"""The workflow of a run and of its evaluations: worker processes, and the services that a trajectory asks for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from stretto.core.forest import Tokens
from stretto.core.records import Verdict
from stretto.launch.preflight.checks import longest_prompt_allowed
from stretto.launch.preflight.plan import Plan
from stretto.rollout.single_turn import Score
from stretto.rollout.workflow import WorkflowConfig
from stretto.store.run_folder import RunFolder
from stretto_workflows.exchange import Services
from stretto_workflows.pool import WorkflowGroups, WorkflowPool
from stretto_workflows.rendering import PlainRendering, TemplateRendering
from stretto_workflows.session import Session


class RunWorkflows(WorkflowPool):
    """Worker processes of a run's workflow."""

    def __init__(
        self, plan: Plan, config: WorkflowConfig, log: Path, folder: RunFolder | None, say: Callable[[str], None]
    ) -> None:
        """`log`: log file of the processes. `folder`: the run folder; None: an evaluation without a run. `say` gets
        sentences for the log."""
        run = "" if folder is None else folder.mark
        super().__init__(config, log, hung=plan.recipe.deadlines.hung, say=say, run=run)
        self._plan = plan

    def groups(
        self, open_session: Callable[[str, Tokens, int], Session], score: Score, verdict: Callable[[float], Verdict]
    ) -> WorkflowGroups:
        """Create the maker of groups for the run, or for an evaluation.

        Args:
            open_session: opens the session of a trajectory.
            score: judges completions.
            verdict: converts the reward of a workflow.
        """
        plan, tokenizer = self._plan, self._plan.tokenizer
        services = Services(
            score,
            tokenizer.decode,
            PlainRendering(lambda text: tokenizer.encode_content(text) if text else ()),
            TemplateRendering(tokenizer) if tokenizer.has_chat_template else None,
            plan.sampling,
            longest_prompt_allowed(plan.recipe, plan.base) + plan.sampling.max_tokens,
            verdict,
            self.config,
        )
        return WorkflowGroups(self, open_session, plan.details, services)
