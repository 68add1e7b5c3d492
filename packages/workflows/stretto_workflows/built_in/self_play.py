"""Self-play: the policy answers and, in another role, criticises the answer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from stretto_workflows.built_in.wording import filled
from stretto_workflows.conversation import Conversation, Workflow
from stretto_workflows.task import Reward, WorkflowTask

_CRITIC = "Find the mistake in this answer, if there is one.\nQuestion: {prompt}\nAnswer: {answer}\nMistake:"
_AGAIN = "A critic says: {criticism}\nGive your final answer."


class SelfPlay(Workflow):
    """The policy answers, criticises the answer in another role, and answers again.

    In `by_turn`, each answer gets the reward of the last answer. Each criticism gets the improvement that follows it:
    the reward of the next answer minus that of the answer before.

    Args:
        critic: prompt of the critic; ``{prompt}`` and ``{answer}`` are replaced.
        again: next prompt of the answering role; ``{criticism}`` is replaced.
        rounds: rounds of criticism.
    """

    def __init__(self, critic: str = _CRITIC, again: str = _AGAIN, rounds: int = 1) -> None:
        self._critic, self._again, self._rounds = critic, again, rounds

    def words(self) -> Sequence[str]:
        asked = filled(self._critic, prompt="", answer="")
        return [asked, self._again.replace("{criticism}", "")]

    async def run(self, task: WorkflowTask, chat: Conversation) -> Reward:
        """Run one trajectory; returns the reward of the last answer. `by_turn`: the same for each answer, and for each
        criticism the gain that follows it. `named`: reward of the "first" and of the "last" answer."""
        reply = await chat.generate()
        scores = [await chat.score(reply.text)]
        answers, critics = [reply.node], list[int]()
        for _ in range(self._rounds):
            asked = filled(self._critic, prompt=task.prompt, answer=reply.text)
            critic = chat.new([{"role": "user", "content": asked}], cause="critic")
            criticism = await critic.generate()
            chat.say(self._again.replace("{criticism}", criticism.text))
            reply = await chat.generate()
            scores.append(await chat.score(reply.text))
            answers.append(reply.node)
            critics.append(criticism.node)
        gains = [after - before for before, after in pairwise(scores)]
        by_turn = dict.fromkeys(answers, scores[-1]) | dict(zip(critics, gains, strict=True))
        return Reward(scores[-1], by_turn=by_turn, named={"first": scores[0], "last": scores[-1]})
