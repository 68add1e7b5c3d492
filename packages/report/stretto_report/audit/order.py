"""Law of the data: the questions and their order are as recorded."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import zip_longest

from stretto.core.records import derive_seed
from stretto_report.audit.history import History, RecordedData, RecordedGroup


def prompts_come_in_their_order(history: History) -> Iterator[str]:
    """Law, yielding a sentence for each breach: The questions have the recorded digest. The prompts of each epoch come
    in the order that follows from seed, epoch and weights. A prompt is skipped only if its share of right completions
    in the previous epoch permits it. Nothing is checked for a run without a record of its questions, and no order if
    the digest differs."""
    if (data := history.data) is None:
        return
    if data.found != data.digest:
        yield f"questions.jsonl has the digest {data.found}, on record is {data.digest}"
        return
    first: dict[int, list[str]] = {}
    for group in history.groups:
        if group.attempt == 0:
            first.setdefault(group.epoch, []).append(group.prompt)
    newest = max(first, default=0)
    for epoch, asked in first.items():
        planned = [data.prompts[at] for at in _order(data, epoch)]
        left_out = set[str]()
        if data.easy is not None:
            left_out = set(planned[: _reach(planned, asked[-1])] if epoch == newest else planned) - set(asked)
            yield from _restless(history, epoch, left_out)
        wanted = [prompt for prompt in planned if prompt not in left_out]
        wanted = wanted[: len(asked)] if epoch == newest else wanted
        parted = next((at for at, pair in enumerate(zip_longest(asked, wanted)) if pair[0] != pair[1]), None)
        if parted is not None:
            found, due = ((row[parted : parted + 1] or ["nothing"])[0] for row in (asked, wanted))
            yield f"epoch {epoch}: prompt {parted + 1} to be asked was {found}, in the order on record it is {due}"


def _reach(planned: list[str], prompt: str) -> int:
    return planned.index(prompt) + 1 if prompt in planned else len(planned)


def _order(data: RecordedData, epoch: int) -> list[int]:
    """Return the indices (in `data.prompts`) of the epoch's prompts in order, from the recorded seed and sources alone:
    all of them, or, if all sources have weights, the epoch's part of each source; shuffled."""
    taken = [prompts for _, prompts, _ in data.sources]
    if data.sources and all(weight is not None for _, _, weight in data.sources):
        pairs = [(prompts, float(weight or 0)) for _, prompts, weight in data.sources]
        length = min(prompts / weight for prompts, weight in pairs)
        taken = [min(prompts, max(1, round(length * weight))) for prompts, weight in pairs]
    order: list[int] = []
    begin = 0
    for (name, prompts, _), count in zip(data.sources, taken, strict=True):
        places = list(range(begin, begin + prompts))
        turn, part = divmod(epoch, prompts // count)
        if count != prompts:
            random.Random(derive_seed(data.seed, "source", name, turn)).shuffle(places)
        order += places[part * count : (part + 1) * count]
        begin += prompts
    random.Random(derive_seed(data.seed, "prompts", epoch)).shuffle(order)
    return order


def _restless(history: History, epoch: int, left_out: set[str]) -> Iterator[str]:
    """Yield a sentence for each prompt of `left_out` (prompts that the epoch skipped) whose share of right completions
    in the previous epoch was neither so high nor so low that it may be skipped. `history.data` must not be None."""
    data = history.data
    assert data is not None, "asked for runs with a record of their data"
    before = [group for group in history.groups if group.epoch == epoch - 1 and group.prompt in left_out]
    resting = {group.prompt for group in before if _rests(group, data)}
    yield from (
        f"epoch {epoch}: prompt {prompt} was left out, and was neither too easy nor too hard in epoch {epoch - 1}"
        for prompt in sorted(left_out - resting)
    )


def _rests(group: RecordedGroup, data: RecordedData) -> bool:
    decided = [one.verdict for one in group.trajectories if one.verdict in ("right", "wrong")]
    if not decided or data.easy is None or data.hard is None:
        return False
    return not data.hard < decided.count("right") / len(decided) < data.easy
