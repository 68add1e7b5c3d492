"""Interface between the server and the code that trains and samples (Protocols)."""

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
#: Work in pieces, as a generator. After each piece but the last it yields the number of tokens computed, so that the
#: caller can serve others before it continues. It returns the result.
Pieces = Generator[int, None, Found]


class Shape(msgspec.Struct, frozen=True):
    """Trained part of a model: LoRA adapters, or all weights (`lora` None). `seed`: of the adapters' initial values."""

    lora: Lora | None
    seed: int = 0


class TrainedModel(Protocol):
    """A client's model in memory, with optimizer (Protocol). Gradients accumulate until a step."""

    def forward_backward(
        self, data: Sequence[Datum], loss: str, config: Mapping[str, float], *, backward: bool
    ) -> Pieces[Computed]:
        """Compute the log-probabilities of all targets and the summed loss. With `backward`, add the gradient of this
        sum to the accumulated gradient. After an error, or if the generator is closed before its end, the gradient is
        as before.

        Args:
            loss: name of a loss of `compute.losses`.
            config: its settings.
        """

    def optim_step(self, adam: Adam) -> Mapping[str, float]:
        """Take one step of AdamW with the accumulated gradient, and clear it; returns metrics by name.

        Raises:
            RefusedRequest: the gradient is not finite. It is cleared; weights and optimizer are unchanged.
        """

    def clear(self) -> None:
        """Set the accumulated gradient to zero."""

    def digest(self) -> str:
        """Checksum of the trained weights, as hexadecimal text."""

    def save(self, folder: Path) -> None:
        """Write weights and optimizer state into an empty folder. Adapters are written in peft's format, a whole model
        in that of transformers."""

    def load(self, folder: Path, *, optimizer: bool) -> None:
        """Load weights that `save` wrote. `optimizer`: load the optimizer state too; otherwise it is reset.

        Raises:
            StoreError: files are missing or damaged, or the tensors have other shapes.
        """


#: Outcome of a request for samples: its sequences, or the error.
Ended = list[SampledTokens] | StrettoError


class Wish(msgspec.Struct, frozen=True):
    """Sequences to sample after one prompt, one for each of `seeds`."""

    prompt: tuple[int, ...]
    seeds: tuple[int, ...]
    settings: SamplingParams
    likeliest: int = 0  # number of likeliest tokens to return at each sampled position


class SampledModel(Protocol):
    """Engine with the weights of one model, which samples and scores (Protocol)."""

    def take(self, folder: Path) -> bool:
        """Replace the weights by those that `TrainedModel.save` wrote. Returns False, with nothing changed, if they
        have another shape. Call it only while no sequence is open.

        Raises:
            StoreError: files are missing or damaged; this model is unusable from then on.
        """

    def add(self, id: str, wish: Wish) -> None:
        """Add a request to sample, with the unique `id`; `step` computes it.

        Raises:
            RefusedRequest: names the wrong field.
        """

    def abort(self, id: str) -> None:
        """Stop sampling a request and drop its sequences; an unknown id is ignored."""

    def step(self) -> dict[str, Ended]:
        """Sample one token of each sequence that has a slot; returns the outcomes of requests that ended, by id."""

    @property
    def idle(self) -> bool:
        """Whether no sequence is open."""

    @property
    def free(self) -> int:
        """Number of free slots: sequences that could be sampled at once in addition to the open ones. Negative if
        open sequences wait for a slot."""

    @property
    def computed(self) -> int:
        """Number of tokens computed so far: scored and prefilled prompt tokens, and sampled tokens."""

    @property
    def backlog(self) -> int:
        """Number of tokens that are computed before a sequence that is added now."""

    def fits(self, sequences: int, tokens: int) -> bool:
        """Whether slots and KV cache have room for further sequences of `tokens` tokens each, prompt included. Each
        open sequence counts with its largest possible length."""

    @property
    def cache(self) -> int:
        """Bytes of KV cache allocated now."""

    @property
    def least_cache(self) -> int:
        """Bytes of KV cache that the longest open sequence needs to reach its end."""

    def limit(self, cache: int) -> None:
        """Limit the KV cache to `cache` bytes from now on. Entries that are dropped are recomputed when needed."""

    def score(self, prompt: Sequence[int], first: int) -> Floats:
        """Score a prompt: log-probability of each token [P] from position `first` (at least 1) on, NaN before."""

    def likeliest(self, prompt: Sequence[int], first: int, width: int) -> Likeliest:
        """The `width` likeliest tokens at each position of a prompt from `first` on, [P, width]."""

    def score_targets(self, prompt: Sequence[int], targets: Sequence[Sequence[int]]) -> Floats:
        """Log-probabilities of given tokens in place of the prompt's, [P - 1, K]. Row i of `targets` has the tokens for
        position i + 1; the result for token -1 is 0.

        Raises:
            RefusedRequest: a token is not in the vocabulary.
        """

    def draw(self, prompt: Sequence[int], width: int, settings: SamplingParams, seed: int) -> Likeliest:
        """Draw `width` tokens at each position of a prompt after the first, [P - 1, width], with their
        log-probabilities. Of `settings` only the temperature counts."""


class Backend(Protocol):
    """One base model, loaded once, from which models and engines are made (Protocol).

    Attributes:
        name: name of the base model for clients.
        cache_bytes: bytes of KV cache for all engines together.
        vocabulary: number of tokens.
        context: most tokens of a sequence.
    """

    name: str
    folder: Path
    cache_bytes: int
    architecture: str
    vocabulary: int
    context: int

    def check(self, shape: Shape) -> None:
        """Check that a model of this shape can be made.

        Raises:
            RefusedRequest: names the wrong field.
        """

    def create(self, shape: Shape) -> TrainedModel:
        """Make a model to train, whose shape was checked before."""

    def shape_of(self, folder: Path) -> Shape:
        """Read the shape of a model that `TrainedModel.save` wrote.

        Raises:
            StoreError: it has another base model, or the file is missing or damaged.
        """

    def sampled(self, folder: Path | None) -> SampledModel:
        """Make an engine with the weights that `TrainedModel.save` wrote, or of the base model (`folder` None).

        Raises:
            StoreError: files are missing or damaged.
        """
