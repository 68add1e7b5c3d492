"""Checks of a request before an engine accepts it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from stretto.core.engine import (
    COLDEST,
    LONGEST_STOP,
    MOST_COMPLETIONS,
    MOST_INTERRUPTIONS,
    MOST_LIKELIEST,
    MOST_STOP_TOKENS,
    MOST_STOPS,
)
from stretto.core.errors import RefusedRequest
from stretto.core.records import GenerateRequest, Sampling, Segment
from stretto.doors.mistakes import shown
from stretto.engine.text import NO_CHARACTER
from stretto.model.hf.grammar import Grammars

_GRAMMAR = "sampling.grammar"
_LARGEST_FLOAT = 3.4e38  # completions keep log-probabilities in float32


class BrokenGrammar(Exception):
    """The grammar of a running request cannot be followed further; `refused` is the reason."""

    def __init__(self, request: str, refused: RefusedRequest) -> None:
        """`request`: id of the request; `refused`: the reason."""
        self.request, self.refused = request, refused
        super().__init__(request, refused)


def check_text(text: Sequence[int], field: str, vocab_size: int, context_length: int) -> None:
    """Refuse a text (token ids) that the model cannot read. `field`: name of the text in the error. Raises
    RefusedRequest if it is empty, longer than the context, or has tokens outside the vocabulary."""
    if not 1 <= len(text) <= context_length:
        raise RefusedRequest(field, f"{len(text)} tokens", f"1 to {context_length}, the context")
    if outside := [token for token in text if not 0 <= token < vocab_size]:
        raise RefusedRequest(field, f"token {shown(outside[0])}", f"0 to {vocab_size - 1}, the vocabulary")


def check_grammar(request: GenerateRequest, grammars: Grammars | None) -> None:
    """Refuse the grammar of a request (which must have one) if it cannot be compiled or followed, and prefixes that do
    not follow it. `grammars`: compiles it; None: every grammar is refused. Raises RefusedRequest, which names the first
    wrong field."""
    sampling = request.sampling
    if grammars is None:
        raise RefusedRequest(_GRAMMAR, "a grammar", "none: this engine has no tokenizer")
    grammars.check(sampling.grammar, sampling.stop_token_ids)
    for prefix in request.prefixes:
        if prefix.length and not grammars.matcher(sampling.grammar).take(prefix.token_ids):
            raise RefusedRequest("prefixes", "tokens that the grammar does not allow", "tokens that follow it")


def check_request(request: GenerateRequest, vocab_size: int, context_length: int) -> None:
    """Refuse a request that a model of this vocabulary size and context length cannot generate, or with invalid
    sampling settings. Raises RefusedRequest, which names the first wrong field."""
    prompt, sampling = request.prompt_token_ids, request.sampling
    _check_counts(request)
    outside = [token for token in (*prompt, *sampling.stop_token_ids) if not 0 <= token < vocab_size]
    wrong_seeds = [seed for seed in request.seeds if not 0 <= seed < 1 << 64]
    if not prompt:
        raise RefusedRequest("prompt_token_ids", "no token", "at least one")
    if len(prompt) >= context_length:
        allowed = f"at most {context_length - 1}, so that the context of {context_length} has room for a completion"
        raise RefusedRequest("prompt_token_ids", f"{len(prompt)} tokens", allowed)
    if outside:
        field = "prompt_token_ids" if outside[0] in prompt else "sampling.stop_token_ids"
        raise RefusedRequest(field, f"token {shown(outside[0])}", f"0 to {vocab_size - 1}, the vocabulary")
    if not request.seeds or wrong_seeds:
        found = f"{wrong_seeds[0]}" if wrong_seeds else "no seed"
        raise RefusedRequest("seeds", found, "one seed of 0 to 2**64 - 1 for each completion")
    if not 0 <= request.top_logprobs <= MOST_LIKELIEST:
        raise RefusedRequest("top_logprobs", str(request.top_logprobs), f"0 to {MOST_LIKELIEST}; 0 for none")
    _check_sampling(sampling, vocab_size)


def _check_counts(request: GenerateRequest) -> None:
    """Raise RefusedRequest for a request with so many stop tokens or completions that it could take all memory or
    time."""
    if (stops := len(request.sampling.stop_token_ids)) > MOST_STOP_TOKENS:
        raise RefusedRequest("sampling.stop_token_ids", f"{stops:,} tokens", f"at most {MOST_STOP_TOKENS}")
    if (completions := len(request.seeds)) > MOST_COMPLETIONS:
        raise RefusedRequest(
            "seeds", f"{completions:,} seeds", f"at most {MOST_COMPLETIONS:,} completions to one request"
        )


def check_prefixes(request: GenerateRequest, vocab_size: int, context_length: int, version: int) -> None:
    """Refuse prefixes that no engine of this model can have sampled up to `version`; call `check_request` first. Raises
    RefusedRequest, which names the first wrong field."""
    left = min(request.sampling.max_tokens, context_length - len(request.prompt_token_ids))
    if request.prefixes and len(request.prefixes) != len(request.seeds):
        allowed = "none, or one for each seed"
        raise RefusedRequest("prefixes", f"{len(request.prefixes)} prefixes for {len(request.seeds)} seeds", allowed)
    for prefix in request.prefixes:
        tokens = prefix.length
        if not prefix.intact:
            raise RefusedRequest("prefixes", "tokens whose checksum does not fit", "tokens as they were sampled")
        if tokens and not prefix.sampled:
            raise RefusedRequest("prefixes", f"{tokens} tokens", "as many log-probabilities and versions")
        if tokens > left:
            allowed = f"at most {left}, which max_tokens and the context of {context_length} leave"
            raise RefusedRequest("prefixes", f"{tokens} tokens", allowed)
        if outside := [token for token in prefix.token_ids if not 0 <= token < vocab_size]:
            raise RefusedRequest("prefixes", f"token {shown(outside[0])}", f"0 to {vocab_size - 1}, the vocabulary")
        _check_stamps(prefix, version)


def _check_stamps(prefix: Segment, version: int) -> None:
    """Raise RefusedRequest for a prefix with impossible log-probabilities, versions or interruptions."""
    if wrong := [logprob for logprob in prefix.behavior_logprobs if not abs(logprob) < _LARGEST_FLOAT]:
        raise RefusedRequest("prefixes.behavior_logprobs", f"{wrong[0]}", "finite numbers")
    stamps = [stamp for stamp, _ in prefix.stamps]
    if outside := [stamp for stamp in stamps if not 0 <= stamp <= version]:
        raise RefusedRequest("prefixes.versions", f"version {outside[0]}", f"0 to {version}, the version in use")
    if stamps != sorted(stamps):
        raise RefusedRequest("prefixes.versions", "a version after a newer one", "versions that never decrease")
    if not 0 <= prefix.interrupted <= MOST_INTERRUPTIONS:
        raise RefusedRequest("prefixes.interrupted", f"{prefix.interrupted}", f"0 to {MOST_INTERRUPTIONS:,}")


def _check_sampling(sampling: Sampling, vocab_size: int) -> None:
    if sampling.max_tokens < 1:
        raise RefusedRequest("sampling.max_tokens", str(sampling.max_tokens), "at least 1")
    warm = COLDEST <= sampling.temperature < math.inf
    if sampling.temperature != 0 and not warm:
        raise RefusedRequest("sampling.temperature", str(sampling.temperature), f"0, or at least {COLDEST}")
    if not 0 < sampling.top_p <= 1:
        raise RefusedRequest("sampling.top_p", str(sampling.top_p), "greater than 0, at most 1; 1 keeps all tokens")
    if not 0 <= sampling.top_k <= vocab_size:
        raise RefusedRequest("sampling.top_k", str(sampling.top_k), f"0 to {vocab_size}, the vocabulary; 0 keeps all")
    if not 0 <= sampling.min_p <= 1:
        raise RefusedRequest("sampling.min_p", str(sampling.min_p), "0 to 1; 0 keeps all tokens")
    if len(sampling.stop) > MOST_STOPS:
        raise RefusedRequest("sampling.stop", f"{len(sampling.stop)} texts", f"at most {MOST_STOPS}")
    for text in sampling.stop:
        if not 1 <= len(text) <= LONGEST_STOP:
            raise RefusedRequest("sampling.stop", f"a text of {len(text)} characters", f"1 to {LONGEST_STOP}")
        if NO_CHARACTER in text:
            raise RefusedRequest("sampling.stop", repr(text)[:80], "characters; U+FFFD replaces invalid bytes")
