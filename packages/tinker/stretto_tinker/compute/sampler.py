"""Sampling from and scoring with the weights of one model.

Axes: P prompt token, V vocabulary.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from stretto.core.errors import RefusedRequest, StrettoError
from stretto.core.records import Completion, GenerateRequest, Sampling, StopReason
from stretto.engine.native.engine import NativeEngine
from stretto.engine.native.sampling import BrokenLogits
from stretto.model.hf.tokenizer import Tokenizer
from stretto.model.packed.attention import PACKED_ATTENTION
from stretto.model.packed.logprobs import hidden_states, pack_tokens, token_logprobs
from stretto_tinker.wire.bodies import SamplingParams
from stretto_tinker.wire.outputs import Floats, Likeliest, SampledTokens

_UNCHANGED = Sampling(max_tokens=1)
_NONE = -99_999.0  # log-probability that the SDK uses for an empty entry
_ROWS = 256  # most rows of logits in memory at once


#: Outcome of a request for samples: its sequences, or the error.
Ended = list[SampledTokens] | StrettoError


class Wish(msgspec.Struct, frozen=True):
    """Sequences to sample after one prompt (token ids), one for each of `seeds`. `likeliest`: number of likeliest
    tokens to return at each sampled position."""

    prompt: tuple[int, ...]
    seeds: tuple[int, ...]
    settings: SamplingParams
    likeliest: int = 0


@dataclass
class _Opened:
    """An open request. `cache`: bytes of KV cache of one of its sequences at its largest length. `found`: its ended
    sequences, by member."""

    wish: Wish
    cache: int
    found: dict[int, SampledTokens] = field(default_factory=dict)

    @property
    def left(self) -> int:
        return len(self.wish.seeds) - len(self.found)


class Sampler:
    """Samples with an engine, and scores prompts with a packed forward of a second model with the same weights."""

    def __init__(
        self,
        engine: NativeEngine,
        view: Callable[[str], PreTrainedModel],
        take: Callable[[Path], bool],
        tokenizer: Tokenizer,
        context: int,
        *,
        slots: int,
        cache: int,
    ) -> None:
        """Sample with `engine`, which must be idle.

        Args:
            view: called with the name of an attention implementation, once, when a prompt is first scored; returns
                another model with the engine's weights.
            take: replaces the weights of these models, the engine's included, as the method `take`.
            context: most tokens of a sequence.
            slots: most sequences that the engine samples at once.
            cache: most bytes of its KV cache.
        """
        self._slots = slots
        self._engine, self._tokenizer, self._context = engine, tokenizer, context
        self._view, self._take = view, take
        self._open: OrderedDict[str, _Opened] = OrderedDict()
        self._scored, self._limit = 0, cache

    @property
    def idle(self) -> bool:
        """Whether no sequence is open."""
        return not self._open

    @property
    def free(self) -> int:
        """Number of free slots: sequences that could be sampled at once in addition to the open ones. Negative if
        open sequences wait for a slot."""
        return self._slots - sum(one.left for one in self._open.values())

    def take(self, folder: Path) -> bool:
        """Replace the weights by those in `folder`, which `Learner.save` wrote. Returns False, with nothing changed, if
        they have another shape. Call it only while no sequence is open.

        Raises:
            StoreError: files are missing or damaged; this model is unusable from then on.
        """
        return self._take(folder)

    def add(self, id: str, wish: Wish) -> None:
        """Add a request to sample, with the unique `id`; `step` computes it.

        Raises:
            RefusedRequest: a sampling setting is invalid, or the prompt is too long; names the field.
        """
        sampling = sampling_of(wish.settings, self._tokenizer.eos_token_ids, len(wish.prompt), self._context)
        self._engine.add(GenerateRequest(id, wish.prompt, wish.seeds, sampling, top_logprobs=wish.likeliest))
        self._open[id] = _Opened(wish, self._engine.cache_of(len(wish.prompt) + sampling.max_tokens))

    def abort(self, id: str) -> None:
        """Stop sampling a request and drop its sequences; an unknown id is ignored."""
        if self._open.pop(id, None) is not None:
            self._engine.abort(id)

    @property
    def computed(self) -> int:
        """Number of tokens computed so far: scored and prefilled prompt tokens, and sampled tokens."""
        return self._scored + self._engine.computed

    @property
    def backlog(self) -> int:
        """Number of tokens of open sequences that the engine computes before those of a sequence that is added now."""
        return self._engine.backlog

    def fits(self, sequences: int, tokens: int) -> bool:
        """Whether slots and KV cache have room for further sequences of `tokens` tokens each, prompt included. Each
        open sequence counts with its largest possible length, and the last sixteenth of the cache as used, because the
        engine starts no sequence there."""
        cache = sequences * self._engine.cache_of(min(tokens, self._context))
        cache += sum(one.cache * one.left for one in self._open.values())
        return sequences <= self.free and cache <= self._limit - self._limit // 16

    @property
    def cache(self) -> int:
        """Bytes of KV cache allocated now."""
        return self._engine.cache_allocated

    @property
    def least_cache(self) -> int:
        """Bytes of KV cache that the longest open sequence needs at its largest length; 0 if none is open."""
        return max((one.cache for one in self._open.values()), default=0)

    def limit(self, cache: int) -> None:
        """Limit the KV cache to `cache` bytes from now on. Entries that are dropped are recomputed when needed."""
        if cache != self._limit:
            self._limit = cache
            self._engine.limit(cache)

    def step(self) -> dict[str, Ended]:
        """Sample one token of each sequence that has a slot. Returns the outcomes of requests that ended, by id: all
        their sequences, or an error if the model's logits were not finite."""
        try:
            completions = self._engine.step()
        except BrokenLogits as broken:
            self._engine.give_up(broken.requests)
            for id in broken.requests:
                self._open.pop(id, None)
            return {id: StrettoError(str(broken)) for id in broken.requests}
        ended: dict[str, Ended] = {}
        for completion in completions:
            opened = self._open[completion.request]
            opened.found[completion.member] = _tokens(completion, opened.wish.likeliest)
            if not opened.left:
                del self._open[completion.request]
                ended[completion.request] = [opened.found[member] for member in range(len(opened.found))]
        return ended

    @torch.no_grad()
    def score(self, prompt: Sequence[int], first: int) -> Floats:
        """Log-probability of each token of a prompt given those before it, [P]: from position `first` (at least 1) on,
        NaN before."""
        found = np.full(len(prompt), np.nan, np.float32)
        if first < len(prompt):
            self._scored += len(prompt)
            packed = pack_tokens([prompt], [range(first, len(prompt))], self._model.device)
            found[first:] = token_logprobs(self._model, packed, _UNCHANGED).logprobs.cpu().numpy()
        return found

    def likeliest(self, prompt: Sequence[int], first: int, width: int) -> Likeliest:
        """The `width` likeliest tokens at each position of a prompt from `first` (at least 1) on, [P, width]. Entries
        before it, and beyond the vocabulary, are empty."""
        ids = np.zeros((len(prompt), width), np.int32)
        logprobs = np.full((len(prompt), width), _NONE, np.float32)
        for start, rows_PV in self._rows(prompt, first):
            top = rows_PV.topk(min(width, rows_PV.shape[-1]))
            ids[start : start + len(rows_PV), : top.indices.shape[1]] = top.indices.cpu().numpy()
            logprobs[start : start + len(rows_PV), : top.indices.shape[1]] = top.values.cpu().numpy()
        return Likeliest(ids, logprobs)

    def score_targets(self, prompt: Sequence[int], targets: Sequence[Sequence[int]]) -> Floats:
        """Log-probabilities of given tokens in place of the prompt's, [P - 1, K]. Row i of `targets` has the tokens for
        position i + 1; the result for token -1 is 0.

        Raises:
            RefusedRequest: a token is not in the vocabulary.
        """
        wanted = torch.tensor(targets, dtype=torch.int64)
        vocabulary = self._model.get_output_embeddings().weight.shape[0]
        if len(wrong := wanted[wanted >= vocabulary]):
            told, allowed = f"token {int(wrong[0])}", f"0 to {vocabulary - 1}, the vocabulary"
            raise RefusedRequest("target_prompt_logprobs", told, allowed)
        found = np.zeros(wanted.shape, np.float32)
        for start, rows_PV in self._rows(prompt, 1):
            ids = wanted[start - 1 : start - 1 + len(rows_PV)].to(rows_PV.device)
            values = rows_PV.gather(1, ids.clamp_min(0)).masked_fill(ids < 0, 0.0)
            found[start - 1 : start - 1 + len(rows_PV)] = values.cpu().numpy()
        return found

    def draw(self, prompt: Sequence[int], width: int, settings: SamplingParams, seed: int) -> Likeliest:
        """Draw `width` tokens at each position of a prompt after the first, [P - 1, width], with their
        log-probabilities at temperature 1. Of `settings` only the temperature counts, for the drawing. Equal seeds give
        equal tokens."""
        shape = (max(0, len(prompt) - 1), width)
        ids, logprobs = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        random = torch.Generator().manual_seed(seed % 2**63)
        for start, rows_PV in self._rows(prompt, 1):
            if settings.temperature > 0:
                gaps = rows_PV - rows_PV.max(-1, keepdim=True).values  # at most 0: no temperature makes it NaN
                weights = (gaps / settings.temperature).softmax(-1).cpu()
                drawn = torch.multinomial(weights, width, replacement=True, generator=random)
            else:
                drawn = rows_PV.argmax(-1, keepdim=True).expand(-1, width).cpu()
            at = slice(start - 1, start - 1 + len(rows_PV))
            ids[at], logprobs[at] = drawn.numpy(), rows_PV.cpu().gather(1, drawn).numpy()
        return Likeliest(ids, logprobs)

    def _rows(self, prompt: Sequence[int], first: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the log-probabilities of the whole vocabulary at the positions of a prompt from `first` (at least 1)
        on, in parts: first position, and rows [at most 256, V]. So only one part is in memory."""
        model = self._model
        self._scored += len(prompt)
        with torch.no_grad():
            packed = pack_tokens([prompt], [range(min(first, len(prompt)), len(prompt))], model.device)
            hidden = hidden_states(model, packed).index_select(0, packed.before)
        head = model.get_output_embeddings()
        for at, part in enumerate(hidden.split(_ROWS) if len(hidden) else ()):
            with torch.no_grad():  # not around the yield, because it would hold for the caller's code too
                found = head(part).float().log_softmax(-1)
            yield first + at * _ROWS, found

    @cached_property
    def _model(self) -> PreTrainedModel:
        return self._view(PACKED_ATTENTION)


def _tokens(completion: Completion, width: int) -> SampledTokens:
    """Convert a completion, with the `width` likeliest tokens at each position; 0: without."""
    likeliest = None
    if width:
        ids = np.zeros((completion.segment.length, width), np.int32)
        logprobs = np.full(ids.shape, _NONE, np.float32)
        for at, row in enumerate(completion.top_logprobs):
            for rank, (token, logprob) in enumerate(row[:width]):
                ids[at, rank], logprobs[at, rank] = token, logprob
        likeliest = Likeliest(ids, logprobs)
    stopped = completion.stop_reason == StopReason.STOP
    return SampledTokens(completion.token_ids, completion.behavior_logprobs, stopped, likeliest)


def sampling_of(settings: SamplingParams, end: tuple[int, ...], prompt: int, context: int) -> Sampling:
    """Convert the SDK's sampling settings to the engine's. The tokenizer's end of sequence also ends a completion,
    unless `stop` is an empty list.

    Args:
        end: token ids of the end of sequence.
        prompt: number of the prompt's tokens.
        context: most tokens of a sequence.

    Raises:
        RefusedRequest: `stop` mixes texts and token ids, `max_tokens` is less than 1, or the prompt fills the context.
    """
    stop = [settings.stop] if isinstance(settings.stop, str) else settings.stop
    texts = tuple(one for one in stop or () if isinstance(one, str))
    ids = tuple(one for one in stop or () if isinstance(one, int))
    if texts and ids:
        raise RefusedRequest("sampling_params.stop", "texts and token ids together", "all texts, or all token ids")
    if settings.max_tokens is not None and settings.max_tokens < 1:
        raise RefusedRequest("sampling_params.max_tokens", str(settings.max_tokens), "at least 1")
    if (room := context - prompt) < 1:
        raise RefusedRequest("prompt", f"{prompt:,} tokens", f"at most {context - 1:,}, one less than the context")
    return Sampling(
        max_tokens=room if settings.max_tokens is None else min(settings.max_tokens, room),
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=max(0, settings.top_k),
        stop_token_ids=() if stop == [] else tuple(dict.fromkeys((*ids, *end))),
        stop=texts,
    )
