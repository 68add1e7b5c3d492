"""The workflow of a run and of its evaluations: worker processes, and the services that a trajectory asks for."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path

from stretto.core.errors import DataError, Problem, RoleError, WorkflowError
from stretto.core.records import Verdict
from stretto.launch.preflight.checks import longest_prompt_allowed
from stretto.launch.preflight.plan import Plan
from stretto.model.hf.tokenizer import Tokenizer
from stretto.rollout.single_turn import Score
from stretto.rollout.workflow import PLACE, WorkflowConfig, WorkflowReady
from stretto.store.run_folder import RunFolder
from stretto_workflows.exchange import Services
from stretto_workflows.pool import WorkflowGroups, WorkflowPool, check_workflow
from stretto_workflows.rendering import PlainRendering, TemplateRendering
from stretto_workflows.session import OpenSession


class RunWorkflows(WorkflowPool):
    """Worker processes of a run's workflow, or of that of an evaluation, with what the recipe says of them."""

    def __init__(
        self, plan: Plan, config: WorkflowConfig, log: Path, folder: RunFolder | None, say: Callable[[str], None]
    ) -> None:
        """Set up the pool of worker processes of a run or evaluation; `WorkflowPool.start` starts them. `log`: their
        log file. `folder`: the run folder; None: an evaluation without a run. `say` is called with a sentence for each
        worker that is replaced."""
        run = "" if folder is None else folder.mark
        super().__init__(config, log, hung=plan.recipe.deadlines.hung, say=say, run=run)
        self._plan = plan

    def groups(self, open_session: OpenSession, score: Score, verdict: Callable[[float], Verdict]) -> WorkflowGroups:
        """Return the object that generates groups, or single trajectories of an evaluation, by the workflow.

        Args:
            open_session: opens the session of a trajectory, which records its turns.
            score: judges texts, when a workflow asks for the run's reward.
            verdict: converts the number that a workflow returns to a verdict.
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


def check_workflow_class(config: WorkflowConfig) -> WorkflowReady:
    """Load the workflow in a process that can be killed; returns its requirements.

    Raises:
        WorkflowError: it cannot be loaded: its process ended or hung, or refused it.
        RoleError: the process could not be started, for lack of memory or the like.
    """
    with tempfile.TemporaryDirectory(prefix="stretto-") as folder:
        log = Path(folder) / "workflow.txt"
        try:
            return asyncio.run(check_workflow(config, log))
        except RoleError as error:
            if isinstance(error.__cause__, OSError):  # the machine's shortage, not the user's mistake
                raise
            said = log.read_text(encoding="utf-8", errors="replace")[-300:].strip() if log.exists() else ""
            found = str(error).partition(";")[0] + (f": {said}" if said else "")
            raise WorkflowError([Problem(PLACE, found, "its module must be importable")]) from None


def check_workflow_fits(name: str, needs: WorkflowReady, tokenizer: Tokenizer, plain: str | None) -> None:
    """Check that tokenizer and prompts fulfil the requirements of a workflow.

    Args:
        name: of the workflow, for messages.
        needs: its requirements.
        plain: place (FILE:LINE) of a prompt that is no chat; None: all are chats.

    Raises:
        WorkflowError: it needs a chat template, and the tokenizer has none or a prompt is plain text; or it has words
            that the tokenizer cannot encode.
    """
    problems, why = [], needs.needs_chat_template
    if why and not tokenizer.has_chat_template:
        found = f"{name!r} {why}, and the tokenizer in {tokenizer.place} has none"
        problems.append(Problem(PLACE, found, "choose a model whose tokenizer has one, or another workflow"))
    elif why and plain is not None:
        found = f"{name!r} {why}, and the prompt at {plain} is plain text"
        problems.append(Problem(PLACE, found, 'set task.chat_template = "auto", or give the prompts as messages'))
    for text in needs.words:
        try:
            tokenizer.encode(text, special_tokens=False)
        except DataError as error:
            found = f"{name!r} says {text[:80]!r}, which the tokenizer cannot encode: {error.problems[0].found}"
            other = "give other words in [workflow.settings]" if needs.settings else "let its class say other words"
            problems.append(Problem(PLACE, found, f"{other}, or choose another model"))
    if problems:
        raise WorkflowError(problems)
