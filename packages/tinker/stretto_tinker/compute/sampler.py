"""Sampling from and scoring with the weights of one model.

Axes: P prompt token, V vocabulary.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
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
from stretto.model.decode.policy import DecodePolicy
from stretto.model.decode.text import TextCache
from stretto.model.hf.tokenizer import Tokenizer
from stretto_tinker.wire.bodies import SamplingParams
from stretto_tinker.wire.outputs import Likeliest, Sampled, SampledTokens

log = logging.getLogger(__name__)

_NONE = -99_999.0  # log-probability that the SDK uses for an empty entry
#: Most tokens of a prompt that are scored together, so most rows of logits in memory at once. Others wait meanwhile.
_PIECE = 256
#: Most prompts of several pieces that are scored at once. Each holds the KV entries of its tokens.
_MOST_HELD = 4


#: Outcome of a request for samples: its result, or the error.
Ended = Sampled | StrettoError


class Wish(msgspec.Struct, frozen=True):
    """Sequences to sample after one prompt (token ids), one for each of `seeds`, and what to compute of the prompt.

    Attributes:
        likeliest: number of likeliest tokens to return at each sampled position.
        owner: the client; prompts of several clients are scored in turn.
        scored: whether to return the log-probabilities of the prompt's tokens.
        prompt_likeliest: number of likeliest tokens to return at each position of the prompt.
        first: first position of the prompt, at least 1, for which `scored` and `prompt_likeliest` give results.
        targets: tokens to score in place of the prompt's: row i has those for position i + 1; the result for token -1
            is 0. None: no result.
        drawn: number of tokens to draw at each position of the prompt after the first. Equal seeds give equal tokens.
        seed: for drawing.
    """

    prompt: tuple[int, ...]
    seeds: tuple[int, ...]
    settings: SamplingParams
    likeliest: int = 0
    owner: str = ""
    scored: bool = False
    prompt_likeliest: int = 0
    first: int = 1
    targets: Sequence[Sequence[int]] | None = None
    drawn: int = 0
    seed: int = 0

    @property
    def of_prompt(self) -> bool:
        """Whether anything of the prompt is to be computed."""
        return self.scored or self.prompt_likeliest > 0 or self.targets is not None or self.drawn > 0


@dataclass
class _Opened:
    """An open request.

    Attributes:
        cache: bytes of KV cache of one of its sequences at its largest length.
        pieces: scores the prompt, a piece at each `next`, and returns the result without sequences; None: it is
            scored.
        unscored: number of tokens of the prompt that are not scored yet.
        scores: the result without sequences, once it is there.
        found: its ended sequences, by member.
    """

    wish: Wish
    cache: int
    pieces: Generator[None, None, Sampled] | None
    unscored: int
    scores: Sampled = field(default_factory=lambda: Sampled([]))
    found: dict[int, SampledTokens] = field(default_factory=dict)

    @property
    def left(self) -> int:
        return len(self.wish.seeds) - len(self.found)

    @property
    def held(self) -> bool:
        """Whether the prompt is scored in part, so that the KV entries of its tokens are held."""
        return 0 < self.unscored < len(self.wish.prompt) - 1


class Sampler:
    """Samples with an engine, and scores prompts with its model, piece by piece between the engine's steps."""

    def __init__(
        self,
        engine: NativeEngine,
        model: PreTrainedModel,
        take: Callable[[Path], bool],
        tokenizer: Tokenizer,
        context: int,
        *,
        slots: int,
        cache: int,
    ) -> None:
        """Prepare to sample with `engine`, which must be idle.

        Args:
            model: that of the engine.
            take: replaces its weights, as the method `take`.
            context: most tokens of a sequence.
            slots: most sequences that the engine samples at once.
            cache: most bytes of its KV cache.
        """
        self._slots = slots
        self._engine, self._tokenizer, self._context = engine, tokenizer, context
        self._model, self._take = model, take
        self._open: OrderedDict[str, _Opened] = OrderedDict()
        self._prompts: OrderedDict[str, deque[str]] = OrderedDict()  # ids with prompts to score, by client
        self._scored, self._limit = 0, cache

    @property
    def idle(self) -> bool:
        """Whether no request is open."""
        return not self._open

    @property
    def free(self) -> int:
        """Number of free slots: sequences that could be sampled at once in addition to the open ones. Negative if
        open sequences wait for a slot."""
        return self._slots - sum(one.left for one in self._open.values())

    def take(self, folder: Path) -> bool:
        """Replace the weights by those in `folder`, which `Learner.save` wrote. Returns False, with nothing changed, if
        they have another shape. Call it only while no request is open.

        Raises:
            StoreError: files are missing or damaged; the weights are as before.
        """
        return self._take(folder)

    def add(self, id: str, wish: Wish) -> None:
        """Add a request, with the unique `id`; `step` computes it.

        Raises:
            RefusedRequest: a sampling setting is invalid, the prompt is too long, or a target is not in the vocabulary;
                names the field.
        """
        sampling = sampling_of(wish.settings, self._tokenizer.eos_token_ids, len(wish.prompt), self._context)
        self._check_targets(wish.targets or ())
        self._engine.add(GenerateRequest(id, wish.prompt, wish.seeds, sampling, top_logprobs=wish.likeliest))
        cache = self._engine.cache_of(len(wish.prompt) + sampling.max_tokens)
        self._open[id] = _Opened(wish, cache, None, 0)
        if wish.of_prompt:
            self._open[id].pieces, self._open[id].unscored = self._score(wish), len(wish.prompt) - 1
            self._prompts.setdefault(wish.owner, deque()).append(id)

    def _check_targets(self, targets: Sequence[Sequence[int]]) -> None:
        vocabulary = self._model.get_output_embeddings().weight.shape[0]
        if wrong := [token for row in targets for token in row if token >= vocabulary]:
            told, allowed = f"token {wrong[0]}", f"0 to {vocabulary - 1}, the vocabulary"
            raise RefusedRequest("target_prompt_logprobs", told, allowed)

    def abort(self, id: str) -> None:
        """Stop computing a request and drop its sequences; an unknown id is ignored."""
        if id in self._open:
            self._engine.abort(id)
            self._close(id)

    def _close(self, id: str) -> None:
        opened = self._open.pop(id)
        if opened.pieces is not None:
            opened.pieces.close()
            self._scored_all(id, opened)

    def _scored_all(self, id: str, opened: _Opened) -> None:
        """Mark the prompt of a request as scored, and take the request out of those whose prompts wait for this."""
        opened.pieces, opened.unscored, owner = None, 0, opened.wish.owner
        self._prompts[owner].remove(id)
        if not self._prompts[owner]:
            del self._prompts[owner]

    @property
    def computed(self) -> int:
        """Number of tokens computed so far: scored and prefilled prompt tokens, and sampled tokens."""
        return self._scored + self._engine.computed

    @property
    def backlog(self) -> int:
        """Number of tokens of open sequences that the engine computes before those of a sequence that is added now."""
        return self._engine.backlog

    def unscored(self, owner: str) -> int:
        """Number of prompt tokens of a client's open requests that are still to be scored."""
        return sum(self._open[id].unscored for id in self._prompts.get(owner, ()))

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
        """Score about 256 tokens of prompts, in turns between clients, and sample one token of each sequence that has a
        slot. Returns the outcomes of requests that ended, by id: all their sequences and scores, or an error, as of
        logits that are not finite."""
        ended, end = dict[str, Ended](), self._scored + _PIECE
        while self._scored < end and (id := self._next_prompt()) is not None:
            ended |= self._score_piece(id)
        return ended | self._sample()

    def _sample(self) -> dict[str, Ended]:
        """Take one step of the engine; returns the outcomes, by id, of the requests that end with it, or that fail
        because their logits are not finite."""
        try:
            completions = self._engine.step()
        except BrokenLogits as broken:
            self._engine.give_up(broken.requests)
            for id in broken.requests:
                self._close(id)
            return {id: StrettoError(str(broken)) for id in broken.requests}
        ended: dict[str, Ended] = {}
        for completion in completions:
            opened = self._open[completion.request]
            opened.found[completion.member] = _tokens(completion, opened.wish.likeliest)
            ended |= self._ended(completion.request)
        return ended

    def _ended(self, id: str) -> dict[str, Ended]:
        """Close a request if all of it is computed; returns its outcome by its id, else an empty dict."""
        opened = self._open[id]
        if opened.left or opened.pieces is not None:
            return {}
        self._close(id)
        return {id: replace(opened.scores, sequences=[opened.found[member] for member in range(len(opened.found))])}

    def _next_prompt(self) -> str | None:
        """The request whose prompt is scored next: the first one of the client whose turn is longest ago, which then
        counts as the latest. A prompt of several pieces is not begun while `_MOST_HELD` are under way. None if no
        prompt waits."""
        held = sum(self._open[ids[0]].held for ids in self._prompts.values())
        for owner, ids in self._prompts.items():
            opened = self._open[ids[0]]
            if opened.held or opened.unscored <= _PIECE or held < _MOST_HELD:
                self._prompts.move_to_end(owner)
                return ids[0]
        return None

    def _score_piece(self, id: str) -> dict[str, Ended]:
        """Score the next piece of a request's prompt; returns the outcome by the request's id if this ends the request,
        also by a failure, else an empty dict."""
        opened = self._open[id]
        assert opened.pieces is not None
        try:
            next(opened.pieces)
        except StopIteration as end:
            opened.scores = end.value
            self._scored_all(id, opened)
            return self._ended(id)
        except Exception as error:  # a prompt that cannot be scored, or a bug: its request fails, others go on
            log.exception("the prompt of %s was not scored", id)
            self.abort(id)
            return {id: error if isinstance(error, StrettoError) else StrettoError(f"{type(error).__name__}: {error}")}
        opened.unscored = max(0, opened.unscored - _PIECE)
        return {}

    def _score(self, wish: Wish) -> Generator[None, None, Sampled]:
        """Compute what a wish asks of its prompt, in one forward pass that stops after each piece but the last."""
        scores, text = _Scores(wish), np.asarray(wish.prompt[:-1], np.int64)
        first = wish.first if wish.targets is None and not wish.drawn else 1
        cache = TextCache(self._policy.layout, len(text))
        for start in range(0, len(text), _PIECE):
            piece = text[start : start + _PIECE]
            wanted = min(len(piece), max(1, start + len(piece) + 1 - first))
            rows_PV = self._policy.forward_of_piece(cache, piece, wanted).log_softmax(-1)
            self._scored += len(piece)
            scores.fill(start + len(piece) + 1 - wanted, rows_PV)
            if start + len(piece) < len(text):
                yield
        return scores.found

    @cached_property
    def _policy(self) -> DecodePolicy:
        return DecodePolicy(self._model)


