r"""Whether any completion is right for two golds.

    python -m benchmarks.one_gold

Completions are made of parts: candidates (letters, numbers, words, formulas), each in a wrapper of its own
(``\mathbf{A}``, ``$A$``, ``(A)``), joined by a separator (``: ``, ``\\``, " or "), with a tail behind them (" 42",
" if $x>0$"), all of it in a frame (``\boxed{}``, "The answer is", ``<answer>``). Each is judged for every gold that it
names, and for all of them as a list. The golds are pairwise different answers, so a completion that is right for two of
them is right for more than it says.

One form states an answer by two names: the letter of a choice and what it stands for, ``(A) 42``. It may be right for
both, and for nothing else; such completions are counted apart.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from stretto_verify.math.reward import math
from stretto_verify.verdicts import Undecided

from benchmarks.report import Table, save

LETTERS: Final = ("A", "B", "C", "D", "E")
VALUES: Final = ("42", "7", r"\frac{1}{2}", "(1,2)", "yes", "blue")
INNER: Final = (
    "{}",
    r"\mathbf{{{}}}",
    r"\text{{{}}}",
    r"\textbf{{{}}}",
    r"\mathrm{{{}}}",
    "${}$",
    r"\({}\)",
    "**{}**",
    "({})",
    r"\textbf{{({})}}",
    r"\boxed{{{}}}",
    "{}.",
    r"\underline{{{}}}",
)
SEPARATORS: Final = (
    *(
        "",
        " ",
        ": ",
        ":",
        ", ",
        ",",
        "; ",
        ";",
        " or ",
        " and ",
        r" \\ ",
        "/",
        " / ",
        "\n",
        " - ",
        "-",
        ". ",
        ") ",
        ").",
        "|",
    ),
    *(" = ", r" \quad ", r"\ ", r" \text{ or } ", r" \mid ", " vs ", " \\cup ", "→", " & ", " also ", " is ", " not "),
    *(". (", " => ", " if ", " ~ ", "\n\n", ", i.e. ", r" \qquad ", " then "),
)
TAILS: Final = (
    *("", " 42", ": 42", ", 7", r" \\ 42", " apples", r" \text{ if } x>0", ", where x is any number", " or more", "."),
    *(
        " (or 7)",
        r"\text{ or 42}",
        " = 42",
        r"\ \textbf{(D)}",
        "; D",
        " and nothing else",
        r"\% ",
        " 7 B",
        r"\text{, 7}",
        " A",
    ),
    *(". (D)", " is D: 42", "\nD. 7", r" \text{ (B)}", " (see 7)", " because 7 is too small", ". 42"),
)
FRAMES: Final = (
    "{}",
    r"\boxed{{{}}}",
    r"$\boxed{{{}}}$",
    "The answer is {}",
    "The answer is {}.",
    "**Answer:** {}",
    "<answer>{}</answer>",
    "<answer>The answer is {}</answer>",
    "<answer>It could be {}</answer>",
    r"So \[ {} \]",
    "#### {}",
    r"\boxed{{\text{{{}}}}}",
    r"The final answer is \boxed{{{}}}.",
    "It is {}, I think.",
)


@dataclass(frozen=True)
class Case:
    """A completion with the golds that it is judged for; `choice`: it is the letter of a choice with its content."""

    completion: str
    golds: tuple[str, ...]
    choice: frozenset[str] = frozenset()


def cases(wanted: int, seed: int = 0) -> Iterator[Case]:
    """So many different cases, spread over all combinations by a stride that has no factor in common with them."""
    names = [*LETTERS, *VALUES]
    tuples = [
        *itertools.permutations(names, 1),
        *itertools.permutations(names, 2),
        *[found for found in itertools.permutations(names, 3) if _is_kept(found, 6)],
        *[found for found in itertools.permutations(names, 4) if _is_kept(found, 60)],
    ]
    axes: Sequence[Sequence[Any]] = (tuples, INNER, SEPARATORS, TAILS, FRAMES)
    total = 1
    for axis in axes:
        total *= len(axis)
    told: set[str] = set()
    place, stride = seed, 982_451_653  # a prime beyond every axis
    while len(told) < wanted:
        place = (place + stride) % total
        rest, picked = place, []
        for axis in axes:
            rest, at = divmod(rest, len(axis))
            picked.append(axis[at])
        case = _case(*picked)
        if case.completion not in told:
            told.add(case.completion)
            yield case


def _is_kept(found: tuple[str, ...], one_in: int) -> bool:
    return hashlib.sha256("|".join(found).encode()).digest()[0] % one_in == 0


def _case(named: tuple[str, ...], inner: str, separator: str, tail: str, frame: str) -> Case:
    written = [inner.format(name) for name in named]
    completion = frame.format(separator.join(written) + tail)
    others = [name for name in ("42", "7", "D", "B", "A") if name in tail and name not in named]
    joined = [", ".join(named)] if len(named) > 1 else []
    choice = frozenset(named) if len(named) == 2 and named[0] in LETTERS and named[1] not in LETTERS else frozenset()
    if len(named) == 1 and named[0] in LETTERS:
        choice = frozenset({named[0], "42", "7"})
    return Case(completion, (*named, *others, *joined), choice)


def right_for(case: Case) -> list[str]:
    """The golds for which the completion is right."""
    found = []
    for gold in case.golds:
        try:
            if math("", case.completion, gold):
                found.append(gold)
        except Undecided:
            continue
    return found


def kind(case: Case, right: Sequence[str]) -> str:
    """What the golds of a completion come to."""
    if len(right) < 2:
        return ("none", "one")[len(right)]
    return "a choice and its content" if len(right) == 2 and set(right) <= case.choice else "two"


def _chunks(found: Iterator[Case]) -> Iterator[list[Case]]:
    while chunk := list(itertools.islice(found, 100)):
        yield chunk


def judged(chunk: Sequence[Case]) -> list[tuple[str, str, list[str]]]:
    """The kind of each completion, the completion, and the golds for which it is right."""
    found = [(case, right_for(case)) for case in chunk]
    return [(kind(case, right), case.completion, right) for case, right in found]


def measure(wanted: int, workers: int, minutes: float) -> dict[str, Any]:
    """All cases, judged in so many processes; as many of them as fit into the time."""
    start, counted = time.perf_counter(), Counter[str]()
    two: list[dict[str, Any]] = []
    with ProcessPoolExecutor(workers) as pool:
        chunks = _chunks(cases(wanted))
        waiting = (chunk for chunk in chunks if time.perf_counter() - start < 60 * minutes)
        for found in itertools.chain.from_iterable(
            pool.map(judged, some) for some in iter(lambda: list(itertools.islice(waiting, 4 * workers)), [])
        ):
            counted.update(name for name, _, _ in found)
            two += [{"completion": text, "right for": right} for name, text, right in found if name == "two"]
    return {
        "completions": sum(counted.values()),
        "right for": {name: counted[name] for name in ("none", "one", "a choice and its content", "two")},
        "two": two,
        "seconds": round(time.perf_counter() - start),
    }


def show(results: dict[str, Any]) -> None:
    """Print the table, and every completion that is right for two golds."""
    table = Table("right for", "completions")
    for name, number in results["right for"].items():
        table.add(name, f"{number:,}")
    table.show()
    for found in results["two"]:
        print(found["completion"].replace("\n", "\\n"), found["right for"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--completions", type=int, default=100_500)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=600.0, help="after which no more are begun")
    words = parser.parse_args()
    results = measure(words.completions, words.workers, words.minutes)
    show(results)
    save("one-gold", results)


if __name__ == "__main__":
    main()
