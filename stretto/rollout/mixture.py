"""The order of an epoch's prompts: a function of the seed, the epoch, and the sources with their weights.

Without weights an epoch is every prompt of every source once. With weights a source has its share of the epoch, and an
epoch is as long as it can be without a prompt that comes twice: the source that is scarcest for its weight is used up.
The others take turns: a source of 10 prompts of which an epoch takes 4 is shuffled every 2 epochs, and 2 prompts, not
always the same, wait for the next shuffle.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from stretto.core.records import Record, derive_seed


class PromptSource(Record, frozen=True):
    """Consecutive prompts of one origin; `weight` is its share of an epoch, None where all have all of theirs."""

    name: str
    prompts: int
    weight: float | None = None


def shares(sources: Sequence[PromptSource]) -> list[int]:
    """How many prompts of each source an epoch takes.

    >>> shares([PromptSource("a", 4, 1.0), PromptSource("b", 10, 1.0)])
    [4, 4]
    >>> shares([PromptSource("a", 4), PromptSource("b", 10)])
    [4, 10]
    """
    if any(source.weight is None for source in sources):
        return [source.prompts for source in sources]
    weights = [source.weight or 0.0 for source in sources]
    unit = min(source.prompts / weight for source, weight in zip(sources, weights, strict=True))
    pairs = zip(sources, weights, strict=True)
    return [min(source.prompts, max(1, round(unit * weight))) for source, weight in pairs]


def epoch_order(sources: Sequence[PromptSource], seed: int, epoch: int) -> list[int]:
    """The places of the epoch's prompts among all prompts, in the order in which they are asked."""
    order: list[int] = []
    start = 0
    for source, taken in zip(sources, shares(sources), strict=True):
        order += [start + place for place in _turn(source, taken, seed, epoch)]
        start += source.prompts
    random.Random(derive_seed(seed, "prompts", epoch)).shuffle(order)
    return order


def _turn(source: PromptSource, taken: int, seed: int, epoch: int) -> list[int]:
    places = list(range(source.prompts))
    turns = source.prompts // taken
    if taken < source.prompts:
        random.Random(derive_seed(seed, "source", source.name, epoch // turns)).shuffle(places)
    begin = epoch % turns * taken
    return places[begin : begin + taken]
