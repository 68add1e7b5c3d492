"""What the server asks of those that compute."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from stretto.core.errors import StrettoError
from stretto_tinker.wire.bodies import Adam, Lora, SamplingParams
from stretto_tinker.wire.datums import Datum
from stretto_tinker.wire.outputs import Computed, Floats, Likeliest, SampledTokens

Found = TypeVar("Found")
#: Work in pieces: between two of them it yields the tokens of the first, and others may have their turn.
Pieces = Generator[int, None, Found]


class Shape(msgspec.Struct, frozen=True):
    """What of a model is trained: adapters, or all of it (`lora` None)."""

    lora: Lora | None
    seed: int = 0


class TrainedModel(Protocol):
    """A model of a client. Its gradient grows from call to call, until a step."""

    def forward_backward(
        self, data: Sequence[Datum], loss: str, config: Mapping[str, float], *, backward: bool
    ) -> Pieces[Computed]:
        """Log-probabilities and loss; with `backward` the gradient grows by that of the sum of all losses. An error, or
        an end before the last piece, leaves the gradient as it was."""
        ...

    def optim_step(self, adam: Adam) -> Mapping[str, float]:
        """One step of AdamW on the gradient, which is cleared.

        Raises:
            RefusedRequest: the gradient is not finite; nothing has changed but that it is cleared.
        """
        ...

    def clear(self) -> None:
        """Forget the gradient."""
        ...

    def digest(self) -> str:
        """A checksum of what is trained."""
        ...

    def save(self, folder: Path) -> None:
        """Write weights and optimizer into an empty folder: adapters as peft reads them, or a whole model."""
        ...

    def load(self, folder: Path, *, optimizer: bool) -> None:
        """Take over weights that `save` wrote; and the optimizer, which otherwise begins anew.

        Raises:
            StoreError: the folder is not whole, or is of a model of another shape.
        """
        ...


#: The sequences of a request, or why there are none.
Ended = list[SampledTokens] | StrettoError


class Wish(msgspec.Struct, frozen=True):
    """What is wanted of one prompt."""

    prompt: tuple[int, ...]
    seeds: tuple[int, ...]
    settings: SamplingParams
    likeliest: int = 0  # tokens to tell at each sampled position


class SampledModel(Protocol):
    """A model that is sampled from."""

    def take(self, folder: Path) -> bool:
        """While nothing is open: take over other weights; False where they are of another shape.

        Raises:
            StoreError: they are not whole; these are unusable from then on.
        """
        ...

    def add(self, id: str, wish: Wish) -> None:
        """Begin to sample.

        Raises:
            RefusedRequest: with the field that is wrong.
        """
        ...

    def abort(self, id: str) -> None:
        """Forget a request."""
        ...

    def step(self) -> dict[str, Ended]:
        """Sample a token of every sequence that is open; the requests that this ended."""
        ...

    @property
    def idle(self) -> bool:
        """Whether no sequence is open."""
        ...

    @property
    def free(self) -> int:
        """Sequences that could be sampled at once beside the open ones; negative where more are open."""
        ...

    @property
    def computed(self) -> int:
        """Tokens computed so far: of prompts, scored or sampled from, and of samples."""
        ...

    @property
    def backlog(self) -> int:
        """Tokens that are computed before a sequence that is added now."""
        ...

    def fits(self, sequences: int, tokens: int) -> bool:
        """Whether so many sequences of so many tokens, prompts included, have room to their end beside the open ones,
        each of them as long as it may become."""
        ...

    @property
    def cache(self) -> int:
        """Bytes of KV cache now."""
        ...

    @property
    def least_cache(self) -> int:
        """Bytes of KV cache without which the longest open sequence cannot end."""
        ...

    def limit(self, cache: int) -> None:
        """Hold at most so many bytes of KV cache from now on; what is dropped is computed again."""
        ...

    def score(self, prompt: Sequence[int], first: int) -> Floats:
        """Log-probabilities of the tokens of a prompt from position `first` (at least 1) on, NaN before."""
        ...

    def likeliest(self, prompt: Sequence[int], first: int, width: int) -> Likeliest:
        """The likeliest tokens at each position of a prompt from `first` on."""
        ...

    def score_targets(self, prompt: Sequence[int], targets: Sequence[Sequence[int]]) -> Floats:
        """Log-probabilities of any tokens: row i is at position i + 1; 0 where the token is -1.

        Raises:
            RefusedRequest: a token is none of the vocabulary's.
        """
        ...

    def draw(self, prompt: Sequence[int], width: int, settings: SamplingParams, seed: int) -> Likeliest:
        """Tokens drawn at every position after the first, with their log-probabilities."""
        ...


class Backend(Protocol):
    """One base model, in memory once."""

    name: str
    folder: Path
    cache_bytes: int  # of KV cache, for all models that are sampled from
    architecture: str
    vocabulary: int
    context: int

    def check(self, shape: Shape) -> None:
        """
        Raises:
            RefusedRequest: no model can have this shape.
        """
        ...

    def create(self, shape: Shape) -> TrainedModel:
        """A model to train, of a shape that was checked."""
        ...

    def shape_of(self, folder: Path) -> Shape:
        """The shape of what `TrainedModel.save` wrote.

        Raises:
            StoreError: it is of another base model, or not whole.
        """
        ...

    def sampled(self, folder: Path | None) -> SampledModel:
        """A model to sample from: with the weights that `TrainedModel.save` wrote, or the base model.

        Raises:
            StoreError: the weights are not whole.
        """
        ...
