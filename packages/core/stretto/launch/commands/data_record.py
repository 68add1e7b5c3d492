"""Recording a run's data: the questions with their origins, their digest, and what determines their order."""

from __future__ import annotations

import hashlib

import msgspec

from stretto.core.records import Record
from stretto.launch.preflight.plan import Plan
from stretto.rollout.prompts import PromptSource
from stretto.rollout.tasks import DatasetTask
from stretto.store.export import ExportedQuestion
from stretto.store.run_folder import RunFolder

DATA = "data"  #: name of the ledger's fact with the `DataRecord`


class DataRecord(Record, frozen=True):
    """Digest of a run's questions, and the settings that determine their order.

    `digest`: over id, prompt and gold answer of each line of ``questions.jsonl``. `seed` and `sources` determine the
    order of each epoch, together with `easy` and `hard`, the success rates of prompts that the curriculum skips (None:
    no curriculum).
    """

    digest: str
    seed: int
    sources: tuple[PromptSource, ...]
    easy: float | None = None
    hard: float | None = None

    @classmethod
    def of(cls, plan: Plan) -> DataRecord:
        whole = hashlib.blake2b(digest_size=16)
        for prompt in plan.training:
            for text in (prompt.id, prompt.text, prompt.answer):
                whole.update(f"{len(text)}:{text}".encode())
        task = plan.recipe.task
        rests = task.curriculum if isinstance(task, DatasetTask) else None
        return cls(
            digest=whole.hexdigest(),
            seed=plan.recipe.seed,
            sources=plan.sources,
            easy=rests.easy if rests is not None else None,
            hard=rests.hard if rests is not None else None,
        )


def write_questions(folder: RunFolder, plan: Plan) -> None:
    """Write ``questions.jsonl``: the training prompts, each with its gold answer and source."""
    asked = [
        ExportedQuestion(prompt.id, prompt.text, prompt.answer, place or None, source)
        for prompt, (place, source) in zip(plan.training, plan.origins, strict=True)
    ]
    folder.write("questions.jsonl", "".join(f"{msgspec.json.encode(question).decode()}\n" for question in asked))
