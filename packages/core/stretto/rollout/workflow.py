"""Settings, requirements and questions of workflows, as a run without workflows knows them too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, Field

from stretto.core.records import Prompt, Record

PLACE = "workflow.function"  #: recipe key, for messages


class WorkflowConfig(BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    """Section ``[workflow]`` of a recipe: how a prompt becomes a judged trajectory. Without it: a single turn."""

    kind: Literal["function"] = Field("function", description="a Python class makes the trajectories")
    function: str = Field(
        min_length=1,
        description="a built-in workflow (multi_turn, tools, environment, user_simulator, self_play, best_of_n), "
        "or 'package.module:Class'",
    )
    settings: dict[str, Any] = Field({}, description="arguments of the class, in a table `[workflow.settings]`")
    path: str | None = Field(
        None,
        description="folder in which the module is looked for first; left out: the recipe's folder, if it is there",
    )
    workers: int = Field(1, ge=1, le=256, description="processes that run the workflow")
    concurrency: int = Field(128, ge=1, le=256, description="trajectories that one process runs at a time")
    deadline: float = Field(
        60.0,
        gt=0,
        le=24 * 3600,
        description="seconds for one trajectory, tools included; time spent waiting for completions and "
        "verdicts does not count",
    )
    max_turns: int = Field(64, ge=1, description="completions of one trajectory")
    max_tokens: int = Field(1 << 20, ge=1, description="sampled tokens of one trajectory")
    max_failed: float = Field(
        0.5, gt=0, le=1, description="share of the last 64 trajectories that may fail before the run ends"
    )
    memory_gib: float = Field(16.0, ge=0.25, description="GiB of memory of one process")
    start_timeout: float = Field(60.0, gt=0, description="seconds a process may take to import the workflow")


class WorkflowReady(Record, frozen=True, tag=True):
    """Message of a worker process: the workflow is loaded. `needs_chat_template`: the reason why it does not work with
    plain-text prompts; "" if it does. `words`: fixed texts that the workflow sends to the model. `settings`: whether
    its class takes any."""

    needs_chat_template: str = ""
    words: tuple[str, ...] = ()
    settings: bool = False


@dataclass(frozen=True)
class QuestionDetails:
    """Data of questions for workflows, beside their prompts, by id, prompt text and gold answer (`Question.key`).
    `fields`: further fields of each row, as a JSON object. `chats`: messages of questions that are chats.
    `template_arguments`: arguments of the chat template, for those chats that have any."""

    fields: Mapping[tuple[str, str, str], str] = field(default_factory=dict)
    chats: Mapping[tuple[str, str, str], Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    template_arguments: Mapping[tuple[str, str, str], Mapping[str, Any]] = field(default_factory=dict)

    def is_chat(self, prompt: Prompt) -> bool:
        """Whether the question of this prompt is a chat, which the chat template has rendered."""
        return (prompt.id, prompt.text, prompt.answer) in self.chats

    def arguments(self, prompt: Prompt) -> Mapping[str, Any]:
        """Arguments of the chat template for the question of this prompt; empty if there are none."""
        return self.template_arguments.get((prompt.id, prompt.text, prompt.answer), {})
