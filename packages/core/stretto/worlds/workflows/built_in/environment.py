"""An environment of reset and step, whose actions are what the model says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from stretto.core.errors import RecipeError, WorkflowError
from stretto.doors.loading import load
from stretto.worlds.workflows.conversation import Conversation, Workflow
from stretto.worlds.workflows.task import Reward, WorkflowTask

_PLACE = "workflow.settings.make"


class TextEnvironment(Protocol):
    """One episode in the form of Gymnasium, with texts. Equal seeds and actions have to give equal observations: after
    a crash the episode is played again up to where it was, without the model."""

    def reset(self, seed: int) -> str:
        """Begin; the first observation."""
        ...

    def step(self, action: str) -> tuple[str, float, bool]:
        """The observation behind an action, its reward, and whether the episode has ended."""
        ...

    def close(self) -> None:
        """The episode has ended, or was given up."""
        ...


class EnvironmentPlay(Workflow):
    """The model plays an episode: each observation is a message to it, each completion an action.

    Args:
        make: ``package.module:name`` of what makes a `TextEnvironment`.
        arguments: of `make`; those of the task's row go over them.
        instructions: a system message in front of the observations; empty for none.
        turns: actions at most.
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
        """See `Workflow`."""
        return [self._instructions] if self._instructions else []

    async def run(self, task: WorkflowTask, chat: Conversation) -> Reward:
        """The sum of the rewards of an episode; each action's by turn."""
        own = {name: value for name, value in task.fields.items() if name in self._arguments}
        environment = self._make(**{**self._arguments, **own})
        rewards: dict[int, float] = {}
        try:
            system = [{"role": "system", "content": self._instructions}] if self._instructions else []
            episode = chat.new(system, cause="environment")
            episode.say(environment.reset(task.seed))
            for _ in range(self._turns):
                reply = await episode.generate()
                observation, rewards[reply.node], done = environment.step(reply.text)
                if done:
                    break
                episode.say(observation)
        finally:
            environment.close()
        return Reward(sum(rewards.values()), by_turn=rewards, named={"actions": float(len(rewards))})
