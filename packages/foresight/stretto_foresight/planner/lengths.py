"""Lengths of completions: measured (a file, a run folder, demonstrations), or a named distribution."""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, count, islice
from pathlib import Path
from statistics import fmean

from stretto.core.errors import DataError, Problem
from stretto.doors.loading import from_package

_FORM = "a FILE of lengths (one a line, or a JSON list), a RUN_DIR, lognormal:mean=M,sigma=S or constant:tokens=N"
_MOST_SIGMA = 5.0
_DISTRIBUTIONS: Mapping[str, frozenset[str]] = {
    "lognormal": frozenset({"mean", "sigma"}),
    "constant": frozenset({"tokens"}),
}


@dataclass(frozen=True)
class LogNormalLengths:
    """Log-normal lengths, truncated at `max_tokens`. `untruncated`: mean before truncation. `sigma`: standard deviation
    of the logarithm; 0: all lengths are equal. `prompt_tokens`: mean length of a prompt."""

    untruncated: float
    sigma: float
    max_tokens: int
    prompt_tokens: int = 0

    @property
    def mean(self) -> float:
        """Mean of the lengths that `groups` draws, in tokens: of the log-normal, with values below 1.5 counted as 1
        (lengths are rounded) and values above `max_tokens` as `max_tokens`."""
        if not self.sigma or self.max_tokens == 1:
            return max(1, min(self.max_tokens, round(self.untruncated)))
        middle = math.log(self.untruncated) - self.sigma**2 / 2
        least, most = ((math.log(end) - middle) / self.sigma for end in (1.5, self.max_tokens))
        between = self.untruncated * (_normal(most - self.sigma) - _normal(least - self.sigma))
        return _normal(least) + between + self.max_tokens * (1 - _normal(most))

    def groups(self, chance: random.Random, members: int) -> Iterator[tuple[int, ...]]:
        """Draw groups of `members` lengths in tokens without end, from `chance`. Each length is at least 1 and at most
        `max_tokens`."""
        middle = math.log(self.untruncated) - self.sigma**2 / 2
        while True:
            drawn = (chance.lognormvariate(middle, self.sigma) for _ in range(members))
            yield tuple([max(1, min(self.max_tokens, round(length))) for length in drawn])


def _normal(at: float) -> float:
    return (1 + math.erf(at / math.sqrt(2))) / 2


@dataclass(frozen=True)
class MeasuredLengths:
    """Observed lengths: each tuple of `seen` is a group, or one completion if its group is not known. `prompt_tokens`:
    mean length of a prompt.

    `groups` yields without end. It uses all of `seen`, in random order, before it uses one again, because the mean of a
    few hundred independent draws would be off by several percent. From a known group of another size than wanted,
    lengths are drawn with replacement."""

    seen: tuple[tuple[int, ...], ...]
    prompt_tokens: int = 0

    @property
    def mean(self) -> float:
        return fmean(length for group in self.seen for length in group)

    def groups(self, chance: random.Random, members: int) -> Iterator[tuple[int, ...]]:
        shuffled = chain.from_iterable(chance.sample(self.seen, len(self.seen)) for _ in count())
        if all(len(group) == 1 for group in self.seen):
            lengths = (group[0] for group in shuffled)
            return (tuple(islice(lengths, members)) for _ in count())
        return (group if len(group) == members else tuple(chance.choices(group, k=members)) for group in shuffled)


#: Lengths of prompts and completions in tokens.
Lengths = LogNormalLengths | MeasuredLengths


def alone(lengths: Iterable[int], prompt_tokens: int, max_tokens: int) -> MeasuredLengths:
    """Make the lengths of completions whose groups are not known, clipped to 1 … `max_tokens`. `prompt_tokens`: mean
    length of a prompt."""
    return MeasuredLengths(tuple((max(1, min(length, max_tokens)),) for length in lengths), prompt_tokens)


