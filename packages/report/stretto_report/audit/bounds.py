"""Bounds that a run promises to keep: those of its recipe, and their recorded changes."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stretto.core.errors import StoreError

#: Bounds that may be "auto", each with the recipe keys of its least and its greatest value.
_ADAPTIVE = {
    "max_staleness": ("staleness_min", "staleness_max"),
    "max_in_flight": ("max_in_flight_min", "max_in_flight_max"),
}


@dataclass(frozen=True)
class RecordedChange:
    """Change of the bound `name` from `before` to `after`, made after training step `step`. `key`: ledger key of the
    first group admitted under the new value."""

    step: int
    name: str
    before: int
    after: int
    reason: str
    key: int


@dataclass(frozen=True)
class Bounds:
    """Keys of the recipe's section `rollout` that the laws compare a run with, under their own names. `max_staleness`
    and `max_in_flight`: at the start of the run; infinite: no bound. `adaptive`: for each bound that is "auto", its
    least value, with which the run begins, and its greatest."""

    batch_size: int
    group_size: int
    min_group_size: int
    max_staleness: float
    max_in_flight: float
    beyond_bound: str
    max_attempts: int
    adaptive: Mapping[str, tuple[int, int]]


def read_bounds(recipe: Path) -> Bounds:
    """Read the bounds of a run from its recipe, the file `recipe.toml`; "auto" is read as its lowest value. Raises
    StoreError if the recipe is missing, damaged or incomplete."""
    try:
        rollout = tomllib.loads(recipe.read_text(encoding="utf-8"))["rollout"]
        number = {name: float(value) for name, value in rollout.items() if isinstance(value, (int, float))}
        adaptive = {
            key: (int(number[lowest]), int(number[highest]))
            for key, (lowest, highest) in _ADAPTIVE.items()
            if rollout.get(key) == "auto"
        }
        start = number | {key: float(lowest) for key, (lowest, _) in adaptive.items()}
        return Bounds(
            batch_size=int(number["batch_size"]),
            group_size=int(number["group_size"]),
            min_group_size=int(number["min_group_size"]),
            max_staleness=start.get("max_staleness", math.inf),
            max_in_flight=start.get("max_in_flight", math.inf),
            beyond_bound=str(rollout["beyond_bound"]),
            max_attempts=int(number["max_attempts"]),
            adaptive=adaptive,
        )
    except OSError as error:
        raise StoreError(f"{recipe}: cannot be read: {error.strerror or error}") from error
    except KeyError as error:
        raise StoreError(f"{recipe}: has no {error.args[0]}; restore the run's own recipe") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise StoreError(f"{recipe}: cannot be read: {error}; restore the run's own recipe") from error
