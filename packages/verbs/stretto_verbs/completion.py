"""A completion as `stretto.Engine` returns it: text, tokens, and the numbers that training needs. It carries the *mark*
of its tokenizer, a hash, so that an engine, scheduler or trainer with another tokenizer refuses it."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from stretto.core.errors import DataError, Problem
from stretto.core.records import Batch, Likeliest, Record, Segment, StopReason

if TYPE_CHECKING:  # the import loads transformers, which a scheduler of token ids does not need
    from stretto.model.hf.tokenizer import Tokenizer

AS_RETURNED = "give the completion as the engine returned it"  #: remedy for a completion with impossible numbers
LARGEST_LOGPROB = 1e-3  #: 0, plus a rounding error


class TextCompletion(Record, frozen=True):
    """One sampled completion. `text`: without special tokens. `logprobs`: log-probability of each token under the
    distribution that it was sampled from. `versions`: of the weights, one for each token. `interrupted`: number of
    updates meanwhile.

    Example::

        completion = stretto.Engine.load("model").generate("3+4=", max_tokens=8)[0]
        assert len(completion.token_ids) == len(completion.logprobs)
        print(completion.text, completion.stop_reason, completion.versions)
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop_reason: str  # "stop": it ended with a stop token or text; "length": it was cut off at max_tokens
    versions: tuple[int, ...] = ()
    interrupted: int = 0
    top_logprobs: tuple[Likeliest, ...] = ()  # most likely tokens at each position, if they were requested
    tokenizer: str = ""  # mark of the engine's tokenizer; "": not known
    constrained: bool = False  # sampled under a grammar, which no trainer knows: it cannot be trained on

    @property
    def segment(self) -> Segment:
        """The completion as a segment of a trajectory."""
        reason = StopReason(self.stop_reason)
        return Segment.of(self.token_ids, self.logprobs, self.versions, self.interrupted, reason)


class _MarkedBatch(Batch, frozen=True):
    """A batch with the mark of its tokenizer."""

    tokenizer: str = ""


def marked(batch: Batch, mark: str) -> Batch:
    """Return a copy of the batch that carries the mark of its tokenizer."""
    columns = {name: getattr(batch, name) for name in batch.__struct_fields__}
    return _MarkedBatch(**{**columns, "tokenizer": mark})


def mark_on(batch: Batch) -> str:
    """Return the mark (`mark_of`) of the tokenizer of a batch; "": not known."""
    return batch.tokenizer if isinstance(batch, _MarkedBatch) else ""


def mark_of(tokenizer: Tokenizer) -> str:
    """Compute the mark of a tokenizer: a hash of its vocabulary, in hexadecimal digits."""
    vocabulary = json.dumps(sorted(tokenizer.vocabulary.items()))
    return hashlib.blake2b(vocabulary.encode(), digest_size=16).hexdigest()


def check_numbers(turn: TextCompletion, mark: str, place: str) -> None:
    """Check the numbers of a completion, and that it was sampled without a grammar and with the tokenizer of the
    prompts.

    Args:
        mark: of that tokenizer (`mark_of`). "": not known; then tokenizers are not compared, nor if the completion has
            no mark.
        place: name of the argument, for messages.

    Raises:
        DataError: a log-probability is above 0 (0.001 for rounding) or NaN, a token id or version is negative, the
            tokenizer is another one, or a grammar constrained the sampling.
    """
    if turn.constrained:
        told = "was sampled under a grammar, so its log-probabilities are not those that the trainer computes"
        raise DataError([Problem(place, told, "sample what is trained on without one")])
    if odd := [one for one in turn.logprobs if not one <= LARGEST_LOGPROB]:  # also finds NaN
        raise DataError([Problem(place, f"a log-probability of {odd[0]}", AS_RETURNED)])
    if min(turn.token_ids, default=0) < 0 or min(turn.versions, default=0) < 0:
        raise DataError([Problem(place, "a negative token or version", AS_RETURNED)])
    if mark and turn.tokenizer not in ("", mark):
        told = "was sampled with another tokenizer than that of the prompts"
        raise DataError([Problem(place, told, "give tokenizer=engine.tokenizer to the scheduler")])
