"""Unfinished completions as columns, one row each: a decode step works on arrays, not row by row.

    history    [rows, width]  prompt, then completion         5 12 8 13 | 4 4 .  .
    logprobs   [rows, width]  of sampled tokens                .  .  . . | -0.1 -0.7
    versions   [rows, width]  that sampled the tokens          .  .  . . | 6 6

Axes: R rows of this step, in the order of the logits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterator, Mapping

import numpy as np
import numpy.typing as npt
import torch
from msgspec.structs import replace
from torch import Tensor

from stretto.core.columns import stamps_of
from stretto.core.engine import NewToken, Progress
from stretto.core.records import Completion, Likeliest, Segment, StopReason
from stretto.engine.native.sampling import Filtered, SamplingColumns, top_logprobs
from stretto.engine.native.scheduler import Member
from stretto.engine.text import StopTexts, Watch
from stretto.model.hf.grammar import Grammars, Matcher

Ints = npt.NDArray[np.int64]

_FIRST_WIDTH = 128
_NO_TOKEN = -1
_NOWHERE = 1 << 62  # beyond any length


class Completions:
    """Unfinished completions as arrays, with a row for each completion in the batch. The columns are public attributes:
    the engine indexes them by row and passes them to the policy and the sampler."""

    def __init__(self, rows: int, context_length: int, stop_texts: StopTexts, grammars: Grammars | None = None) -> None:
        """Create empty columns. `rows`: number of completions at a time; `context_length`: most tokens of prompt and
        completion. `stop_texts` makes their searches for stop texts. `grammars`: compiler of grammars; None: no request
        has a grammar."""
        self._grammars = grammars
        self._context_length = context_length
        self._stop_texts = stop_texts
        self.newest: Ints = np.zeros(rows, np.int64)
        self.lengths: Ints = np.zeros(rows, np.int64)  # prompt and completion
        self.prompts: Ints = np.zeros(rows, np.int64)  # tokens of the prompt
        self.limits: Ints = np.zeros(rows, np.int64)  # limit of `lengths`
        self._own: Ints = np.zeros(rows, np.int64)  # from here tokens have a context of one version (`note_mixed`)
        self.sampling = SamplingColumns(rows)
        self._watches: dict[int, Watch] = {}
        self.matchers: dict[int, Matcher] = {}  # rows with a grammar
        self._likeliest: dict[int, list[Likeliest]] = {}  # rows whose requests want top log-probabilities
        self._wanted: Ints = np.zeros(rows, np.int64)  # number of top log-probabilities per token
        self._stopped = np.zeros(rows, np.bool_)
        self.interrupted: Ints = np.zeros(rows, np.int64)
        self._stops = np.full((rows, 1), _NO_TOKEN, np.int64)
        self._history: Ints = np.zeros((rows, _FIRST_WIDTH), np.int64)
        self._logprobs = np.zeros((rows, _FIRST_WIDTH), np.float32)
        self._versions = np.zeros((rows, _FIRST_WIDTH), np.int64)
        # Rows, tokens and log-probabilities of the last step, and its version.
        self._last: tuple[Ints, Ints, npt.NDArray[np.float32], int] | None = None

    def open(self, row: int, member: Member) -> bool:
        """Start the completion of `member`, whose request has been checked, in a row: store its prompt, settings and
        prefix, and replace earlier contents. Returns whether the prefix has ended already, by a stop or its limit: then
        no token may be sampled after it, and `close` is next."""
        prompt, sampling = member.request.prompt_token_ids, member.request.sampling
        self.limits[row] = min(member.tokens, self._context_length)
        self._widen(int(self.limits[row]), len(sampling.stop_token_ids))
        self._history[row, : len(prompt)] = prompt
        self.newest[row] = prompt[-1]
        self.lengths[row] = self.prompts[row] = self._own[row] = len(prompt)
        self.sampling.set(row, member.request.seeds[member.index], sampling)
        self.forget(row)
        if sampling.stop:
            self._watches[row] = self._stop_texts.watch(sampling.stop)
        if sampling.grammar:
            assert self._grammars is not None, "checked when the request was added"
            self.matchers[row] = self._grammars.matcher(sampling.grammar, sampling.stop_token_ids)
        self._wanted[row] = member.request.top_logprobs
        if member.request.top_logprobs:
            self._likeliest[row] = []
        self.interrupted[row] = 0
        self._stops[row] = _NO_TOKEN
        self._stops[row, : len(sampling.stop_token_ids)] = sampling.stop_token_ids
        return bool(member.request.prefixes) and self._resume(row, member.request.prefixes[member.index])

    def _resume(self, row: int, prefix: Segment) -> bool:
        """Append a segment that another engine or an earlier process sampled, and continue after it; returns whether
        the completion has ended. Does nothing for an empty segment."""
        if not prefix.length:
            return False
        token_ids = prefix.token_ids
        start, end = int(self.lengths[row]), int(self.lengths[row]) + prefix.length
        self._history[row, start:end] = token_ids
        self._logprobs[row, start:end] = prefix.behavior_logprobs
        self._versions[row, start:end] = prefix.versions
        self.newest[row], self.lengths[row], self._own[row] = token_ids[-1], end, end
        self.interrupted[row] = prefix.interrupted
        if row in self._likeliest:
            self._likeliest[row] += [()] * prefix.length  # one for each token; those of another engine are not known
        stopped = bool((self._stops[row] == token_ids[-1]).any())
        if row in self._watches:
            stopped |= self._completed_stop(row)  # the watch has counted these tokens
        if row in self.matchers:
            self.matchers[row].take(token_ids)
        self._stopped[row] = stopped
        return stopped or end >= int(self.limits[row])

    def context(self, row: int) -> Ints:
        """All tokens of a row except the newest: the tokens whose KV entries the row needs before its next step."""
        return self._history[row, : self.lengths[row] - 1]

    def note_mixed(self, rows: list[int]) -> None:
        """Let `sampled_with` find no tokens of these rows until `note_recomputed`: the rows keep KV entries of an
        earlier version, which later tokens attend to."""
        self._own[rows] = _NOWHERE

    def note_recomputed(self, rows: list[int]) -> None:
        """Let `sampled_with` find tokens of these rows from here on: this step computes the KV entries of the rows, new
        or again, all with the version in use."""
        self._own[rows] = np.minimum(self._own[rows], self.lengths[rows])

    def sampled_with(self, row: int, version: int) -> Ints:
        """Positions in a row's history of the tokens that `version` sampled in this engine, over KV entries that the
        same version computed; may be empty."""
        begin, end = int(self._own[row]), int(self.lengths[row])
        return begin + np.flatnonzero(self._versions[row, begin:end] == version)

    def tokens_at(self, row: int, places: Ints) -> tuple[Ints, npt.NDArray[np.float32]]:
        """Tokens of a row at `places` (positions in its history), and their log-probabilities at sampling."""
        return self._history[row, places], self._logprobs[row, places]

    def constrained(self, order_R: Ints, found: Filtered | None) -> Filtered | None:
        """Add to `found`, the filtered rows among `order_R`, the tokens that their grammars allow next; call `look` of
        their matchers before. Rows without a grammar allow all tokens. Returns `found` (None: no filtered rows) if no
        row of `order_R` has a grammar."""
        allowed = {at: self.matchers[row].allowed for at, row in enumerate(order_R.tolist()) if row in self.matchers}
        if found is None or not allowed:
            return found
        everything = np.full_like(next(iter(allowed.values())), -1)
        return dataclasses.replace(found, allowed=np.stack([allowed.get(at, everything) for at in found.rows.tolist()]))

    def note_top_logprobs(
        self,
        order_R: Ints,
        logits_RV: Tensor,
        filtered: Filtered | None,
        tokens_R: Ints,
        logprobs_R: npt.NDArray[np.float32],
    ) -> None:
        """Store the top log-probabilities of the next token for rows that requested them; without any, do nothing.

        Args:
            order_R: row of each line of the logits.
            filtered: all filtered rows of `order_R`; None: there are none.
            tokens_R, logprobs_R: the sampled tokens; a sampled token keeps the log-probability of its sampling.
        """
        if not self._likeliest or not len(places := np.flatnonzero(self._wanted[order_R])):
            return
        rows = order_R[places]
        logits = logits_RV[torch.from_numpy(places).to(logits_RV.device)]
        kept = filtered.among(places) if filtered is not None else None
        found = top_logprobs(logits, self._wanted[rows], self.sampling.temperatures[rows], kept)
        sampled = zip(tokens_R[places].tolist(), logprobs_R[places].tolist(), strict=True)
        for row, tokens, (token, own) in zip(rows.tolist(), found, sampled, strict=True):
            self._likeliest[row].append(tuple((one, own if one == token else other) for one, other in tokens))

    def record(self, order_R: Ints, tokens_R: Ints, logprobs_R: npt.NDArray[np.float32], version: int) -> Ints:
        """Append one token, sampled by `version`, to each row of `order_R`, and advance the searches for stop texts and
        the grammars; returns the rows that have ended: by a stop token, a stop text, or their limit."""
        places_R = self.lengths[order_R]
        self._history[order_R, places_R] = tokens_R
        self._logprobs[order_R, places_R] = logprobs_R
        self._versions[order_R, places_R] = version
        self.newest[order_R] = tokens_R
        self._last = order_R, tokens_R, logprobs_R, version
        self.lengths[order_R] = places_R + 1
        stopped_R = (self._stops[order_R] == tokens_R[:, None]).any(axis=1)
        if self._watches:
            stopped_R |= [row in self._watches and self._completed_stop(row) for row in order_R.tolist()]
        if self.matchers:
            for row, token in zip(order_R.tolist(), tokens_R.tolist(), strict=True):
                if row in self.matchers:
                    self.matchers[row].take((token,))
        self._stopped[order_R] = stopped_R
        ended: Ints = order_R[stopped_R | (places_R + 1 >= self.limits[order_R])]
        return ended

    def progress(self, row: int, member: Member, known: int) -> Progress:
        """The tokens of a row's completion after its first `known` tokens; may be none."""
        segment, likeliest = self._segment(row, known), self._likeliest.get(row, [])[known:]
        return Progress(member.request.id, member.index, segment, likeliest)

    def new_tokens(self, members: Mapping[int, Member], wanted: Container[str]) -> Iterator[NewToken]:
        """The tokens of the last step, of unfinished completions of the `wanted` requests (ids). `members`: unfinished
        completions by row. Nothing before the first step."""
        if self._last is None:
            return
        rows, tokens, logprobs, version = self._last
        for row, token, logprob in zip(rows.tolist(), tokens.tolist(), logprobs.tolist(), strict=True):
            if (member := members.get(row)) is not None and (request := member.request.id) in wanted:
                likeliest = self._likeliest[row][-1] if row in self._likeliest else ()
                yield NewToken(request, member.index, token, logprob, version, likeliest)

    def close(self, row: int, member: Member) -> Completion:
        """Return the completion of a row that has ended, by a stop or by its length, and `forget` the row."""
        segment, likeliest = self._segment(row, 0), tuple(self._likeliest.get(row, ()))
        self.forget(row)
        reason = StopReason.STOP if self._stopped[row] else StopReason.LENGTH
        return Completion(member.request.id, member.index, replace(segment, stop_reason=reason), likeliest)

    def forget(self, row: int) -> None:
        """Drop the state for grammar, stop texts and top log-probabilities of a row, if it has any."""
        self._watches.pop(row, None)
        self.matchers.pop(row, None)
        self._likeliest.pop(row, None)

    def _segment(self, row: int, known: int) -> Segment:
        """The tokens of a row's completion after its first `known` tokens, as a segment with a checksum."""
        new = slice(int(self.prompts[row]) + known, int(self.lengths[row]))
        columns = self._history[row, new].astype(np.int32).tobytes() + self._logprobs[row, new].tobytes()
        versions, length = self._versions[row, new], new.stop - new.start
        alike = length and versions[0] == versions[-1]  # versions never decrease
        stamps = ((int(versions[0]), length),) if alike else stamps_of(versions.tolist())
        return Segment.sealed(columns, length, stamps, int(self.interrupted[row]))

    def _completed_stop(self, row: int) -> bool:
        """Search the new tokens of a row that has stop texts; True if they complete one."""
        watch, begin = self._watches[row], int(self.prompts[row])
        return watch.completed(self._history[row, begin + watch.seen : self.lengths[row]].tolist())

    def _widen(self, width: int, stops: int) -> None:
        """Make room in every row for `width` tokens and `stops` stop tokens."""
        if (missing := width - self._history.shape[1]) > 0:
            wider = ((0, 0), (0, max(missing, self._history.shape[1])))
            self._history = np.pad(self._history, wider)
            self._logprobs = np.pad(self._logprobs, wider)
            self._versions = np.pad(self._versions, wider)
        if (missing := stops - self._stops.shape[1]) > 0:
            self._stops = np.pad(self._stops, ((0, 0), (0, missing)), constant_values=_NO_TOKEN)
