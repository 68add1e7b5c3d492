"""A completion as text, and as tokens with the numbers that a trainer needs of them; and the mark of its tokenizer, by
which parts with another one refuse it."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from stretto.core.records import Batch, Likeliest, Record, Segment, StopReason

if TYPE_CHECKING:  # which loads transformers; a scheduler of token ids needs none
    from stretto.model.hf.tokenizer import Tokenizer


class TextCompletion(Record, frozen=True):
    """What followed a prompt; `text` is without special tokens, `logprobs` are of the distribution sampled from.

    Example::

        completion = stretto.Engine.load("model").generate("3+4=", max_tokens=8)[0]
        assert len(completion.token_ids) == len(completion.logprobs)
        print(completion.text, completion.stop_reason, completion.versions)
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop_reason: str  # "stop": it came to its end; "length": it was cut off
    versions: tuple[int, ...] = ()  # of the weights that sampled each token
    interrupted: int = 0  # times that weights were changed meanwhile
    top_logprobs: tuple[Likeliest, ...] = ()  # likeliest tokens at each place, where they were asked for
    tokenizer: str = ""  # the mark of the engine's tokenizer; "": not known

    @property
    def segment(self) -> Segment:
        """It as a part of a trajectory."""
        reason = StopReason(self.stop_reason)
        return Segment.of(self.token_ids, self.logprobs, self.versions, self.interrupted, reason)


class _MarkedBatch(Batch, frozen=True):
    """A batch, and the mark of the tokenizer of its tokens."""

    tokenizer: str = ""


def marked(batch: Batch, mark: str) -> Batch:
    """The batch with the mark of the tokenizer of its tokens."""
    columns = {name: getattr(batch, name) for name in batch.__struct_fields__}
    return _MarkedBatch(**{**columns, "tokenizer": mark})


def mark_on(batch: Batch) -> str:
    """The mark of the tokenizer of a batch; "": not known."""
    return batch.tokenizer if isinstance(batch, _MarkedBatch) else ""


def mark_of(tokenizer: Tokenizer) -> str:
    """A text that is the same for tokenizers with the same vocabulary, and another one for others."""
    vocabulary = json.dumps(sorted(tokenizer.vocabulary.items()))
    return hashlib.blake2b(vocabulary.encode(), digest_size=16).hexdigest()
