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
from typing import Any

from stretto.core.errors import DataError, Problem, nearest
from stretto.core.records import derive_seed
from stretto.rollout.questions import Question
from stretto.rollout.tasks import GymSource
from stretto_workflows.data.readers import package

_SEEDS = 2**31  # number of seeds that the package's generators accept
_HELD_OUT_SEED = 1_000_003


def questions(source: GymSource, seed: int) -> tuple[list[Question], list[Question], list[str]]:
    """Generate questions; returns those for training, the held-out ones, and notes for the user. A training question
    that is also held out is left out, and counted in a note. `seed`: of the run; the held-out ones do not depend on it.

    Raises:
        DataError: the package is missing, or has no such task, parameter or level; it refuses the parameters; or no
            training question is left.
    """
    settings = _settings(source)
    held_out = list(_made(source, "h", source.held_out, _HELD_OUT_SEED, settings))
    drawn = _made(source, "", source.size, derive_seed(seed, "reasoning_gym", source.task) % _SEEDS, settings)
    asked = {question.text for question in held_out}
    training = [question for question in drawn if question.text not in asked]
    if not training:
        found = f"each of the {source.size} questions of {source.task} is also held out"
        raise DataError([Problem(_place(source), found, "use parameters with more questions, or a smaller held_out")])
    left_out = source.size - len(training)
    notes = [
        f"{source.title}: {left_out:,} of {source.size:,} questions are also held out, and left out of the training"
    ]
    return training, held_out, notes if left_out else []


def _place(source: GymSource) -> str:
    return f"reasoning-gym: {source.task}"


def _settings(source: GymSource) -> dict[str, Any]:
    """Parameters of the task at the curriculum's level, if one is given, overridden by those of the recipe. Raises
    DataError for an unknown task, level or parameter, and for the task "composite"."""
    factory = package("reasoning_gym.factory", "reasoning", _place(source))
    if source.task not in factory.DATASETS:
        raise DataError([Problem(_place(source), "there is no such task", nearest(source.task, factory.DATASETS))])
    if source.task == "composite":
        raise DataError([Problem(_place(source), "is made of other tasks", "give each of them as a source")])
    found: dict[str, Any] = {}
    if source.level is not None:
        if source.task not in factory.CURRICULA:
            raise DataError([Problem(_place(source), "has no curriculum", "give parameters in place of a level")])
        curriculum = factory.create_curriculum(source.task)
        most = max((len(attribute.levels) - 1 for attribute in curriculum.attributes.values()), default=0)
        if source.level > most:
            raise DataError([Problem(f"{_place(source)}: level", str(source.level), f"levels go from 0 to {most}")])
        for name, attribute in curriculum.attributes.items():
            curriculum.set_attr_level(name, min(source.level, len(attribute.levels) - 1))
        made = dataclasses.asdict(curriculum.generate_configuration())
        found = {name: value for name, value in made.items() if name not in ("seed", "size")}
    known = [field.name for field in dataclasses.fields(factory.DATASETS[source.task][1])]
    problems = [
        Problem(f"{_place(source)}: parameters.{name}", "unknown parameter", nearest(name, known))
        for name in source.parameters
        if name not in known or name in ("seed", "size")
    ]
    if problems:
        raise DataError(problems)
    return found | source.parameters


def _made(source: GymSource, mark: str, count: int, seed: int, settings: Mapping[str, Any]) -> Iterator[Question]:
    if not count:
        return
    gym = package("reasoning_gym", "reasoning", _place(source))
    try:
        items = gym.create_dataset(source.task, size=count, seed=seed, **settings)
        entries: Sequence[Mapping[str, Any]] = [items[place] for place in range(count)]
    # The generators are programs of many authors; an exception means that they refuse the parameters.
    except Exception as error:
        found = f"cannot be made with {dict(settings)}: {type(error).__name__}: {error}"
        raise DataError([Problem(_place(source), found, "choose other parameters")]) from None
    for place, entry in enumerate(entries):
        again = {"task": source.task, "seed": seed, "size": count, "place": place, "parameters": dict(settings)}
        yield _question(source, f"{source.title}:{mark}{place}", entry, again)


def _question(source: GymSource, id: str, entry: Mapping[str, Any], again: dict[str, Any]) -> Question:
    """Make a question from a dataset entry. The gold answer is JSON: `again`, settings that generate the entry again,
    its answer, and a digest of its text."""
    text = str(entry["question"])
    instruction = ({"role": "system", "content": source.system_prompt},) if source.system_prompt else ()
    answer = None if entry["answer"] is None else str(entry["answer"])
    gold = again | {"answer": answer, "digest": hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}
    plain = f"{source.system_prompt}\n{text}" if source.system_prompt and source.chat_template == "none" else text
    return Question(
        id=id,
        text=plain,
        answer=json.dumps(gold, default=list),
        as_chat=(*instruction, {"role": "user", "content": text}) if source.chat_template == "auto" else (),
        source=source.title,
    )
