"""Workflow for environments with `reset` and `step`; the model's completions are the actions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from stretto.core.errors import RecipeError, WorkflowError
from stretto.doors.loading import load
from stretto_workflows.conversation import Conversation, Workflow
from stretto_workflows.task import Reward, WorkflowTask

_PLACE = "workflow.settings.make"


class TextEnvironment(Protocol):
    """Environment of one episode, with Gymnasium's interface and texts as observations and actions (Protocol). It must
    be deterministic for equal seeds and actions, because after a crash the episode is replayed with the recorded
    completions."""

    def reset(self, seed: int) -> str:
        """Begin the episode; returns the first observation."""

    def step(self, action: str) -> tuple[str, float, bool]:
        """Take an action; returns the next observation, the action's reward, and whether the episode has ended (then
        the observation is not shown)."""

    def close(self) -> None:
        """Release resources; called when the episode has ended or is abandoned."""


class EnvironmentPlay(Workflow):
    """The model plays one episode: observations are user messages, completions are actions; the question's own text is
    not shown. All trajectories of a group play the same one, whose seed is `task.group_seed`.

    Args:
        make: ``package.module:name`` of a callable that returns a `TextEnvironment`; WorkflowError if it cannot be
            loaded.
        arguments: arguments of `make`; the task's row may override each by a field of its name.
        instructions: system message in front of the observations; empty for none.
        turns: most actions of an episode.
    """

    def __init__(
        self, make: str, arguments: Mapping[str, Any] | None = None, instructions: str = "", turns: int = 32
    ) -> None:
        try:
            self._make: Callable[..., TextEnvironment] = load(make, _PLACE, "environment", {})  # type: ignore[assignment]
        except RecipeError as error:
            raise WorkflowError(error.problems) from error
        self._arguments, self._instructions, self._turns = dict(arguments or {}), instructions, turns

    def words(self) -> Sequence[str]:
        return [self._instructions] if self._instructions else []

    async def run(self, task: WorkflowTask, chat: Conversation) -> Reward:
        """Play one episode; returns the sum of its rewards, and in `by_turn` the reward of each action. `named`: number
        of "actions"."""
        own = {name: value for name, value in task.fields.items() if name in self._arguments}
        environment = self._make(**{**self._arguments, **own})
        rewards: dict[int, float] = {}
        try:
            system = [{"role": "system", "content": self._instructions}] if self._instructions else []
            episode = chat.new(system, cause="environment")
            episode.say(environment.reset(task.group_seed))
            for _ in range(self._turns):
                reply = await episode.generate()
                observation, rewards[reply.node], done = environment.step(reply.text)
                if done:
                    break
                episode.say(observation)
        finally:
            environment.close()
        return Reward(sum(rewards.values()), by_turn=rewards, named={"actions": float(len(rewards))})
