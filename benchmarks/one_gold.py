r"""Whether any completion is judged right for two different gold answers.

    python -m benchmarks.one_gold [--parts wide --seed 1]

Completions are made of parts: candidates (letters, numbers, words, formulas), each in a wrapper of its own
(``\mathbf{A}``, ``$A$``, ``(A)``), joined by a separator (``: ``, ``\\``, " or "), with a tail after them (" 42",
" if $x>0$"), all of it in a frame (``\boxed{}``, "The answer is", ``<answer>``). Each is judged for every gold that it
names, and for all of them as a list. The golds are pairwise different, so a completion that is right for two of them is
right for too much.

One form gives an answer two names: a marked letter followed by its content, ``(A) 42``
(docs/explanation/decisions/0040-one-choice-two-names.md). It may be right for both, and for nothing else; such
completions are counted separately. Whether a completion has this form is decided by its parts (`is_choice`), not by the
verifier.

The parts are in one_gold.toml: "first", with which the rules were written, and "wide", with more of each: letters,
numbers of every kind, wrappers, separators, tails, frames, and golds that a completion does not name.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import re
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.report import Table, save
from stretto_verify.math.reward import math
from stretto_verify.verdicts import Undecided

FAULTS: Final = ("two", "one that it does not name")
_QUESTION: Final = "What is it?"  # fixes no unit, base or magnitude
RUNS: Final = (("first", 0), ("wide", 20_261_124))  # parts and seed


@dataclass(frozen=True)
class Parts:
    """Parts of completions. @ stands for a name, or for the whole text."""

    letters: tuple[str, ...]
    values: tuple[str, ...]
    inner: tuple[str, ...]
    separators: tuple[str, ...]
    tails: tuple[str, ...]
    frames: tuple[str, ...]
    unnamed: tuple[str, ...]
    triples: int  # one in so many triples of names
    quadruples: int

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.letters, *self.values)


def _read() -> tuple[dict[str, Parts], dict[str, list[str]]]:
    """The sets of parts by name, and the parts of a choice with its content."""
    known = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    first, more = known["first"], known["wide"]
    wide: dict[str, Any] = {
        name: [*first[name], *more[name]] if isinstance(more[name], list) else more[name] for name in more
    }
    made: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in first.items()}
    widest: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in wide.items()}
    return {
        "first": Parts(**made),
        "wide": Parts(**widest),
    }, known["choice"]


PARTS, CHOICE = _read()


def is_choice(named: Sequence[str], inner: str, separator: str, tail: str, letters: Sequence[str]) -> bool:
    """Whether the parts form a marked letter followed by one value, and nothing else."""
    if named[0] not in letters:
        return False
    if len(named) == 1:  # the tail is the value
        space, _, value = tail.rpartition(" ")
        return value in CHOICE["contents"] and f"{space} " in _between(inner)
    return len(named) == 2 and named[1] not in letters and tail in CHOICE["tails"] and separator in _between(inner)


def _between(inner: str) -> Sequence[str]:
    """Texts that may stand between a letter marked in this way and its content."""
    if inner in CHOICE["bracketed"]:
        return ("", *CHOICE["signs"], *CHOICE["spaces"])
    if inner in CHOICE["delimited"]:
        return CHOICE["spaces"]
    return CHOICE["signs"] if inner == "@" else (*CHOICE["signs"], *CHOICE["spaces"])


@dataclass(frozen=True)
class Case:
    """A completion, the golds for which it is judged, and those that it names. `choice`: it is a marked letter with its
    content."""

    completion: str
    golds: tuple[str, ...]
    named: frozenset[str]
    choice: bool = False


def cases(wanted: int, seed: int = 0, parts: Parts = PARTS["first"]) -> Iterator[Case]:
    """Yield up to `wanted` different cases, spread over all combinations by a stride that is coprime to their
    number."""
    names = parts.names
    tuples = [
        *itertools.permutations(names, 1),
        *itertools.permutations(names, 2),
        *[found for found in itertools.permutations(names, 3) if _is_kept(found, parts.triples)],
        *[found for found in itertools.permutations(names, 4) if _is_kept(found, parts.quadruples)],
    ]
    axes: Sequence[Sequence[Any]] = (tuples, parts.inner, parts.separators, parts.tails, parts.frames)
    total = 1
    for axis in axes:
        total *= len(axis)
    told: set[str] = set()
    place, stride = seed, 982_451_653  # a prime beyond every axis
    while len(told) < wanted:
        place = (place + stride) % total
        rest, picked = place, list[Any]()
        for axis in axes:
            rest, at = divmod(rest, len(axis))
            picked.append(axis[at])
        named, inner, separator, tail, frame = picked
        case = _case(named, inner, separator, tail, frame, parts)
        if case.completion not in told:
            told.add(case.completion)
            yield case


def _is_kept(found: tuple[str, ...], one_in: int) -> bool:
    digest = hashlib.sha256("|".join(found).encode()).digest()
    return (digest[0] if one_in < 256 else int.from_bytes(digest[:2], "little")) % one_in == 0


def _case(named: tuple[str, ...], inner: str, separator: str, tail: str, frame: str, parts: Parts) -> Case:
    written = [inner.replace("@", name) for name in named]
    completion = frame.replace("@", separator.join(written) + tail)
    behind = [name for name in (*parts.names, *parts.unnamed) if _stands_in(name, tail)]
    names = list(dict.fromkeys([*named, *behind]))
    joined = [", ".join(named)] if len(named) > 1 else []
    others = [
        name for name in _unnamed(completion, parts) if not any(_stands_in(name, one) for one in (*names, *joined))
    ]
    choice = is_choice(named, inner, separator, tail, parts.letters)
    return Case(completion, (*names, *joined, *others), frozenset([*names, *joined]), choice)


def _stands_in(name: str, text: str) -> bool:
    return re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w])", text) is not None


def _unnamed(completion: str, parts: Parts) -> list[str]:
    """Three golds that the completion does not name."""
    at = int.from_bytes(hashlib.sha256(completion.encode()).digest()[:2], "little")
    return [parts.unnamed[(at + 5 * step) % len(parts.unnamed)] for step in range(3)] if parts.unnamed else []


def right_for(case: Case) -> list[str]:
    """Golds for which the completion is judged right."""
    found = []
    for gold in case.golds:
        try:
            if math(_QUESTION, case.completion, gold):
                found.append(gold)
        except Undecided:
            continue
    return found


def kind(case: Case, right: Sequence[str]) -> str:
    """Classify a completion by the golds for which it is right."""
    if not set(right) <= case.named:
        return "one that it does not name"
    if len(right) < 2:
        return ("none", "one")[len(right)]
    return "a choice and its content" if len(right) == 2 and case.choice else "two"


def _chunks(found: Iterator[Case]) -> Iterator[list[Case]]:
    while chunk := list(itertools.islice(found, 100)):
        yield chunk


def judged(chunk: Sequence[Case]) -> list[tuple[str, str, list[str]]]:
    """For each completion: its kind, its text, and the golds for which it is right."""
    found = [(case, right_for(case)) for case in chunk]
    return [(kind(case, right), case.completion, right) for case, right in found]


def measure(parts: str, seed: int, wanted: int, workers: int, minutes: float) -> dict[str, Any]:
    """Judge the cases with `workers` processes, as many as fit into `minutes`."""
    start, counted = time.perf_counter(), Counter[str]()
    faults: list[dict[str, Any]] = []
    with ProcessPoolExecutor(workers) as pool:
        chunks = _chunks(cases(wanted, seed, PARTS[parts]))
        waiting = (chunk for chunk in chunks if time.perf_counter() - start < 60 * minutes)
        for found in itertools.chain.from_iterable(
            pool.map(judged, some) for some in iter(lambda: list(itertools.islice(waiting, 4 * workers)), [])
        ):
            counted.update(name for name, _, _ in found)
            faults += [{"completion": text, "right for": right} for name, text, right in found if name in FAULTS]
    return {
        "parts": parts,
        "seed": seed,
        "completions": sum(counted.values()),
        "right for": {name: counted[name] for name in ("none", "one", "a choice and its content", *FAULTS)},
        "faults": faults,
        "seconds": round(time.perf_counter() - start),
    }


def show(results: dict[str, Any]) -> None:
    """Print a table for each run, and every completion that is right for too much."""
    for row in results["runs"]:
        print(f"parts {row['parts']}, seed {row['seed']}")
        table = Table("right for", "completions")
        for name, number in row["right for"].items():
            table.add(name, f"{number:,}")
        table.show()
        for found in row["faults"]:
            print(found["completion"].replace("\n", "\\n"), found["right for"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", choices=PARTS, help="only these, with --seed; nothing is saved then")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--completions", type=int, default=100_500)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=600.0, help="after which no more are begun")
    words = parser.parse_args()
    runs = RUNS if words.parts is None else ((words.parts, words.seed),)
    results = {"runs": [measure(parts, seed, words.completions, words.workers, words.minutes) for parts, seed in runs]}
    show(results)
    if words.parts is None:
        save("one-gold", results)


if __name__ == "__main__":
    main()
