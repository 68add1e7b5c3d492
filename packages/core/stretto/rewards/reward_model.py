"""Reward model behind an address: a model that gives a prompt and its completion one number.

A request has one of three forms, in which vLLM serves such models. Of the reply one number is used:

    form       path       the question                    the number
    classify   /classify  a text, or messages             data[0].probs, of one class
    pooling    /pooling   a text, or messages             data[0].data, of one token
    score      /score     prompt and completion, a pair   data[0].score
"""

from __future__ import annotations

import json
import re
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from stretto.core.states import LARGEST_REWARD, why_no_reward
from stretto.rewards.address import AddressConfig, Asker
from stretto.rewards.functions import Undecided

_WHO = "the reward model"
_NUMBERS = {"classify": "probs", "pooling": "data", "score": "score"}  # by form, the key of the number
_DEEPEST = 3  # lists around it: one of tokens, one of classes


class RewardModelConfig(AddressConfig, extra="forbid", frozen=True):
    """Section ``[rewards.reward_model]`` of a recipe: which model, and the form of its requests."""

    form: Literal["classify", "pooling", "score"] = Field("classify", description="which of vLLM's endpoints is used")
    chat: bool = Field(False, description="send messages; the server applies its chat template")
    text: str = Field(
        "{prompt}{completion}",
        description="text that is scored when chat is false; {prompt} and {completion} are replaced",
    )
    scale: float = Field(1.0, gt=0, le=1e6, description="factor from the model's score to the reward")

    @model_validator(mode="after")
    def _asks_about_the_completion(self) -> Self:
        if "{completion}" not in self.text:
            raise ValueError("text does not contain {completion}, so every completion would get the same reward")
        if self.chat and self.form == "score":
            raise ValueError('form = "score" asks with a pair of texts, and chat = true with messages; choose one')
        return self


def reward_model(settings: str) -> RewardModel:
    """Make the built-in reward ``reward_model``; `settings` is a `RewardModelConfig` as JSON."""
    return RewardModel(RewardModelConfig.model_validate_json(settings))


class RewardModel:
    """Reward function: asks the server for the score of one completion at a time. The server batches the requests of
    several workers."""

    def __init__(self, config: RewardModelConfig) -> None:
        self._config = config
        server = config.model_copy(update={"address": config.address.rstrip("/").removesuffix("/v1")})
        self._asker = Asker(server, f"/{config.form}", _WHO)

    def __call__(self, prompt: str, completion: str, answer: str) -> float:
        """Score of the completion times `scale`; the gold `answer` is not used. Asks the server, with retries.

        Raises:
            Undecided: the server gave no valid score in time.
        """
        question = json.dumps({"model": self._config.model, **self._asked(prompt, completion)}).encode()
        return self._asker.ask(question, self._number) * self._config.scale

    def _asked(self, prompt: str, completion: str) -> dict[str, Any]:
        if self._config.form == "score":
            return {"text_1": prompt, "text_2": completion}
        if self._config.chat:
            roles = {"user": prompt, "assistant": completion}
            messages = [{"role": role, "content": content} for role, content in roles.items()]
            return {"messages": messages, "add_generation_prompt": False}
        given = {"prompt": prompt, "completion": completion}
        return {"input": re.sub(r"\{(prompt|completion)\}", lambda name: given[name[1]], self._config.text)}

    def _number(self, reply: bytes) -> float:
        """Read the score from a reply.

        Raises:
            Undecided: the reply lacks the configured form, or its number is not finite or beyond ±1e6.
        """
        key = _NUMBERS[self._config.form]
        try:
            rows = json.loads(reply)["data"]
            [value] = [row[key] for row in rows]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            found = f"{type(error).__name__}: {error}"
            raise Undecided(f"{_WHO}'s reply has no data[0].{key} of one completion ({found})") from None
        for _ in range(_DEEPEST):
            if isinstance(value, list) and len(value) == 1:
                [value] = value
        if isinstance(value, list):
            raise Undecided(f"{_WHO}'s reply has {len(value)} values in data[0].{key}, and one number is needed")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise Undecided(f"{_WHO}'s data[0].{key} is {str(value)[:80]!r}, and one number is needed")
        if why_no_reward(value):
            raise Undecided(f"{_WHO}'s data[0].{key} is {value}, and a number between ±{LARGEST_REWARD:g} is needed")
        return float(value)
