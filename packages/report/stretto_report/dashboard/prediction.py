"""Comparison of a `stretto plan` prediction with the measured run, term by term."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from stretto.core.errors import UNREADABLE, Problem, RunFolderError, several
from stretto.core.records import Record
from stretto.store.inspection import Inspection
from stretto.store.ledger.reading import fact
from stretto.store.ledger.schema import once_at_rest, reading
from stretto.store.run_folder import Machine, RunFolder
from stretto.store.totals import TOTALS, Totals, in_proportion
from stretto_report.reading.inspection import inspection_of

RECIPE = "recipe"  #: the name of the resolved recipe in the ledger
#: Sections that do not affect a step, or that describe machines; a resume may change them.
_NO_MATTER = frozenset({"evaluation", "store", "deadlines", "gateway", "logging", "cluster"})
_NO_MATTER_OF_TRAINER = frozenset({"steps", "checkpoint_every", "keep_versions"})
_OUTCOMES = frozenset({"step_seconds", "tokens_per_second"})  # sums of the other terms


class Term(Record, frozen=True):
    """A predicted and measured quantity of a training step. `ratio`: predicted over measured; None if the measured
    value is 0. `off`: predicted minus measured: of seconds as a share of the measured seconds of a whole step, of
    tokens as a share of the measured value (0 where that divisor is 0), of staleness in versions."""

    predicted: float
    measured: float
    ratio: float | None
    off: float


class PredictedRun(Record, frozen=True):
    """A prediction compared with its run. `machine`: the machine that was predicted for. `recipe`: digest of the recipe
    (`settings_digest`). `terms`: by name. `most_off`: name of the term that explains most of the error; "" if no
    predicted term was measured. `other_machine`: the machine of the run; "" if the same as `machine`, or not recorded.

    Example: ``PredictedRun("Xeon, 2 cores", "d0c1...", {"engines.generate": Term(0.061, 0.082, 0.744, -0.18), ...},
    most_off="engines.generate")``
    """

    machine: str
    recipe: str
    terms: Mapping[str, Term]
    most_off: str
    other_machine: str = ""


class _Layout(Record, frozen=True, forbid_unknown_fields=False):
    terms: Mapping[str, float]


class _Saved(Record, frozen=True, forbid_unknown_fields=False):
    """Fields that are read from a saved output of `stretto plan --json`; others are ignored. `recipe`: digest of the
    planned recipe; None: the plan is for a number of GPUs."""

    machine: str
    layouts: tuple[_Layout, ...]
    recipe: str | None = None


def settings_digest(tables: Mapping[str, Any]) -> str:
    """Return the digest of a recipe's resolved tables, without the settings that do not affect the seconds of a step or
    that describe machines. Of paths, only the file name counts."""
    kept: dict[str, Any] = {name: table for name, table in tables.items() if name not in _NO_MATTER}
    kept["trainer"] = {key: value for key, value in tables["trainer"].items() if key not in _NO_MATTER_OF_TRAINER}
    return hashlib.blake2b(json.dumps(_named(kept), sort_keys=True).encode(), digest_size=10).hexdigest()


def _named(value: Any) -> Any:
    """Return the setting or table with each text that begins with "/" cut to its file name: machines have other paths.
    Lists are returned as they are."""
    if isinstance(value, dict):
        return {key: _named(inner) for key, inner in value.items()}
    return Path(value).name if isinstance(value, str) and value.startswith("/") else value


def run_digest(path: str | Path) -> str:
    """Return the `settings_digest` of the run in the folder `path`, of the recipe in its ledger or else in its folder.
    Raises RunFolderError if there is no run, and StoreError if the ledger cannot be read."""
    folder = RunFolder.open(path)

    def read() -> str | None:
        with reading(folder.ledger) as connection:
            return fact(connection, RECIPE, str)

    text = once_at_rest(folder.ledger, read)
    return settings_digest(tomllib.loads(text or folder.recipe.read_text(encoding="utf-8")))


def predicted_beside_measured(path: str | Path, file: Path | None = None) -> PredictedRun | None:
    """Compare the run in the folder `path` with the prediction (its first layout) in `file`; None: with that of the run
    folder. Return None if the folder has no prediction, or before the first timed step.

    Raises:
        RunFolderError: there is no run; or the file is missing, no prediction, or one for another recipe.
        StoreError: the ledger cannot be read.
    """
    folder = RunFolder.open(path)
    place = file or folder.prediction
    if file is None and not place.is_file():
        return None
    saved = _read(place)
    check_digest(place, saved.recipe, run_digest(path))
    if (measured := terms_of_run(folder)) is None:
        return None
    found = compared(saved.machine, saved.recipe or "", saved.layouts[0].terms, measured)
    return msgspec.structs.replace(found, other_machine=_other_machine(folder, saved.machine))


def terms_of_run(folder: RunFolder) -> dict[str, float] | None:
    """Return the measured terms of a run so far (`measured_terms`); None before the first timed step. Raises StoreError
    if the ledger cannot be read."""

    def read() -> tuple[Totals | None, Inspection]:
        with reading(folder.ledger) as connection:
            return fact(connection, TOTALS, Totals), inspection_of(connection)

    totals, inspection = once_at_rest(folder.ledger, read)
    if totals is None or not inspection.steps or inspection.rl_seconds <= 0:  # a resume has recorded its first step
        return None
    return measured_terms(inspection, totals)


def _other_machine(folder: RunFolder, predicted: str) -> str:
    """Return the name of the run's machine if it is not the `predicted` one; "" if it is, or is not recorded. The
    machine is the same if `predicted` is its processor with the cores, or if all words of `predicted` are in the name
    of one of its accelerators."""
    try:
        ran = msgspec.json.decode((folder.path / "machine.json").read_bytes(), type=Machine)
    except (OSError, *UNREADABLE):
        return ""
    processor = f"{ran.processor}, {several(ran.cores, 'core')}"
    words = [re.findall(r"\w+", name.partition(",")[0].lower()) for name in ran.accelerators]
    same = any(set(re.findall(r"\w+", predicted.lower())) <= set(of_one) for of_one in words)
    return "" if same or predicted == processor else ", ".join(ran.accelerators) or processor


def check_digest(place: Path, predicted: str | None, of_run: str) -> None:
    """Raise an error unless a prediction belongs to the run's recipe.

    Args:
        place: file of the prediction, for the message.
        predicted: digest of the recipe that it is for; None: it is for a number of GPUs (``--gpus``), which is refused.
        of_run: digest of the run's recipe.

    Raises:
        RunFolderError: the prediction is for another recipe, or for a number of GPUs.
    """
    if predicted is None:
        found, remedy = "predicts the layouts of a number of GPUs, not a run", "plan the recipe without --gpus"
    elif predicted != of_run:
        found = f"is the prediction of another recipe (digest {predicted}) than the run's (digest {of_run})"
        remedy = "plan the recipe of the run, with its overrides"
    else:
        return
    raise RunFolderError([Problem(str(place), found, remedy)])


def _read(place: Path) -> _Saved:
    try:
        saved = msgspec.json.decode(place.read_bytes(), type=_Saved)
    except (OSError, *UNREADABLE) as error:
        said = f"is no prediction: {getattr(error, 'strerror', None) or error}"
        raise RunFolderError([Problem(str(place), said, "`stretto plan RECIPE --json` prints one")]) from None
    if not saved.layouts:
        raise RunFolderError([Problem(str(place), "is no prediction: it has no layout", "plan the recipe again")])
    return saved


def measured_terms(inspection: Inspection, totals: Totals) -> dict[str, float]:
    """Return the measured terms of a run, named as in a prediction. Seconds are per step, by role and kind of work; for
    engines the mean over the engines. The run must have a step and a training time (`rl_seconds`) above 0."""
    steps, trained = inspection.steps, inspection.tokens.trained + inspection.goodput["masked"].tokens
    step = inspection.rl_seconds / steps
    engines = [name for name in totals.busy if name in totals.generated_by] or [
        name for name in totals.busy if name.startswith("engine")
    ]
    terms = {
        "step_seconds": step,
        "tokens_per_second": trained / inspection.rl_seconds,
        "completion_tokens": trained / max(1, inspection.trajectories.trained),
        "staleness": inspection.staleness.mean,
    }
    for name, roles in {"engines": engines, "trainer": ["trainer"], "rewards": ["rewards"]}.items():
        for role in roles:
            busy = totals.busy.get(role, 0.0)
            work = in_proportion(busy, totals.activities.get(role, {})) | {
                "idle": max(0.0, inspection.rl_seconds - busy)
            }
            for part, seconds in work.items():
                key = f"{name}.{part or 'score'}"
                terms[key] = terms.get(key, 0.0) + seconds / steps / len(roles)
    return terms


def compared(machine: str, recipe: str, predicted: Mapping[str, float], measured: Mapping[str, float]) -> PredictedRun:
    """Compare the terms that are both predicted and measured; others are left out. `machine`, `recipe`: machine and
    recipe digest of the prediction, for the result. `step_seconds` and `tokens_per_second` follow from the others, so
    they are never `most_off`."""
    terms = {name: _term(name, predicted[name], measured) for name in predicted if name in measured}
    causes = {name: abs(term.off) for name, term in terms.items() if name not in _OUTCOMES}
    return PredictedRun(machine, recipe, terms, max(causes, key=lambda name: causes[name], default=""))


def _term(name: str, predicted: float, measured: Mapping[str, float]) -> Term:
    seen = measured[name]
    scale = {"staleness": 1.0, "completion_tokens": seen, "tokens_per_second": seen}.get(name, measured["step_seconds"])
    off = round((predicted - seen) / scale, 4) if scale else 0.0
    return Term(round(predicted, 6), round(seen, 6), round(predicted / seen, 4) if seen else None, off)