def check_lengths(words: str) -> None:
    """Check the user's choice of lengths (`words`, as for `lengths_of`) without reading a file or a run. Raises
    DataError if a distribution has wrong parameters, or `words` is no distribution and no file or folder either."""
    kind, _, rest = words.partition(":")
    if kind in _DISTRIBUTIONS:
        _named(words, kind, rest, 1, 1)
    elif not os.path.exists(words):  # false also for a name that no file can have
        raise _refused(words, "no such file or folder")


def lengths_of(words: str, prompt_tokens: int, max_tokens: int) -> Lengths:
    """Parse the user's choice of lengths: a distribution (``lognormal:mean=M,sigma=S``, ``constant:tokens=N``), a file
    of lengths, or a run folder, whose trained completions are read. `prompt_tokens`: mean prompt length, except for a
    run folder, which has its own. `max_tokens`: longer lengths are cut to it. Raises DataError if it is none of them,
    cannot be read, or has no lengths or wrong ones."""
    kind, _, rest = words.partition(":")
    if kind in _DISTRIBUTIONS:
        return _named(words, kind, rest, prompt_tokens, max_tokens)
    if os.path.isdir(words):
        return _of_run(Path(words), max_tokens)
    try:
        text = Path(words).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # or it is no UTF-8, or its name has a NUL
        raise _refused(words, f"cannot be read: {getattr(error, 'strerror', error)}") from None
    try:
        numbers = json.loads(text) if text.lstrip().startswith("[") else [int(word) for word in text.split()]
        lengths = [_whole(number) for number in numbers]
    except (TypeError, ValueError, RecursionError) as error:  # the last one for lists in lists
        raise _refused(words, f"holds something else than lengths: {error}") from None
    if not lengths or min(lengths) < 1:
        raise _refused(words, "holds no lengths" if not lengths else f"holds the length {min(lengths)}")
    return alone(lengths, prompt_tokens, max_tokens)


def _whole(number: object) -> int:
    """Return a number of a JSON list as an int. Raises ValueError for a fraction, a text, true or false."""
    if isinstance(number, bool) or not (isinstance(number, int) or (isinstance(number, float) and number.is_integer())):
        raise ValueError(f"{json.dumps(number):.40} is no whole number")
    return int(number)


def _named(words: str, kind: str, rest: str, prompt_tokens: int, max_tokens: int) -> Lengths:
    given: dict[str, float] = {}
    for pair in rest.split(","):
        key, _, value = pair.partition("=")
        try:
            given[key.strip()] = float(value)
        except ValueError:
            raise _refused(words, f"{pair!r} is no number") from None
    if given.keys() != _DISTRIBUTIONS[kind]:
        raise _refused(words, f"{kind} has {' and '.join(sorted(_DISTRIBUTIONS[kind]))}")
    if not all(math.isfinite(value) and value >= 0 for value in given.values()):
        raise _refused(words, "a number is negative or not finite")
    mean = given.get("mean", given.get("tokens", 0.0))
    if mean < 1:
        raise _refused(words, "completions have at least one token")
    if given.get("sigma", 0.0) > _MOST_SIGMA:
        raise _refused(words, f"sigma is the deviation of the logarithm, {_MOST_SIGMA:g} at most")
    return LogNormalLengths(mean, given.get("sigma", 0.0), max_tokens, prompt_tokens)


def _of_run(path: Path, max_tokens: int) -> Lengths:
    groups: dict[str, list[int]] = {}
    prompts: list[int] = []
    trained = 0
    for trajectory in from_package("stretto_report.reading.export:read_trajectories", "--lengths")(path):
        trained += trajectory.trained_step is not None
        if trajectory.trained_step is not None and trajectory.token_ids:  # they may not have been kept
            groups.setdefault(trajectory.group, []).append(min(max_tokens, len(trajectory.token_ids)))
            prompts.append(len(trajectory.prompt_token_ids))
    if not groups:
        raise _refused(str(path), "the run has kept no tokens" if trained else "the run has trained on nothing")
    return MeasuredLengths(tuple(map(tuple, groups.values())), round(fmean(prompts)))


def _refused(words: str, found: str) -> DataError:
    return DataError([Problem(f"--lengths {words}", found, f"it is {_FORM}")])
