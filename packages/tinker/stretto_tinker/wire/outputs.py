"""Results of forward passes and of sampling, and their encoding as the SDK's protobuf messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from stretto_tinker.wire import schema
from stretto_tinker.wire.datums import FLOAT32

_STOP, _LENGTH = 0, 1
_INT32 = 3

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Computed:
    """Result of a forward pass: log-probabilities of each datum's targets, [N] or [N, K], in the order of the data; and
    metrics of all data together, by name."""

    logprobs: Sequence[Floats]
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Likeliest:
    """The K likeliest tokens at each of N positions, the likeliest first, and their log-probabilities; both [N, K].
    Empty entries hold token 0 and log-probability -99999."""

    token_ids: NDArray[np.int32]
    logprobs: Floats


@dataclass(frozen=True)
class SampledTokens:
    """One sampled sequence. `logprobs`: one for each token. `stopped`: by a stop text or token, not by its limit of
    tokens. `likeliest`: at each sampled position; None: not requested."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    stopped: bool
    likeliest: Likeliest | None = None


@dataclass(frozen=True)
class Sampled:
    """Result of a request for samples. The fields about the prompt (of P tokens) are None unless requested:
    `prompt_logprobs` [P], NaN for positions that were not scored; `target_logprobs` [P - 1, K], of the requested
    tokens; `drawn` [P - 1, K], tokens drawn at each prompt position."""

    sequences: Sequence[SampledTokens]
    prompt_logprobs: Floats | None = None
    prompt_likeliest: Likeliest | None = None
    target_logprobs: Floats | None = None
    drawn: Likeliest | None = None


def encode_computed(computed: Computed) -> bytes:
    """Encode the result of a forward pass as a ``ForwardBackwardOutput``. Consecutive arrays with the same number of
    targets per position share one record of the message."""
    message = schema.new("ForwardBackwardOutput")
    message.loss_fn_output_type = "ArrayRecord"
    for name, number in computed.metrics.items():
        message.metrics.add(key=name, value=float(number))
    for trailing, run in groupby(computed.logprobs, key=lambda array: array.shape[1:]):
        part = [np.ascontiguousarray(array, np.float32) for array in run]
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(part))
        named = record.fields.add(key="logprobs")
        named.value.data = b"".join(array.tobytes() for array in part)
        named.value.offsets = np.cumsum([0, *(array.nbytes for array in part)], dtype=np.int64).tobytes()
        named.value.dtype = FLOAT32
        named.value.trailing_shape.extend(trailing)
    return cast(bytes, message.SerializeToString())


def encode_sampled(sampled: Sampled) -> bytes:
    """Encode the result of a request for samples as a ``SampleResponse``: the sequences, and what was requested of the
    prompt. Its count of cached tokens is always 0."""
    message = schema.new("SampleResponse")
    for sequence in sampled.sequences:
        added = message.sequences.add(
            stop_reason=_STOP if sequence.stopped else _LENGTH,
            tokens=np.asarray(sequence.token_ids, np.int32).tobytes(),
            logprobs=np.asarray(sequence.logprobs, np.float32).tobytes(),
        )
        if sequence.likeliest is not None:
            _fill_likeliest(added.topk_sampled_logprobs, sequence.likeliest)
    if sampled.prompt_logprobs is not None:
        message.prompt_logprobs = sampled.prompt_logprobs.astype(np.float32).tobytes()
    if sampled.prompt_likeliest is not None:
        _fill_likeliest(message.topk_prompt_logprobs, sampled.prompt_likeliest)
    if sampled.target_logprobs is not None:
        _fill_tensor(message.target_prompt_logprobs, sampled.target_logprobs, FLOAT32)
    if sampled.drawn is not None:
        _fill_tensor(message.prompt_alt_tokens.tokens, sampled.drawn.token_ids, _INT32)
        _fill_tensor(message.prompt_alt_tokens.logprobs, sampled.drawn.logprobs, FLOAT32)
    message.prompt_cache_hit_tokens = 0  # they are not counted
    return cast(bytes, message.SerializeToString())


def _fill_likeliest(message: Any, likeliest: Likeliest) -> None:
    message.length, message.k = likeliest.token_ids.shape
    message.token_ids = np.ascontiguousarray(likeliest.token_ids, np.int32).tobytes()
    message.logprobs = np.ascontiguousarray(likeliest.logprobs, np.float32).tobytes()


def _fill_tensor(message: Any, array: NDArray[Any], dtype: int) -> None:
    message.dense = np.ascontiguousarray(array).tobytes()
    message.dtype = dtype
    message.shape.extend(array.shape)
