"""Best of n: the policy samples several completions, and chooses one as a judge."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

from stretto_workflows.built_in.wording import filled
from stretto_workflows.conversation import Conversation, Workflow
from stretto_workflows.task import Reward, WorkflowTask

_JUDGE = "Question: {prompt}\n{answers}\nWhich answer is right? Say its number."
_MOST_DIGITS = 6


class BestOfN(Workflow):
    """The policy samples `n` completions in parallel, then, prompted as a judge, chooses one of them.

    The trajectory's reward is that of the chosen completion. In `by_turn`, each completion gets its own reward, and the
    judge's turn that of the chosen completion. If the judge names no valid number, the first completion counts as
    chosen.

    Args:
        n: number of completions, at least 2.
        judge: prompt of the judge; ``{prompt}`` and ``{answers}`` (numbered, one a line) are replaced.
    """

    def __init__(self, n: int = 4, judge: str = _JUDGE) -> None:
        if n < 2:
            raise ValueError(f"n is {n}; 2 is the least")
        self._n, self._judge = n, judge

    def words(self) -> Sequence[str]:
        numbers = "\n".join(f"{number}: " for number in range(1, self._n + 1))
        return [filled(self._judge, prompt="", answers=numbers)]

    async def run(self, task: WorkflowTask, chat: Conversation) -> Reward:
        """Run one trajectory: sample the completions, and let the model judge them. Returns the reward of the chosen
        one, the first if the judge names none; in `by_turn` each completion's own reward, and for the judge that of the
        chosen one. `named`: "mean" and "best" reward of all completions."""
        replies = await asyncio.gather(*(chat.copy().generate() for _ in range(self._n)))
        scores = await asyncio.gather(*(chat.score(reply.text) for reply in replies))
        answers = "\n".join(f"{number}: {reply.text}" for number, reply in enumerate(replies, 1))
        asked = filled(self._judge, prompt=task.prompt, answers=answers)
        judge = await chat.new([{"role": "user", "content": asked}], cause="judge").generate()
        named = re.search(r"\d+", judge.text)
        number = int(named[0]) if named and len(named[0]) <= _MOST_DIGITS else 0
        chosen = number if 1 <= number <= self._n else 1
        value = scores[chosen - 1]
        by_turn = dict(zip((reply.node for reply in replies), scores, strict=True)) | {judge.node: value}
        return Reward(value, by_turn=by_turn, named={"mean": sum(scores) / self._n, "best": max(scores)})
