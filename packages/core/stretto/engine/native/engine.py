"""The native engine: continuous batching that can be interrupted between any two tokens.

    step 1   admit completions, prefill their prompts, sample their first tokens        version 6
    step 2   decode one token of every running completion                               version 6
    update   interrupt them, drop the KV cache, load weights
    step 3   prefill prompts and partial completions, sample the next tokens            version 7

Weights change between steps only, so all tokens of a step have one version (AReaL, arXiv 2505.24298, section 4.1).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Self, cast

import numpy as np
from torch import Tensor, nn
from transformers import PreTrainedModel

from stretto.core.canary import Canary, Scores
from stretto.core.engine import EngineHealth, NewToken, Progress
from stretto.core.errors import BoundViolated, RefusedRequest, UnprovenWeights
from stretto.core.events import BusySpans, Span
from stretto.core.records import Completion, GenerateRequest
from stretto.engine.config import EngineConfig
from stretto.engine.native.completions import Completions
from stretto.engine.native.parameters import Parameters, Prover
from stretto.engine.native.sampling import BrokenLogits, sample
from stretto.engine.native.scheduler import Member, Scheduler, longest_row
from stretto.engine.native.validate import BrokenGrammar, check_grammar, check_prefixes, check_request, check_text
from stretto.engine.text import Detokenizer, StopTexts
from stretto.model.decode.policy import CACHED_ATTENTION, Context, DecodePolicy
from stretto.model.device import spare
from stretto.model.families import check_family_of
from stretto.model.hf.folder import load_policy
from stretto.model.hf.grammar import Grammars
from stretto.model.hf.tokenizer import load_tokenizer
from stretto.model.kernels import use_onednn

_WORKING = 1 << 30  # bytes that a step needs in addition to weights and cache


class NativeEngine:
    """A synchronous engine: the caller decides when a step happens.

    Example::

        engine = NativeEngine.load(folder, EngineConfig(slots=64))
        engine.add(GenerateRequest(id="a", prompt_token_ids=(5, 12), seeds=(1, 2), sampling=Sampling(max_tokens=8)))
        while not engine.idle:
            for completion in engine.step():
                ...
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: EngineConfig,
        *,
        name: str = "engine",
        detokenizer: Callable[[], Detokenizer] | None = None,
        grammars: Callable[[int], Grammars] | None = None,
    ) -> None:
        """Make an engine of a loaded model, which is changed in place: no gradients, oneDNN layers where they serve.
        `detokenizer` makes the detokenizer when the first request with stop texts comes. `grammars` makes the compiler
        of grammars from the vocabulary size. Without them, requests with stop texts or a grammar are refused. `name`:
        role in spans and errors."""
        use_onednn(model)
        self._cache_bytes, self._has_sampled = config.cache_bytes, False  # whether the last step sampled
        self._policy = DecodePolicy(model.requires_grad_(False).eval(), config.cache_bytes)
        self._parameters = Parameters(model)
        self._vocab_size = cast(nn.Embedding, model.get_input_embeddings()).weight.shape[0]
        self._config = config
        layout = self._policy.layout
        self._scheduler = Scheduler(config.slots, config.cache_bytes // layout.bytes_per_token, layout.slot)
        self._stop_texts = StopTexts(detokenizer)
        self.grammars = grammars(self._vocab_size) if grammars is not None else None
        self._completions = Completions(config.slots, layout.context_length, self._stop_texts, self.grammars)
        self.name, self._spans = name, BusySpans(name)
        self.version = 0
        self.in_doubt = False  #: the weights may be a mixture, or are not proven: no step until a version is loaded
        self._generated = self._prefilled = self._recomputed = self._interrupted = self._wasted = self._updates = 0
        self._preempted = 0
        self._busy_seconds = 0.0
        self._ended: Counter[str] = Counter()  # tokens of ended completions, by open request
        self._stale = 0  # completions whose KV entries the last update has kept
        self._prover = Prover(self._policy, self._vocab_size, config.max_prefill_tokens)
        self._tiles: Path | None = None

    def tune(self, record: Path | None) -> None:
        """Choose the tile sizes of the kernels for decoding on a GPU (`stretto_kernels.gpu.attention`). `record`: file
        that keeps the choice for the run; None: the default sizes. Call it before the first request."""
        self._tiles = record
        self._policy.tune(record)

    @classmethod
    def load(cls, folder: Path | str, config: EngineConfig, *, name: str = "engine") -> Self:
        """Load the model and the tokenizer of a Hugging Face folder and make an engine. `name`: of the engine, in
        results and spans. Raises ModelFolderError if it cannot be loaded, or the cache does not support its attention.
        """
        check_family_of(folder)
        model = load_policy(folder, attention=CACHED_ATTENTION, dtype=config.dtype, device=config.device)
        tokenizer = partial(load_tokenizer, folder)
        return cls(model, config, name=name, detokenizer=tokenizer, grammars=partial(Grammars, tokenizer))

    def _spare(self) -> int | None:
        """Bytes free on the device after the KV cache at its largest and the working memory of a step; None without a
        limit."""
        return spare(self._policy.layout.device, self._cache_bytes - self._policy.bytes_allocated + _WORKING)

    @property
    def updates(self) -> int:
        """Number of versions loaded so far."""
        return self._updates

    @property
    def idle(self) -> bool:
        """Whether no completion waits or runs."""
        return self._scheduler.idle

    @property
    def waiting(self) -> int:
        """Number of completions that wait for a row (a place in the batch)."""
        return self._scheduler.waiting

    @property
    def longest_row(self) -> int:
        """Largest number of tokens of prompt plus completion that the context and a KV cache of `engine.cache_gib` can
        hold."""
        return longest_row(self._policy.layout, self._config.cache_bytes)

    @property
    def cache_allocated(self) -> int:
        """Bytes of the KV cache now."""
        return self._policy.bytes_allocated

    @property
    def computed(self) -> int:
        """Number of tokens computed so far: prompt tokens, recomputed tokens, and sampled tokens."""
        return self._generated + self._prefilled + self._recomputed

    def cache_of(self, tokens: int) -> int:
        """Bytes of KV cache for one completion of this many tokens, including its prompt."""
        layout = self._policy.layout
        return layout.slot(tokens) * layout.bytes_per_token

    @property
    def backlog(self) -> int:
        """Number of tokens to prefill or recompute before all open completions can run; a prompt counts once per
        request."""
        pending = {row: self._scheduler.members[row].request for row in self._scheduler.pending}
        prompts = {request.id: len(request.prompt_token_ids) for request in pending.values()}
        return sum({**self._scheduler.prompts_waiting(), **prompts}.values()) + sum(map(self._sampled, pending))

    def limit(self, cache_bytes: int) -> None:
        """Set the limit of the KV cache, at most `engine.cache_gib`. Running completions that no longer fit lose their
        entries, the newest completions first, and are recomputed later."""
        self._cache_bytes = min(cache_bytes, self._config.cache_bytes)
        for row in self._scheduler.limit(self._cache_bytes // self._policy.layout.bytes_per_token):
            self._policy.release(row)
            self._preempted += 1
        self._policy.limit(self._cache_bytes)

    def add(self, request: GenerateRequest) -> None:
        """Queue a request; later steps return its completions. Raises RefusedRequest, which names the wrong field, its
        value and what is allowed."""
        context_length = self._policy.layout.context_length
        check_request(request, self._vocab_size, context_length)
        check_prefixes(request, self._vocab_size, context_length, self.version)
        if request.sampling.stop:
            self._stop_texts.check_served()
        if request.sampling.grammar:
            check_grammar(request, self.grammars)
        self._scheduler.add(request)

    def is_open(self, request_id: str) -> bool:
        """Whether a completion of the request with this id waits or runs."""
        return self._scheduler.is_open(request_id)

    def abort(self, request_id: str) -> None:
        """Drop a request and its unfinished completions, if it is open; all that it sampled counts as wasted."""
        self._wasted += self._ended.pop(request_id, 0)
        for row in self._scheduler.abort(request_id):
            self._wasted += self._sampled(row)
            self._completions.forget(row)
            if row in self._policy:
                self._policy.release(row)

    def give_up(self, requests: Iterable[str]) -> None:
        """Abort these requests, whose logits are not finite, and recompute the KV cache of all others: it may hold NaN,
        and masked entries still enter matmuls, where 0 * nan is nan."""
        for request in requests:
            self.abort(request)
        self._scheduler.interrupt()
        self._policy = DecodePolicy(self._policy.model, self._cache_bytes)
        self._policy.tune(self._tiles)

    def step(self) -> list[Completion]:
        """Start what fits, then sample one token of every running completion; returns the completions that ended. Does
        nothing when idle. Completions whose prefixes have ended are returned by a step that samples nothing.

        Raises:
            BrokenLogits: logits of some requests are not finite. No completion got a token. Unless `give_up` is called,
                the next step fails again.
            BrokenGrammar: the grammar of a request cannot be followed further. No completion got a token. Unless the
                request is aborted, the next step fails again.
            UnprovenWeights: the weights are `in_doubt`.
        """
        if self.in_doubt:
            raise UnprovenWeights(self.name, "may have the weights of no version", 1)
        start, columns, self._has_sampled = time.monotonic(), self._completions, False
        whole = [row for row, member in self._scheduler.admit() if columns.open(row, member)]
        if whole:  # returned at once: an error of the others would lose them
            completions = [columns.close(row, self._scheduler.finish(row)) for row in whole]
            self._tally(completions)
            return completions
        if columns.matchers:
            self._follow_grammars()
        self._preempt()
        contexts, recomputed = self._take_contexts()
        if not contexts and not len(self._policy):
            return []
        order, logits_RV = self._policy.forward(columns.newest, columns.lengths, contexts)
        places = columns.lengths[order] - columns.prompts[order]
        settings = columns.sampling
        seeds, temperatures = settings.seeds[order], settings.temperatures[order]
        filtered = settings.filtered(order)
        if columns.matchers:
            filtered = columns.constrained(order, filtered)
        tokens, logprobs = sample(logits_RV, temperatures, seeds, places, filtered)
        if len(broken := order[~np.isfinite(logprobs)]):
            raise BrokenLogits(frozenset(self._scheduler.members[row].request.id for row in broken.tolist()))
        columns.note_top_logprobs(order, logits_RV, filtered, tokens, logprobs)
        ended = columns.record(order, tokens, logprobs, self.version)
        self._has_sampled = True
        completions = [columns.close(row, self._end(row)) for row in ended.tolist()]
        self._tally(completions)
        self._generated += len(order)
        self._spend("recompute" if recomputed else "generate", start)
        return completions

    def progress(self, known: Mapping[str, Sequence[int]]) -> list[Progress]:
        """New tokens of unfinished completions, one `Progress` per completion; those without new tokens are left out.
        `known`: by request id, the number of tokens that the caller already has of each member. Requests and members
        that it does not name are left out of the result too."""
        members = self._scheduler.members.items()
        asked = ((row, one, known[one.request.id]) for row, one in members if one.request.id in known)
        return [
            self._completions.progress(row, member, counts[member.index])
            for row, member, counts in asked
            if member.index < len(counts) and counts[member.index] < self._sampled(row)
        ]

    def new_tokens(self, requests: Container[str]) -> Iterator[NewToken]:
        """The tokens, if any, that the last step sampled for unfinished completions of `requests` (ids). Consume the
        iterator before the next step."""
        return self._completions.new_tokens(self._scheduler.members, requests) if self._has_sampled else iter(())

    def update(self, version: int, tensors: Mapping[str, Tensor], since: float | None = None) -> None:
        """Interrupt every running completion and load weights. Unless ``engine.on_update = "keep"``, the KV cache is
        dropped, to be recomputed with the new weights. Any error but those below leaves the weights `in_doubt`.

        Args:
            version: version of the weights, not older than the version in use.
            tensors: all parameters by name, or adapters (`engine.native.parameters`); any floating type, any device.
            since: `time.monotonic` at the time when reading the tensors began; adds the span "map"; None: no span.

        Raises:
            TornPublication: a name is missing or unknown, or a shape differs; nothing was loaded.
            RefusedRequest: the version is older than the version in use.
        """
        mapped = time.monotonic()
        if version < self.version:
            raise RefusedRequest("version", str(version), f"at least {self.version}, the version in use")
        self._parameters.check(version, tensors)
        self.in_doubt = True
        self._interrupt()
        self._parameters.spare = self._spare()
        self._parameters.load(tensors)
        self._stale = len(self._policy)
        self.version = version
        self._updates += 1
        if since is not None:
            self._spans.add("map", since, mapped, version, sum(tensor.nbytes for tensor in tensors.values()))
        self._spend("load", mapped)
        self.in_doubt = False

    def prove(self, canary: Canary, *, keeps: bool = False) -> Scores:
        """Answer a canary: compare the weights in memory with its digests, and score its text by the forward pass of
        `step`: the last `DECODED` tokens one at a time over a KV cache, the others together. Unless `keeps`, KV entries
        that the last update has not dropped count as a difference. No completion and no KV entry of one is changed."""
        start = time.monotonic()
        differing, compared = self._parameters.compare(canary.digests)
        logprobs, decoded = self._prover.text(canary.token_ids)
        stale = (f"the KV cache of {self._stale} completions",) if self._stale and not keeps else ()
        self._spend("prove", start)
        return Scores(logprobs, decoded, differing=differing + stale, compared=compared)

    def score(self, texts: Sequence[Sequence[int]]) -> Iterator[tuple[int, tuple[float, ...]]]:
        """Yield log-probabilities of all tokens but the first of each text (token ids), by the version in use, at
        temperature 1, as (index of the text, its next numbers), in bounded pieces (`Prover.texts`). Steps may be taken
        between two pieces, but no version may be loaded. Completions and their cache are not changed. Raises
        RefusedRequest if a text is empty, longer than the context, or has tokens outside the vocabulary."""
        for number, text in enumerate(texts):
            check_text(text, f"texts[{number}]", self._vocab_size, self._policy.layout.context_length)
        start = time.monotonic()
        for piece in self._prover.texts(texts):
            self._spend("prove", start)
            yield piece
            start = time.monotonic()

    def look_back(self, wanted: int) -> Scores:
        """Scores without a text, before another version is loaded: tensors that have changed since the proof, and about
        `wanted` tokens that the version in use has sampled for running completions over its own KV entries, as sampled
        and as recomputed without the cache."""
        start, most, changed = time.monotonic(), self._config.max_prefill_tokens, self._parameters.changed()
        sampled = self._prover.sampled(self._completions, self._scheduler.running, self.version, wanted, most)
        self._spend("prove", start)
        left = -1 if changed is None else self.version
        return Scores((), sampled=sampled, left=left, changed=changed or ())

    def health(self) -> EngineHealth:
        """The engine's version, queue length and counters."""
        return EngineHealth(
            version=self.version,
            running=len(self._scheduler.members),
            waiting=self._scheduler.waiting,
            generated=self._generated,
            prefilled=self._prefilled,
            recomputed=self._recomputed,
            interrupted=self._interrupted,
            preempted=self._preempted,
            wasted=self._wasted,
            updates=self._updates,
            busy_seconds=self._busy_seconds,
            unfinished=self._ended.total() + sum(map(self._sampled, self._scheduler.members)),
            needed=self._scheduler.needed(self._completions.lengths),
        )

    def drain_spans(self) -> list[Span]:
        """Times of generating, recomputing, loading and proving since the last call; each span is returned once."""
        return self._spans.drain()

    def check_integrity(self) -> None:
        """Check that every row and slot has one owner, and that the cache holds exactly the running completions. Raises
        BoundViolated, which names the contradiction, otherwise."""
        self._scheduler.check_integrity()
        self._policy.check_integrity()
        if self._policy.rows != (running := set(self._scheduler.running)):
            raise BoundViolated(f"rows {self._policy.rows} are cached, {running} run")

    def _follow_grammars(self) -> None:
        for row, matcher in self._completions.matchers.items():
            try:
                matcher.look()
            except RefusedRequest as refused:
                raise BrokenGrammar(self._scheduler.members[row].request.id, refused) from None

    def _preempt(self) -> None:
        """Let running completions grow into longer slots; if the KV cache is full, the newest lose their entries."""
        for row in self._scheduler.grow(self._completions.lengths):
            self._policy.release(row)
            self._preempted += 1

    def _take_contexts(self) -> tuple[list[Context], bool]:
        """Start the pending rows that fit; returns the contexts whose KV entries this step computes, and whether any is
        recomputed after an interruption."""
        columns, scheduler = self._completions, self._scheduler
        if not scheduler.has_capacity(columns.lengths):
            return [], False
        costs: dict[int, int] = {}
        first_rows: dict[str, int] = {}
        for row in scheduler.pending:
            resumed, request = self._has_prefix(row), scheduler.members[row].request.id
            shared = not resumed and first_rows.setdefault(request, row) != row
            costs[row] = 1 if shared else int(columns.lengths[row])
        taken = scheduler.take_pending(costs, self._config.max_prefill_tokens, columns.lengths)
        columns.note_recomputed(taken)
        again = self._interrupted_contexts([row for row in taken if self._has_prefix(row)])
        prompts: dict[str, list[int]] = {}
        for row in (row for row in taken if not self._has_prefix(row)):
            prompts.setdefault(scheduler.members[row].request.id, []).append(row)
        new = [Context(columns.context(rows[0]), tuple(rows)) for rows in prompts.values()]
        self._recomputed += sum(len(context.own) for context in again)
        self._prefilled += sum(len(context.token_ids) + 1 for context in new)
        return again + new, bool(again)

    def _interrupted_contexts(self, rows: list[int]) -> list[Context]:
        """Contexts of interrupted rows. The first row of a request computes the prompt, which its other rows share."""
        contexts: list[Context] = []
        first: dict[str, int] = {}  # context of each request
        for row in rows:
            tokens = self._completions.context(row)
            prefix_of = first.setdefault(self._scheduler.members[row].request.id, len(contexts))
            # A context needs at least one token that is not shared, even if it is only the prompt.
            shared = min(int(self._completions.prompts[row]), len(tokens) - 1) if prefix_of < len(contexts) else 0
            contexts.append(Context(tokens, (row,), prefix_of, shared))
        return contexts

    def _has_prefix(self, row: int) -> bool:
        return self._sampled(row) > 0

    def _sampled(self, row: int) -> int:
        return int(self._completions.lengths[row] - self._completions.prompts[row])

    def _tally(self, completions: Sequence[Completion]) -> None:
        """Add up the tokens of ended completions by open request, whose abort wastes these tokens too."""
        for completion in completions:
            self._ended[completion.request] += completion.segment.length
            if not self._scheduler.is_open(completion.request):
                del self._ended[completion.request]

    def _end(self, row: int) -> Member:
        self._policy.release(row)
        return self._scheduler.finish(row)

    def _interrupt(self) -> None:
        rows = self._scheduler.running
        self._completions.interrupted[rows] += 1
        self._interrupted += len(rows)
        if self._config.on_update == "recompute":
            self._scheduler.interrupt()
            self._policy.clear()
        else:
            self._completions.note_mixed(rows)

    def _spend(self, name: str, start: float) -> None:
        end = time.monotonic()
        self._busy_seconds += end - start
        self._spans.add(name, start, end, self.version)
