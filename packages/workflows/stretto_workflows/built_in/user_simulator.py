"""Conversation in which the policy plays both the assistant and the user."""

from __future__ import annotations

from collections.abc import Sequence

from stretto_workflows.built_in.wording import filled
from stretto_workflows.conversation import Conversation, Workflow
from stretto_workflows.task import Reward, WorkflowTask

_USER = (
    "You are a user who talks with an assistant. You want the following:\n{prompt}\n"
    "Say only what the user says next. When you have got what you want, say {done}."
)


class UserSimulator(Workflow):
    """The policy plays both the assistant and the user, in two conversations with different instructions.

    Both sides are trained on; the user's turns get `user_reward`.

    Args:
        user: instructions of the user; ``{prompt}`` stands for the question, ``{done}`` for the closing word.
        done: word with which the user ends the conversation.
        turns: most turns of the assistant, at least 1.
        user_reward: reward of each turn of the user, for ``algorithm.advantages.credit = "turn"``.
    """

    needs_chat_template = "has two sides, which the chat template alone tells apart"

    def __init__(self, user: str = _USER, done: str = "DONE", turns: int = 4, user_reward: float = 0.0) -> None:
        if turns < 1:
            raise ValueError(f"turns is {turns}; 1 is the least")
        self._user, self._done, self._turns, self._user_reward = user, done, turns, user_reward

    def words(self) -> Sequence[str]:
        return [filled(self._user, prompt="", done=self._done)]

    async def run(self, task: WorkflowTask, chat: Conversation) -> Reward:
        """Run one trajectory, until the user says that it is done or the turns are used up; returns the reward of the
        assistant's last turn, and in `by_turn` the reward of each assistant's turn and `user_reward` for each of the
        user's. `named`: number of "turns" of both sides."""
        told = filled(self._user, prompt=task.prompt, done=self._done)
        user = chat.new([{"role": "user", "content": told}], cause="user")
        by_turn: dict[int, float] = {}
        reply, score = await chat.generate(), 0.0
        for turn in range(self._turns):
            score = await chat.score(reply.text)
            by_turn[reply.node] = score
            if turn + 1 == self._turns:
                break
            user.say(reply.text)
            said = await user.generate()
            by_turn[said.node] = self._user_reward
            if self._done in said.text:
                break
            chat.say(said.text)
            reply = await chat.generate()
        return Reward(score, by_turn=by_turn, named={"turns": float(sum(1 for _ in by_turn))})
