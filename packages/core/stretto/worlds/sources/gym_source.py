"""Tasks of the package reasoning-gym as a source: questions by name, with parameters or at a level of its curriculum.

The task's own scorer needs the dataset entry of a question, not only a text. So a gold answer holds the task, its
parameters, seed and index, and a digest of the question. From it the reward `reasoning_gym` generates the entry again
in its worker, and calls the scorer.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field

from stretto.core.errors import DataError, Problem, nearest
from stretto.core.records import derive_seed
from stretto.worlds.data.task import Question
from stretto.worlds.sources.readers import package

_SEEDS = 2**31  # number of seeds that the package's generators accept
_HELD_OUT_SEED = 1_000_003
_INSTRUCTION = "Write the final answer between <answer> and </answer>."

Parameter = bool | int | float | str | list[bool | int | float | str]


class GymSource(BaseModel, extra="forbid", frozen=True):
    """Questions of one task of reasoning-gym."""

    kind: Literal["reasoning_gym"]
    name: str = Field("", description="name of the source; left out: the task's")
    task: str = Field(description="name of the task, such as chain_sum")
    size: int = Field(1000, ge=1, description="questions to train on")
    held_out: int = Field(64, ge=0, description="questions for evaluation, the same for all seeds of a run")
    parameters: dict[str, Parameter] = Field({}, description="parameters of the task, as reasoning-gym names them")
    level: int | None = Field(None, ge=0, description="level of the task's curriculum, for all of its attributes")
    system_prompt: str | None = Field(_INSTRUCTION, description="first message of every chat")
    chat_template: Literal["none", "auto"] = Field(
        "auto", description="auto: use the tokenizer's chat template, if it has one"
    )
    weight: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="share of an epoch's prompts that come from this source, relative to the other weights",
    )

    @property
    def title(self) -> str:
        """Name of the source: the one given in the recipe, else that of the task."""
        return self.name or self.task

    def questions(self, seed: int) -> tuple[list[Question], list[Question], list[str]]:
        """Generate questions; returns those for training, the held-out ones, and notes for the user. The two lists are
        disjoint: a drawn training question that is also held out is left out, and counted in a note.

        Raises:
            DataError: the package is missing, or has no such task, parameter or level.
        """
        settings = self._settings()
        held_out = list(self._made("h", self.held_out, _HELD_OUT_SEED, settings))
        drawn = self._made("", self.size, derive_seed(seed, "reasoning_gym", self.task) % _SEEDS, settings)
        asked = {question.text for question in held_out}
        training = [question for question in drawn if question.text not in asked]
        if not training:
            found = f"each of the {self.size} questions of {self.task} is also held out"
            raise DataError([Problem(self._place, found, "use parameters with more questions, or a smaller held_out")])
        left_out = self.size - len(training)
        notes = [
            f"{self.title}: {left_out:,} of {self.size:,} questions are also held out, and left out of the training"
        ]
        return training, held_out, notes if left_out else []

    @property
    def _place(self) -> str:
        return f"reasoning-gym: {self.task}"

    def _settings(self) -> dict[str, Any]:
        """Parameters of the task at the curriculum's level, if one is given, overridden by those of the recipe. Raises
        DataError for an unknown task, level or parameter."""
        factory = package("reasoning_gym.factory", "reasoning", self._place)
        if self.task not in factory.DATASETS:
            raise DataError([Problem(self._place, "there is no such task", nearest(self.task, factory.DATASETS))])
        if self.task == "composite":
            raise DataError([Problem(self._place, "is made of other tasks", "give each of them as a source")])
        found: dict[str, Any] = {}
        if self.level is not None:
            if self.task not in factory.CURRICULA:
                raise DataError([Problem(self._place, "has no curriculum", "give parameters in place of a level")])
            curriculum = factory.create_curriculum(self.task)
            most = max((len(attribute.levels) - 1 for attribute in curriculum.attributes.values()), default=0)
            if self.level > most:
                raise DataError([Problem(f"{self._place}: level", str(self.level), f"levels go from 0 to {most}")])
            for name, attribute in curriculum.attributes.items():
                curriculum.set_attr_level(name, min(self.level, len(attribute.levels) - 1))
            made = dataclasses.asdict(curriculum.generate_configuration())
            found = {name: value for name, value in made.items() if name not in ("seed", "size")}
        known = [field.name for field in dataclasses.fields(factory.DATASETS[self.task][1])]
        problems = [
            Problem(f"{self._place}: parameters.{name}", "unknown parameter", nearest(name, known))
            for name in self.parameters
            if name not in known or name in ("seed", "size")
        ]
        if problems:
            raise DataError(problems)
        return found | self.parameters

    def _made(self, mark: str, count: int, seed: int, settings: Mapping[str, Any]) -> Iterator[Question]:
        if not count:
            return
        gym = package("reasoning_gym", "reasoning", self._place)
        try:
            items = gym.create_dataset(self.task, size=count, seed=seed, **settings)
            entries: Sequence[Mapping[str, Any]] = [items[place] for place in range(count)]
        # The generators are programs of many authors; an exception means that they refuse the parameters.
        except Exception as error:
            found = f"cannot be made with {dict(settings)}: {type(error).__name__}: {error}"
            raise DataError([Problem(self._place, found, "choose other parameters")]) from None
        for place, entry in enumerate(entries):
            again = {"task": self.task, "seed": seed, "size": count, "place": place, "parameters": dict(settings)}
            yield self._question(f"{self.title}:{mark}{place}", entry, again)

    def _question(self, id: str, entry: Mapping[str, Any], again: dict[str, Any]) -> Question:
        text = str(entry["question"])
        instruction = ({"role": "system", "content": self.system_prompt},) if self.system_prompt else ()
        answer = None if entry["answer"] is None else str(entry["answer"])
        gold = again | {"answer": answer, "digest": hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}
        plain = f"{self.system_prompt}\n{text}" if self.system_prompt and self.chat_template == "none" else text
        return Question(
            id=id,
            text=plain,
            answer=json.dumps(gold, default=list),
            as_chat=(*instruction, {"role": "user", "content": text}) if self.chat_template == "auto" else (),
            source=self.title,
        )