class _Scores:
    """Results of a wish for its prompt, as far as they are computed; `found` has them, and no sequences."""

    def __init__(self, wish: Wish) -> None:
        tokens, after = len(wish.prompt), max(0, len(wish.prompt) - 1)
        self._wish, self._random = wish, torch.Generator().manual_seed(wish.seed % 2**63)
        self._targets = None if wish.targets is None else torch.tensor(wish.targets, dtype=torch.int64)
        self.found = Sampled(
            [],
            np.full(tokens, np.nan, np.float32) if wish.scored else None,
            _empty(tokens, wish.prompt_likeliest, _NONE),
            None if self._targets is None else np.zeros(self._targets.shape, np.float32),
            _empty(after, wish.drawn, 0.0),
        )

    def fill(self, start: int, rows_PV: Tensor) -> None:
        """Add to `found` what the wish asks of the positions from `start` on. `rows_PV`: their log-probabilities of the
        whole vocabulary."""
        found, late = self.found, max(0, self._wish.first - start)
        if late < len(rows_PV):
            self._fill_own(start + late, rows_PV[late:])
        at = slice(start - 1, start - 1 + len(rows_PV))
        if found.target_logprobs is not None and self._targets is not None:
            ids = self._targets[at].to(rows_PV.device)
            found.target_logprobs[at] = rows_PV.gather(1, ids.clamp_min(0)).masked_fill(ids < 0, 0.0).cpu().numpy()
        if found.drawn is not None:
            drawn = self._draw(rows_PV)
            found.drawn.token_ids[at] = drawn.numpy()
            found.drawn.logprobs[at] = rows_PV.cpu().gather(1, drawn).numpy()

    def _fill_own(self, start: int, rows_PV: Tensor) -> None:
        """Add what a wish asks of the prompt's own tokens from position `start` on: their log-probabilities, and the
        likeliest tokens beside them."""
        found, at = self.found, slice(start, start + len(rows_PV))
        if found.prompt_logprobs is not None:
            ids = torch.tensor(self._wish.prompt[at], device=rows_PV.device)
            found.prompt_logprobs[at] = rows_PV.gather(1, ids[:, None])[:, 0].cpu().numpy()
        if (likeliest := found.prompt_likeliest) is not None:
            top = rows_PV.topk(width := min(self._wish.prompt_likeliest, rows_PV.shape[-1]))
            likeliest.token_ids[at, :width] = top.indices.cpu().numpy()
            likeliest.logprobs[at, :width] = top.values.cpu().numpy()

    def _draw(self, rows_PV: Tensor) -> Tensor:
        """Draw tokens at each position, [P, drawn]. Of the settings only the temperature counts; 0 gives the likeliest
        token `drawn` times."""
        temperature, width = self._wish.settings.temperature, self._wish.drawn
        if temperature <= 0:
            return rows_PV.argmax(-1, keepdim=True).expand(-1, width).cpu()
        gaps = rows_PV - rows_PV.max(-1, keepdim=True).values  # at most 0: no temperature makes it NaN
        weights = (gaps / temperature).softmax(-1).cpu()
        return torch.multinomial(weights, width, replacement=True, generator=self._random)


def _empty(positions: int, width: int, logprob: float) -> Likeliest | None:
    """Token 0 with this log-probability in each of `width` entries at each position; None if `width` is 0."""
    if not width:
        return None
    return Likeliest(np.zeros((positions, width), np.int32), np.full((positions, width), logprob, np.float32))


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
    """Convert the SDK's sampling settings to the engine's; `max_tokens` becomes at most the room behind the prompt. The
    tokenizer's end of sequence also ends a completion, unless `stop` is an empty list.

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
