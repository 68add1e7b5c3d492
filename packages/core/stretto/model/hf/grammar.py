"""Which tokens may come next, so that a completion follows a grammar (`Sampling.grammar`): by llguidance, an extra.

    text ─► compiled, once ─► Matcher of each completion: tokens so far ─► bits of the tokens that may follow

What may follow is a function of grammar and tokens alone. So a completion that is interrupted, or continued by another
engine, follows its grammar by its tokens: nothing else is kept of it.

A grammar comes from strangers. Its compilation and each of its masks are bounded (`_LIMITS`), the compilation recurses
on a stack of its own, and a grammar whose masks take too long is refused.

Axes: W words of 32 tokens.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
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
except ImportError:  # the message says how to have it
    _INSTALLED = False

_FIELD = "sampling.grammar"
_KEPT = 512  # compiled grammars
_STACK = 256 << 20  # bytes; rules that name each other are compiled by recursion, which in 8 MiB ends the process
_SECONDS, _SECONDS_PER_TOKEN = 0.05, 0.002  # of a processor; most masks take some microseconds
_SHOWN = 300


class Matcher:
    """The grammar of one completion, and how far its tokens have come."""

    def __init__(self, inner: LLMatcher, vocab_size: int) -> None:
        self._inner = inner
        self._bits = allocate_token_bitmask(1, vocab_size)
        self._current = False  # whether the bits are those of the next token
        self._left = _SECONDS

    @property
    def allowed(self) -> npt.NDArray[np.int32]:
        """[W] a bit for each token, set if it may come next; after `look`."""
        bits: npt.NDArray[np.int32] = self._bits[0]
        return bits

    def take(self, token_ids: Sequence[int]) -> bool:
        """The completion has these tokens more; whether they follow the grammar. If not, `look` refuses it."""
        self._current = False
        self._left += _SECONDS_PER_TOKEN * len(token_ids)
        return bool(self._inner.consume_tokens(list(token_ids)))

    def look(self) -> None:
        """Bring `allowed` up to date.

        Raises:
            RefusedRequest: the grammar is too complex, or no token may follow.
        """
        if self._current:
            return
        start = time.thread_time()  # of this thread alone: what runs beside it is not the grammar's fault
        fill_next_token_bitmask(self._inner, self._bits)
        self._left -= time.thread_time() - start
        if self._inner.is_error():
            raise _refused(self._inner.get_error())
        if self._left < 0:
            raise _refused("finding the tokens that may follow takes too long")
        if not self._bits.any():
            raise _refused("no token of the vocabulary can go on with it")
        self._current = True


class Grammars:
    """Compiles grammars for the tokenizer of one model; any thread may."""

    def __init__(self, tokenizer: Callable[[], Tokenizer], vocab_size: int) -> None:
        """`tokenizer` is called by the first grammar; `vocab_size` is that of the model."""
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    @cached_property
    def problem(self) -> str:
        """Why no grammar is served; empty if they are."""
        if not _INSTALLED:
            return "the package llguidance is not installed: pip install 'stretto[grammars]'"
        try:
            if self._vocabulary.eos_tokens:
                return ""
            return "the tokenizer has no end of sequence"
        except (ModelFolderError, ValueError) as error:
            return f"llguidance cannot use the tokenizer: {error}"

    def check(self, text: str, stop_token_ids: Sequence[int]) -> None:
        """Compile a grammar, if it is a new one.

        Raises:
            RefusedRequest: it cannot be compiled or followed, or its end would not end the completion.
        """
        if self.problem:
            raise RefusedRequest(_FIELD, "a grammar", f"none: {self.problem}")
        ends = set(self._vocabulary.eos_tokens)
        if not ends <= set(stop_token_ids):
            allowed = f"the ends of sequence {sorted(ends)} among them, with which a text of the grammar ends"
            raise RefusedRequest("sampling.stop_token_ids", str(sorted(stop_token_ids)[:20]), allowed)
        self.matcher(text).look()

    def matcher(self, text: str) -> Matcher:
        """A grammar that `check` has passed, before the first token of a completion."""
        return Matcher(self._root(text).deep_copy(), self._vocabulary.vocab_size)

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        tokenizer = self._tokenizer()
        size = max(self._vocab_size, max(tokenizer.vocabulary.values()) + 1)
        return LLTokenizer(tokenizer.serialized(), n_vocab=size, eos_token=list(tokenizer.eos_token_ids))

    def _root(self, text: str) -> LLMatcher:
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
    """A twentieth of a second for most that a mask may take, by the package's own numbers."""
    return LLParserLimits(
        step_lexer_fuel=50_000,
        step_max_items=10_000,
        max_lexer_states=50_000,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )


_STACK_SIZE = threading.Lock()


def _on_a_deep_stack(make: Callable[[], LLMatcher]) -> LLMatcher:
    made: list[LLMatcher] = []
    thread = threading.Thread(target=lambda: made.append(make()), name="a grammar")
    with _STACK_SIZE:
        before = threading.stack_size(_STACK)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()  # the limits of the package end it
    return made[0]


def _refused(why: str, allowed: str = "a grammar that can be followed (docs/how_to/gateway.md)") -> RefusedRequest:
    return RefusedRequest(_FIELD, why.strip().partition("\n<")[0][:_SHOWN], allowed)
