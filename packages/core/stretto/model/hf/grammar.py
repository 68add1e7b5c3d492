"""Grammar-constrained sampling (`Sampling.grammar`): the tokens allowed next, computed by llguidance (an optional
dependency).

    text ─► compiled, once ─► Matcher of each completion: tokens so far ─► bits of the tokens that may follow

The allowed tokens depend only on the grammar and the tokens so far. So a completion that is interrupted, or continued
by another engine, needs no further state.

Grammars come from untrusted users. The work of compilation and masks is limited (`_limits`), compilation runs in a
thread with a large stack, and a grammar whose masks take too long is refused.

Axes: W words of 32 tokens.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from stretto.core.engine import MOST_GRAMMAR
from stretto.core.errors import ModelFolderError, RefusedRequest
from stretto.model.hf.tokenizer import Tokenizer

try:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer
    from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

    _INSTALLED = True
except ImportError:  # the error message says how to install it
    _INSTALLED = False

_FIELD = "sampling.grammar"
_KEPT = 512  # most compiled grammars kept
_STACK = 256 << 20  # bytes of stack; recursive rules would overflow 8 MiB and end the process
_SECONDS, _SECONDS_PER_TOKEN = 0.05, 0.002  # CPU seconds; most masks take microseconds
_SHOWN = 300


class Matcher:
    """State of one completion in its grammar: `take` its tokens, then `look`, then read the tokens `allowed` next.

    `look` has 50 ms of CPU time in all, and 2 ms more for each token taken.
    """

    def __init__(self, inner: LLMatcher, vocab_size: int, barred: Iterable[int] = ()) -> None:
        """`barred`: tokens that are never allowed."""
        self._inner, self._barred = inner, tuple(barred)
        self._bits = allocate_token_bitmask(1, vocab_size)
        self._current = False  # whether the bits are up to date
        self._left = _SECONDS

    @property
    def allowed(self) -> npt.NDArray[np.int32]:
        """One bit per token, set if the token may come next, [W]. Valid after `look`."""
        bits: npt.NDArray[np.int32] = self._bits[0]
        return bits

    def take(self, token_ids: Sequence[int]) -> bool:
        """Advance by these tokens, which also extends the time that `look` may take; returns False if they violate the
        grammar. Then the next `look` raises."""
        self._current = False
        self._left += _SECONDS_PER_TOKEN * len(token_ids)
        return bool(self._inner.consume_tokens(list(token_ids)))

    def look(self) -> None:
        """Update `allowed` after `take`; does nothing if it is up to date. Raises RefusedRequest if the grammar was
        violated, takes too long, or allows no token."""
        if self._current:
            return
        start = time.thread_time()  # CPU time of this thread, independent of other threads
        fill_next_token_bitmask(self._inner, self._bits)
        for token in self._barred:
            self._bits.view(np.uint32)[0, token // 32] &= ~np.uint32(1 << token % 32)
        self._left -= time.thread_time() - start
        if self._inner.is_error():
            raise _refused(self._inner.get_error())
        if self._left < 0:
            raise _refused("finding the tokens that may follow takes too long")
        if not self._bits.any():
            raise _refused("no token of the vocabulary can go on with it")
        self._current = True


class Grammars:
    """Compiles grammars for one model's tokenizer; thread-safe."""

    def __init__(self, tokenizer: Callable[[], Tokenizer], vocab_size: int) -> None:
        """Prepare; no grammar is compiled yet. `tokenizer` loads the tokenizer; it is called for the first grammar.
        `vocab_size`: number of token ids of the model."""
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    @cached_property
    def problem(self) -> str:
        """Reason why grammars cannot be used with this tokenizer, in words; "" if they can."""
        if not _INSTALLED:
            return "the package llguidance is not installed: pip install 'stretto[grammars]'"
        try:
            if self._vocabulary.eos_tokens:
                return ""
            return "the tokenizer has no end of sequence"
        except (ModelFolderError, ValueError) as error:
            return f"llguidance cannot use the tokenizer: {error}"

    def check(self, text: str, stop_token_ids: Sequence[int]) -> None:
        """Compile a grammar, unless it is among the last 512 compiled, and check that a completion can follow it.
        Raises RefusedRequest if there is a `problem`; the grammar cannot be compiled or followed; or no
        end-of-sequence token, with which a completion ends where its grammar ends, is in `stop_token_ids`."""
        if self.problem:
            raise RefusedRequest(_FIELD, "a grammar", f"none: {self.problem}")
        ends = set(self._vocabulary.eos_tokens)
        if ends.isdisjoint(stop_token_ids):
            allowed = f"one of the ends of sequence {sorted(ends)} among them, with which a text of the grammar ends"
            raise RefusedRequest("sampling.stop_token_ids", str(sorted(stop_token_ids)[:20]), allowed)
        self.matcher(text, stop_token_ids).look()

    def matcher(self, text: str, stop_token_ids: Sequence[int] = ()) -> Matcher:
        """Return a matcher for a new completion that follows the grammar `text`, for which `check` has been called. Of
        the end-of-sequence tokens it allows those in `stop_token_ids`; all if that is empty."""
        barred = set(self._vocabulary.eos_tokens).difference(stop_token_ids) if stop_token_ids else ()
        return Matcher(self._root(text).deep_copy(), self._vocabulary.vocab_size, barred)

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        tokenizer = self._tokenizer()
        size = max(self._vocab_size, max(tokenizer.vocabulary.values()) + 1)
        return LLTokenizer(tokenizer.serialized(), n_vocab=size, eos_token=list(tokenizer.eos_token_ids))

    def _root(self, text: str) -> LLMatcher:
        """Return the compiled grammar: one of the last 512, else compiled now. Raises RefusedRequest if it is too long
        or cannot be compiled."""
        with self._lock:
            if text in self._compiled:
                self._compiled.move_to_end(text)
                return self._compiled[text]
        if len(text) > MOST_GRAMMAR:
            raise _refused(f"it has {len(text):,} characters", f"at most {MOST_GRAMMAR:,}")
        compiled = _on_a_deep_stack(lambda: LLMatcher(self._vocabulary, text, log_level=0, limits=_limits()))
        if compiled.is_error():
            raise _refused(compiled.get_error())
        with self._lock:
            self._compiled[text] = compiled
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        return compiled


def _limits() -> LLParserLimits:
    """Limits for llguidance that allow at most about 50 ms per mask."""
    return LLParserLimits(
        step_lexer_fuel=50_000,
        step_max_items=10_000,
        max_lexer_states=50_000,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )


_STACK_SIZE = threading.Lock()


def _on_a_deep_stack(make: Callable[[], LLMatcher]) -> LLMatcher:
    """Call `make`, which must not raise, in a thread with a large stack, wait for it, and return its result."""
    made: list[LLMatcher] = []
    thread = threading.Thread(target=lambda: made.append(make()), name="a grammar")
    with _STACK_SIZE:
        before = threading.stack_size(_STACK)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()  # the package's limits stop it
    return made[0]


def _refused(why: str, allowed: str = "a grammar that can be followed (docs/how_to/gateway.md)") -> RefusedRequest:
    """Return the error for a refused grammar, with the first part of `why`, which may quote the whole grammar."""
    return RefusedRequest(_FIELD, why.strip().partition("\n<")[0][:_SHOWN], allowed)
