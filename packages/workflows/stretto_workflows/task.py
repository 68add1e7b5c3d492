"""Input and results of a workflow."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from stretto.core.records import Prompt, Record
from stretto.rollout.workflow import QuestionDetails

#: A message as chat completions have it: ``{"role": "user", "content": "3+8="}``.
ChatMessage = Mapping[str, Any]


class WorkflowTask(Record, frozen=True):
    """One question, for one trajectory of its group: the first argument of `Workflow.run`.

    `prompt`: the question as text. `messages`: the question as a chat; a plain text is one user message. `answer`: its
    gold answer. `fields`: the row's further fields. `member`: index of the trajectory in its group. Draw random numbers
    from ``random.Random(task.seed)``, so that a trajectory that runs again after a crash draws the same. Draw from
    `group_seed` what all trajectories of the group must have alike, because their rewards are compared.

    Example::

        class First(stretto.Workflow):
            async def run(self, task: stretto.WorkflowTask, chat: stretto.Conversation) -> float:
                reply = await chat.generate()
                return float(reply.text.endswith(task.answer))
    """

    id: str
    prompt: str
    answer: str
    messages: tuple[ChatMessage, ...] = ()
    fields: Mapping[str, Any] = {}
    seed: int = 0
    member: int = 0
    group_seed: int = 0  # the same for all trajectories of the group; 0 for an agent


def task_of(questions: QuestionDetails, prompt: Prompt, member: int, seed: int, group_seed: int = 0) -> WorkflowTask:
    """Make the task of the trajectory with index `member` in its group. `questions`: chats and further fields of the
    rows; a prompt without a chat becomes one user message. `seed`: of the trajectory. `group_seed`: of all of the
    group."""
    key = (prompt.id, prompt.text, prompt.answer)
    messages = tuple(questions.chats.get(key) or ({"role": "user", "content": prompt.text},))
    fields = json.loads(questions.fields.get(key) or "{}")
    return WorkflowTask(prompt.id, prompt.text, prompt.answer, messages, fields, seed, member, group_seed)


class TurnReply(Record, frozen=True):
    """One sampled turn.

    `text`: the whole completion without special tokens. `message`: the turn as a chat message, with `tool_calls` if
    tools were offered and called, and a thought in `reasoning_content` if the model has a chat template. `truncated`:
    the turn reached its limit of tokens. `node`: id of the turn in the trajectory, for `stretto.Reward`.

    Example::

        class Patient(stretto.Workflow):
            async def run(self, task: stretto.WorkflowTask, chat: stretto.Conversation) -> float:
                reply: stretto.TurnReply = await chat.generate(max_tokens=16)
                while reply.truncated:
                    reply = await chat.generate(max_tokens=16)
                return float(task.answer in reply.text)
    """

    node: int
    text: str
    message: Mapping[str, Any]
    token_ids: tuple[int, ...]
    truncated: bool

    @property
    def calls(self) -> Sequence[Mapping[str, Any]]:
        """Tool calls in the turn, in the form of Chat Completions; empty if it has none."""
        found: Sequence[Mapping[str, Any]] = self.message.get("tool_calls") or ()
        return found


class TurnScore(float):
    """Reward of a text; `right` says whether it counts as right."""

    right: bool = False

    @classmethod
    def of(cls, reward: float, right: bool) -> Self:
        """Make a score from a reward and whether the text counts as right."""
        score = cls(reward)
        score.right = right
        return score


@dataclass(frozen=True)
class Reward:
    """Result of a workflow with more than one number.

    Args:
        value: the reward of the whole trajectory.
        by_turn: rewards of turns, by `node` of their replies, or as a list in the order in which the turns began; used
            with ``algorithm.advantages.credit = "turn"``. Turns that it leaves out have no reward of their own; a
            reward for a turn that is not there fails the trajectory.
        named: further numbers, such as parts of the reward, to record as metrics under their names; None: none.

    Example::

        class Short(stretto.Workflow):
            async def run(self, task: stretto.WorkflowTask, chat: stretto.Conversation) -> stretto.Reward:
                reply = await chat.generate()
                right = float(reply.text.endswith(task.answer))
                return stretto.Reward(right - 0.01 * len(reply.token_ids), named={"right": right})
    """

    value: float
    by_turn: Mapping[int, float] | Sequence[float] = ()
    named: Mapping[str, float] | None = None
