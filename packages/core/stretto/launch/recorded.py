"""Records of a run's recipe, of its questions, of the tokens that end its completions, and of the source files of
user-defined parts; a resumed run is compared with them."""

from __future__ import annotations

import hashlib
import os
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.machinery import PathFinder
from pathlib import Path

import msgspec

from stretto.core.errors import Problem, RunFolderError
from stretto.core.records import Record
from stretto.doors.loading import is_own
from stretto.launch.preflight.base import digest
from stretto.launch.preflight.plan import Plan
from stretto.launch.recipe.recipe import Recipe, load_recipe, named_in_doors, named_in_section, to_toml, validate
from stretto.model.hf.inspection import read_weights
from stretto.rollout.prompts import PromptSource
from stretto.rollout.tasks import DatasetTask
from stretto.store.inspection import CHANGED
from stretto.store.ledger.ledger import Ledger
from stretto.store.run_folder import ExportedQuestion, RunFolder

RECIPE = "recipe"  #: name of the ledger's fact with the recipe as TOML


def record_recipe(ledger: Ledger, recipe: Recipe) -> None:
    """Store the recipe, with the values of all keys, in the ledger."""
    ledger.put(RECIPE, to_toml(recipe))


def recorded_recipe(folder: RunFolder, text: str | None) -> Recipe:
    """Parse the recorded `text` of a run's recipe. None (an older format): read ``recipe.toml`` of the run folder.
    Raises RecipeError if this version of stretto does not accept the recipe."""
    return load_recipe(folder.recipe) if text is None else validate(tomllib.loads(text), f"{folder.ledger}: {RECIPE}")


def model_fingerprint(plan: Plan) -> str:
    """Compute a digest of the model's config, its tokenizer, and the names, dtypes and shapes of its weights. The
    values are not read: the run has its own copy."""
    tensors = sorted((name, tensor.dtype, tensor.shape) for name, tensor in read_weights(plan.base.path).items())
    texts = [(plan.base.path / name).read_text(encoding="utf-8") for name in ("config.json", "tokenizer.json")]
    return digest(*texts, tensors)


STOPS = "stop tokens"  #: name of the ledger's fact with the ids of the tokens that end a completion


def with_stops_on_record(plan: Plan, ledger: Ledger, *, write: bool = True) -> Plan:
    """Return the plan of a resumed run, in which the tokens that end completions are those on record: with others,
    completions in flight and the canary would no longer be those of the run. If the model names others, a note of the
    plan says so. A run without a record takes those of the model, which are recorded if `write`."""
    found = plan.sampling.stop_token_ids
    if (known := ledger.get(STOPS, tuple[int, ...])) is None:
        if write:
            ledger.put(STOPS, found)
        return plan
    if known == found:
        return plan
    told = (
        f"the model names the tokens {', '.join(map(str, found))} as ends of sequence, and the run began with "
        f"{', '.join(map(str, known))}: its completions end there"
    )
    sampling = msgspec.structs.replace(plan.sampling, stop_token_ids=known)
    return replace(plan, sampling=sampling, notes=(*plan.notes, told))


SOURCES = "sources"  #: name of the ledger's fact with the digests, by name of the part


def digests_of(recipe: Recipe) -> dict[str, str]:
    """Compute a digest of the source file of each user-defined part of a recipe, by its name ``package.module:name``.

    If sections with different folders use the same name, the digest covers all their files. Parts whose file is not
    found are left out; files that they import are not covered.
    """
    files = dict[str, dict[Path, None]]()
    for name, folder in _own_parts(recipe):
        file = _file_of(name.partition(":")[0], folder)
        if file is not None and file.is_file():
            files.setdefault(name, {})[file] = None
    return {name: _digest(*found) for name, found in files.items()}


