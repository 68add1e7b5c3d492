"""Several attempts, with feedback in between."""

from __future__ import annotations

from collections.abc import Sequence

from stretto_workflows.conversation import Conversation, Workflow
from stretto_workflows.task import Reward, WorkflowTask


class MultiTurn(Workflow):
    """The model tries until its completion is right, at most `tries` times. After each wrong completion but the last it
    gets feedback.

    Args:
        tries: most completions, at least 1.
        feedback: message after a wrong completion; ``{prompt}`` stands for the question.
        discount: factor on the reward of a right completion for each attempt before it.
    """

    def __init__(self, tries: int = 3, feedback: str = "That is not right. Try again.", discount: float = 0.9) -> None:
        if tries < 1:
            raise ValueError(f"tries is {tries}; 1 is the least")
        self._tries, self._feedback, self._discount = tries, feedback, discount

    def words(self) -> Sequence[str]:
        return [self._feedback.replace("{prompt}", "")] if self._tries > 1 else []

    async def run(self, task: WorkflowTask, chat: Conversation) -> Reward:
        """Run one trajectory; returns the reward of the last attempt. If that is right, its reward is multiplied by
        `discount` for each attempt before it. `by_turn`: reward of each attempt, the last one discounted in the same
        way. `named`: "tries", the number of attempts, and "first", the reward of the first."""
        found: list[float] = []
        for attempt in range(self._tries):
            reply = await chat.generate()
            score = await chat.score(reply.text)
            found.append(score * self._discount**attempt if score.right else float(score))
            if score.right:
                break
            chat.say(self._feedback.replace("{prompt}", task.prompt))
        return Reward(found[-1], by_turn=found, named={"tries": float(len(found)), "first": found[0]})
