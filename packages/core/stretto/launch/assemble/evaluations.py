"""Assembling the evaluations of a run: the held-out questions, further sets, the final answers that maj@n counts, and
the choice of the best policy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from stretto.launch.preflight.plan import Plan
from stretto.launch.recipe.sections import EvaluationConfig, EvaluationSet
from stretto.loop.evaluation import BestPolicy, Evaluations, Evaluator, PeriodicEvaluation
from stretto.loop.records.recorder import Recorder
from stretto.rewards.functions import behind_the_last_sign, number_of_completion
from stretto.store.run_folder import RunFolder
from stretto.store.series.metrics import EvaluationLine
from stretto_verify.math.extract.final import final_answer, without_frame
from stretto_verify.math.limits import LONGEST_COMPLETION
from stretto_verify.thoughts import opened, said

_LONGEST = 20_000  # characters at the end of a prompt that a completion may repeat
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


# Thoughts count as little as for the reward: a vote is one for the answer that is judged.


def _of_math(prompt: str, completion: str) -> str | None:
    if len(completion) > LONGEST_COMPLETION:
        return None
    found = final_answer(without_frame(completion, prompt[-_LONGEST:]))
    return _plain(found.text) if found is not None else None


def _behind_the_last_sign(prompt: str, completion: str) -> str | None:
    return _plain(behind_the_last_sign(prompt, completion))


def _whole(prompt: str, completion: str) -> str | None:
    return None if opened(prompt) and not said(completion, prompt) else _plain(completion)


def _tagged(prompt: str, completion: str) -> str | None:
    text = said(completion, prompt)
    found = _TAGGED.findall(text)
    return _plain(found[-1] if found else text)


def _plain(text: str) -> str | None:
    """Return the text with single spaces; None if it is blank."""
    return " ".join(text.split()) or None


#: By name of the reward: function from (prompt, completion) to the final answer, or None if there is none. Rewards
#: that are not listed have no maj@n.
FINAL_ANSWERS: Mapping[str, Callable[[str, str], str | None]] = {
    "exact_match": _whole,
    "final_answer": _behind_the_last_sign,
    "last_number": number_of_completion,
    "math": _of_math,
    "reasoning_gym": _tagged,
}


def with_samples(evaluator: Evaluator, plan: Plan) -> Evaluator:
    """Return the evaluator with the recipe's number of completions per prompt, and with the reward's function for final
    answers (None for a reward that is not in `FINAL_ANSWERS`: no maj@n)."""
    chosen = plan.recipe.evaluation
    return replace(evaluator, samples=chosen.samples, final_answer=FINAL_ANSWERS.get(plan.recipe.rewards.deciding))


def evaluations(
    plan: Plan, folder: RunFolder, held_out: Evaluator, recorder: Recorder, say: Callable[[str], None]
) -> Evaluations:
    """Return all evaluations of a run: of the held-out questions, then of each further set, with the choice of the best
    policy if the recipe asks for it. `held_out`: evaluator of the held-out questions; `say`: writes a log line."""
    config = plan.recipe.evaluation
    held_out = with_samples(held_out, plan)
    sets = [(one, replace(held_out, prompts=prompts, samples=one.samples, name=one.name)) for one, prompts in plan.sets]
    of_best = next((evaluator for one, evaluator in sets if one.name == config.best_of), held_out)
    best: BestPolicy | None = None
    if config.keep_best or config.patience or config.goal:
        best = BestPolicy(
            folder,
            say,
            keeps=config.keep_best,
            patience=config.patience,
            least_gain=config.least_gain,
            goal=config.goal,
            goal_holds=config.goal_holds,
            earlier=_like(of_best, recorder),
        )

    def periodic(when: EvaluationConfig | EvaluationSet, evaluator: Evaluator) -> PeriodicEvaluation:
        name, gets = evaluator.name, best if evaluator.name == config.best_of else None
        earlier, asked = recorder.on_record.get(name, ()), evaluator.asked
        return PeriodicEvaluation(evaluator, recorder, when.every, when.minutes, name, gets, earlier, asked)

    further = [periodic(one, replace(evaluator, keep=lambda samples: None)) for one, evaluator in sets]
    return Evaluations([periodic(config, held_out), *further], best)


def _like(evaluator: Evaluator, recorder: Recorder) -> list[EvaluationLine]:
    """List the recorded evaluations of the same number of prompts and samples, and the same questions, as those of the
    evaluator; a resumed run may evaluate something else than before."""
    prompts, samples = len(evaluator.prompts), len(evaluator.prompts) * evaluator.samples
    lines = recorder.on_record.get(evaluator.name, ())
    return [line for line in lines if line.is_like(prompts, samples, evaluator.asked)]
