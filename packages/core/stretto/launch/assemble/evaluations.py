"""Assembling the evaluations of a run: the held-out questions, further sets, and the choice of the best policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from stretto.launch.assemble.final_answers import FINAL_ANSWERS
from stretto.launch.preflight.plan import Plan
from stretto.loop.best import BestPolicy
from stretto.loop.evaluation import Evaluations, Evaluator, PeriodicEvaluation
from stretto.loop.records.recorder import Recorder
from stretto.store.folder.run_folder import RunFolder
from stretto.store.series.metrics import EvaluationLine, read_metrics, read_sets


def with_samples(evaluator: Evaluator, plan: Plan) -> Evaluator:
    """Return the evaluator with the recipe's number of completions per prompt, and with the reward's function for final
    answers."""
    chosen = plan.recipe.evaluation
    return replace(evaluator, samples=chosen.samples, final_answer=FINAL_ANSWERS.get(plan.recipe.rewards.deciding))


def evaluations(
    plan: Plan, folder: RunFolder, held_out: Evaluator, recorder: Recorder, say: Callable[[str], None]
) -> Evaluations:
    """Return all evaluations of a run. `held_out`: evaluator of the held-out questions; `say`: writes a log line."""
    config = plan.recipe.evaluation
    held_out = with_samples(held_out, plan)
    best = _best(plan, folder, say) if config.keep_best or config.patience or config.goal else None
    first = PeriodicEvaluation(
        held_out, recorder, config.every, config.minutes, best=best if not config.best_of else None
    )
    further = [
        PeriodicEvaluation(
            replace(held_out, prompts=prompts, samples=one.samples, name=one.name, keep=lambda samples: None),
            recorder,
            one.every,
            one.minutes,
            one.name,
            best if config.best_of == one.name else None,
        )
        for one, prompts in plan.sets
    ]
    return Evaluations([first, *further], best)


def _best(plan: Plan, folder: RunFolder, say: Callable[[str], None]) -> BestPolicy:
    config = plan.recipe.evaluation
    earlier: list[EvaluationLine] = []
    if folder.metrics.exists():
        earlier += (
            read_sets(folder.metrics).get(config.best_of, []) if config.best_of else read_metrics(folder.metrics)[1]
        )
    return BestPolicy(
        folder,
        say,
        keeps=config.keep_best,
        patience=config.patience,
        least_gain=config.least_gain,
        goal=config.goal,
        goal_holds=config.goal_holds,
        earlier=earlier,
    )