def changed_sources(ledger: Ledger, recipe: Recipe) -> tuple[str, ...]:
    """Return a tuple with one sentence, which names the user-defined parts whose file has changed since the run was
    started the last time. Empty if there are none, or no digests are on record; parts that are new do not count."""
    known, found = ledger.get(SOURCES, dict[str, str]) or {}, digests_of(recipe)
    changed = [name for name, digest in found.items() if known.get(name, digest) != digest]
    if not changed:
        return ()
    told = ", ".join(f"{name} ({known[name][:8]} to {found[name][:8]})" for name in changed)
    return (f"the source has changed since the run was started the last time: {told}; the run uses the new one",)


def record_sources(ledger: Ledger, recipe: Recipe, changed: Sequence[str] = ()) -> None:
    """Store the digests of the recipe's parts (`digests_of`) in the ledger, and each sentence of `changed` (from
    `changed_sources`) as an event."""
    for sentence in changed:
        ledger.event(CHANGED, sentence)
    ledger.put(SOURCES, digests_of(recipe))


def _own_parts(recipe: Recipe) -> Iterator[tuple[str, str | None]]:
    """Yield (name, folder) of each user-defined part. Its module is looked up in the folder first; None: no such
    folder."""
    tree = recipe.model_dump(mode="python")
    named = [(name, recipe.path) for name in named_in_doors(tree)]
    for section in (tree["rewards"], tree["workflow"] or {}):
        named += [(name, section.get("path")) for name in named_in_section(section)]
    for name, folder in named:
        if isinstance(name, str) and is_own(name):
            yield name, folder


def _file_of(module: str, folder: str | None) -> Path | None:
    """Return the source file of the module with this dotted name, searched as an import would in `folder` (if given),
    the working folder and `sys.path`, but without running any code. None if it is not found or has no file."""
    places: Sequence[str] | None = [*([folder] if folder else []), os.getcwd(), *sys.path]
    file: str | None = None
    for name in module.split("."):  # by its own name alone: a package without __init__.py is looked up in its parent
        spec = PathFinder.find_spec(name, places)
        if spec is None:
            return None
        places, file = spec.submodule_search_locations, spec.origin
    return Path(file) if file is not None else None


def _digest(*files: Path) -> str:
    return hashlib.blake2b(b"".join(file.read_bytes() for file in files), digest_size=16).hexdigest()


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
        """Compute the record of a plan's training questions."""
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


_RECORDED = ("id", "token_ids", "text", "answer")  # fields of a prompt in the digest of the questions


def question_fingerprints(plan: Plan) -> tuple[str, str]:
    """Compute two digests of the training prompts: the one to record, and the one that some versions of stretto
    recorded.

    The first covers the four fields that `Prompt` had at first; later fields follow from the tokens. The second also
    covers `Prompt.opens`.
    """
    recorded = [{name: getattr(prompt, name) for name in _RECORDED} for prompt in plan.training]
    return digest(msgspec.json.encode(recorded)), digest(msgspec.json.encode(plan.training))


FIELDS = "fields by name"  #: name of the ledger's fact with `Plan.fields`


def check_fields(folder: RunFolder, plan: Plan, ledger: Ledger) -> dict[str, object]:
    """Raise RunFolderError if further fields of a resumed run's questions have changed that a reward or a workflow
    reads. Returns the fact if it is not on record, by its name."""
    known = ledger.get(FIELDS, dict[str, str])
    if known is None:
        return {FIELDS: plan.fields}
    for name in {**plan.fields, **known} if plan.reads is None else plan.reads:
        if known.get(name) != plan.fields.get(name):
            found = f"the questions' field {name!r}, which is read, is not that of the run"
            raise RunFolderError([Problem(str(folder.path), found, "restore it, or start a new run")])
    return {}


def write_questions(folder: RunFolder, plan: Plan) -> None:
    """Write ``questions.jsonl``: the training prompts, each with its gold answer and source."""
    asked = [
        ExportedQuestion(prompt.id, prompt.text, prompt.answer, place or None, source)
        for prompt, (place, source) in zip(plan.training, plan.origins, strict=True)
    ]
    folder.write("questions.jsonl", "".join(f"{msgspec.json.encode(question).decode()}\n" for question in asked))
