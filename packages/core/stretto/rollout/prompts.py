"""The order of prompts: seeded, endless, resumable; prompts given back are drawn again.

Without weights an epoch has every prompt of every source once. With weights each source has its share, and the epoch is
as long as possible without repeating a prompt: it uses all prompts of the source that is scarcest for its weight. Other
sources rotate: a source of 10 prompts that gives 4 to an epoch is shuffled every 2 epochs, and leaves out 2 prompts in
these, different ones after each shuffle.
"""

from __future__ import annotations

import base64
import random
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from stretto.core.records import Prompt, Record, derive_seed


class PromptSource(Record, frozen=True):
    """A dataset: a range of consecutive prompts. `prompts`: their number. `weight`: relative share of an epoch; if any
    source has None, every source gives all its prompts."""

    name: str
    prompts: int
    weight: float | None = None


def shares(sources: Sequence[PromptSource]) -> list[int]:
    """Number of prompts that each source gives to an epoch, in the order of `sources`. If any source has no weight, all
    give all their prompts. Otherwise each gives in proportion to its weight, at least one prompt; the source that is
    scarcest for its weight gives all.

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
    """Indices of an epoch's prompts, in the order in which they are drawn: of each source as many as `shares` says, and
    of a larger source others in the next epoch, while enough are unused. The prompts of all sources are numbered one
    after the other, from 0. The same seed and epoch give the same order."""
    order: list[int] = []
    start = 0
    for source, taken in zip(sources, shares(sources), strict=True):
        order += [start + place for place in _places(source, taken, seed, epoch)]
        start += source.prompts
    random.Random(derive_seed(seed, "prompts", epoch)).shuffle(order)
    return order


def _places(source: PromptSource, taken: int, seed: int, epoch: int) -> list[int]:
    """Indices, within the source, of the `taken` prompts that it gives to this epoch. Successive epochs get different
    prompts until fewer than `taken` are unused; then the source is shuffled."""
    places = list(range(source.prompts))
    portions = source.prompts // taken
    if taken < source.prompts:
        random.Random(derive_seed(seed, "source", source.name, epoch // portions)).shuffle(places)
    begin = epoch % portions * taken
    return places[begin : begin + taken]


class Draw(Record, frozen=True):
    """One attempt at a prompt. Its group is named ``epoch.prompt.attempt``, e.g. ``0.17.0``.

    `failures`: number of earlier attempts that could not be generated or judged. The other earlier attempts were lost
    or expired.
    """

    prompt: Prompt
    epoch: int
    attempt: int = 0
    failures: int = 0

    @property
    def group_id(self) -> str:
        return f"{self.epoch}.{self.prompt.id}.{self.attempt}"


class _Again(Record, frozen=True):
    """A `Draw` that was given back and will be repeated before any new draw. It refers to its prompt by id."""

    epoch: int
    prompt_id: str
    attempt: int
    failures: int


class Position(Record, frozen=True):
    """Saved position of a `PromptStream`; with the dataset and the seed it determines all later draws. `index`: of the
    next prompt in the epoch's order. `left_out`, `left_out_next`: prompts that rest in this epoch, and in the next, as
    bits in base64; `resting`, `rest_next`: the same by name, as an earlier stretto saved them."""

    epoch: int = 0
    index: int = 0
    given_back: tuple[_Again, ...] = ()
    resting: tuple[str, ...] = ()  # as `left_out`, by name, in a state that an earlier stretto has saved
    rest_next: tuple[str, ...] = ()  # as `left_out_next`
    left_out: str = ""  # prompts left out of this epoch: a bit for each prompt, in base64
    left_out_next: str = ""  # prompts to be left out of the next epoch, so far


class PromptStream:
    """Draws every prompt of an epoch once, in the order of `epoch_order`; prompts that were given back come first.

    `position`: where to go on, from an earlier stream; None: at the beginning. `sources`: consecutive parts of
    `prompts`; empty: one source. `rests`: gets a prompt's share of right completions, and returns whether the prompt is
    left out of the next epoch. Raises ValueError if there are no prompts.

    >>> stream = PromptStream([Prompt(id=str(i), token_ids=(i,), text="", answer="") for i in range(3)], seed=1)
    >>> first, second = stream.take(), stream.take()
    >>> stream.give_back(first)
    >>> stream.take().group_id == f"0.{first.prompt.id}.1"
    True
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        seed: int,
        position: Position | None = None,
        sources: Sequence[PromptSource] = (),
        rests: Callable[[float], bool] = lambda rate: False,
    ) -> None:
        if not prompts:
            raise ValueError("a prompt stream needs at least one prompt")
        position = position or Position()
        self._prompts = tuple(prompts)
        self._seed = seed
        self._sources, self._rests = tuple(sources) or (PromptSource("", len(self._prompts)),), rests
        self._epoch, self._index = position.epoch, position.index
        self._places = {prompt.id: place for place, prompt in enumerate(self._prompts)}
        self._resting = self._bits(position.left_out, position.resting)
        self._rest_next = self._bits(position.left_out_next, position.rest_next)
        self._order = self._shuffled(self._epoch)
        self._by_id = {prompt.id: prompt for prompt in self._prompts}
        self._given_back = deque(
            Draw(prompt=self._by_id[again.prompt_id], epoch=again.epoch, attempt=again.attempt, failures=again.failures)
            for again in position.given_back
        )

    def _bits(self, saved: str = "", named: Sequence[str] = ()) -> bytearray:
        """A bit for each prompt, set for the prompts in `saved` (such bits in base64) and the prompts `named` by id."""
        bits = bytearray(base64.b64decode(saved).ljust(len(self._prompts) + 7 >> 3, b"\0"))
        for id in named:
            bits[self._places[id] >> 3] |= 1 << (self._places[id] & 7)
        return bits

    def _shuffled(self, epoch: int) -> list[int]:
        bits = self._resting
        return [at for at in epoch_order(self._sources, self._seed, epoch) if not bits[at >> 3] >> (at & 7) & 1]

    def take(self) -> Draw:
        """Return the next draw and advance the stream: the draw that was given back first, else the next prompt of the
        epoch. After its last prompt the next epoch begins."""
        if self._given_back:
            return self._given_back.popleft()
        if self._index == len(self._order):
            self._begin_next_epoch()
        draw = Draw(prompt=self._prompts[self._order[self._index]], epoch=self._epoch)
        self._index += 1
        return draw

    def _begin_next_epoch(self) -> None:
        """Start the next epoch, without the prompts that rest (see `judged`). If all rest, none is left out."""
        self._epoch, self._index = self._epoch + 1, 0
        self._resting, self._rest_next = self._rest_next, self._bits()
        self._order = self._shuffled(self._epoch)
        if not self._order:
            self._resting = self._bits()
            self._order = self._shuffled(self._epoch)

    def judged(self, draw: Draw, rate: float) -> None:
        """Leave the prompt of a draw out of the next epoch if the function `rests` of this stream returns True for
        `rate`, its share of right completions. Ignored if the epoch of the draw is over."""
        if draw.epoch == self._epoch and self._rests(rate):
            place = self._places[draw.prompt.id]
            self._rest_next[place >> 3] |= 1 << (place & 7)

    def named(self, group_id: str, failures: int = 0) -> Draw:
        """Make the draw of a group id, ``epoch.prompt.attempt``; the stream does not advance. `failures`: number of its
        earlier attempts that failed, which the id does not tell. Raises KeyError if no prompt has the id.

        >>> stream = PromptStream([Prompt(id="a.b", token_ids=(1,), text="", answer="")], seed=1)
        >>> stream.named("3.a.b.2").attempt
        2
        """
        epoch, _, rest = group_id.partition(".")
        prompt, _, attempt = rest.rpartition(".")
        return Draw(prompt=self._by_id[prompt], epoch=int(epoch), attempt=int(attempt), failures=failures)

    def give_back(self, draw: Draw, failures: int = 0) -> None:
        """Queue the next attempt at this prompt; `take` returns it before any new draw. `failures`: number to add to
        its failed attempts."""
        self._given_back.append(
            msgspec.structs.replace(draw, attempt=draw.attempt + 1, failures=draw.failures + failures)
        )

    def position(self) -> Position:
        """Position of the stream, to save. Draws that were taken and not given back are not part of it."""
        again = tuple(_Again(draw.epoch, draw.prompt.id, draw.attempt, draw.failures) for draw in self._given_back)
        return Position(
            epoch=self._epoch,
            index=self._index,
            given_back=again,
            left_out=_text(self._resting),
            left_out_next=_text(self._rest_next),
        )


def _text(bits: bytearray) -> str:
    return base64.b64encode(bits.rstrip(b"\0")).decode()
