"""Data of a training request: sequences of tokens, each with the arrays that its loss reads."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stretto.core.errors import RefusedRequest, nearest
from stretto_tinker.wire import schema

Array = NDArray[Any]
FLOAT32, INT64 = 1, 2
_DTYPES: dict[int, np.dtype[Any]] = {FLOAT32: np.dtype(np.float32), INT64: np.dtype(np.int64)}
_INT64 = np.dtype(np.int64)
#: Most targets of one sequence; each takes a row of hidden state, which is kept for the backward pass.
_MOST_TARGETS = 1 << 19
#: Most elements of all sparse arrays of a request. A body of a few bytes could otherwise request arrays of any size.
_MOST_CELLS = 1 << 22
_SEQ = re.compile(rb"\x10[\x80-\xff]{0,4}[\x00-\x7f]")  # the field 2, a number


@dataclass(frozen=True)
class Datum:
    """One sequence to train on. Position i of `tokens` [N] predicts row i of ``inputs["target_tokens"]``. The other
    inputs are arrays that the loss reads, in the shape of the targets: [N], or [N, K] for several targets a position.
    """

    tokens: NDArray[np.int64]
    inputs: Mapping[str, Array]

    @property
    def targets(self) -> Array:
        return self.inputs["target_tokens"]

    @property
    def width(self) -> int:
        """Number of targets per position."""
        return self.targets.shape[1] if self.targets.ndim == 2 else 1


@dataclass(frozen=True)
class _Job:
    """A decoded request for a forward pass (`forward_only`), or a forward and a backward pass. `seq_id`: number of the
    request for its model. `loss`: name of the loss. `config`: its settings, as the client sent them. `data`: protobuf
    messages `Datum`."""

    model_id: str
    seq_id: int
    loss: str
    config: Mapping[str, float | str]
    forward_only: bool
    data: tuple[Any, ...]

    def datums(self) -> list[Datum]:
        """Decode the sequences.

        Raises:
            RefusedRequest: there are none, one is invalid, or sparse arrays are too large; names the datum and its
                field.
        """
        if not self.data:
            raise RefusedRequest("data", "no datum", "at least one")
        sparse = 0
        for at, message in enumerate(self.data):
            for pair in message.loss_fn_inputs:
                if pair.value.HasField("sparse_csr"):
                    sparse += math.prod(max(size, 0) for size in pair.value.shape)
            if sparse > _MOST_CELLS:
                told = f"sparse arrays of {sparse:,} cells up to here"
                raise RefusedRequest(f"data[{at}]", told, f"at most {_MOST_CELLS:,} cells in a request")
        return [_datum(message, f"data[{at}]") for at, message in enumerate(self.data)]


def parse_job(raw: bytes) -> _Job:
    """Decode the protobuf body of a training request. Its data are decoded later, by `_Job.datums`.

    Raises:
        RefusedRequest: the body is not such a message.
    """
    message = schema.parse("ForwardBackwardRequest", raw)
    config: dict[str, float | str] = {pair.key: pair.value for pair in message.loss_fn_config}
    for pair in message.loss_fn_config_v2:
        config[pair.key] = pair.value.text if pair.value.HasField("text") else pair.value.number
    return _Job(
        message.model_id, message.seq_id, message.loss_fn, config, bool(message.forward_only), tuple(message.data)
    )


def numbered(raw: bytes) -> bytes:
    """Cut the body of a training request behind model and number, with which the SDK's bodies begin; b"" if it does not
    begin so. What is left is such a body too, without data."""
    if len(raw) < 2 or raw[:1] != b"\n":  # the field 1, of fewer than 128 bytes; then the field 2
        return b""
    found = _SEQ.match(raw, 2 + raw[1])
    return raw[: found.end()] if found else b""


def ends_forward_only(tail: bytes) -> bool:
    """Whether the end of a training request's body says that it is `forward_only`. False if it holds less than the
    fields behind the data, which begin with the loss."""
    at = len(tail)
    while (at := tail.rfind(b'"', 0, at)) >= 0:  # the field 4
        with suppress(RefusedRequest):
            job = parse_job(tail[at:])
            if job.loss.isidentifier() and not (job.data or job.model_id or job.seq_id):
                return job.forward_only
    return False


def _datum(message: Any, place: str) -> Datum:
    """Decode a message `Datum`; RefusedRequest if it is invalid. `place`: its field in the request, for errors."""
    parts: list[Array] = []
    for at, chunk in enumerate(message.model_input):
        if not chunk.HasField("encoded_text"):
            kind = "image" if chunk.HasField("image") else "dmel" if chunk.HasField("dmel") else "empty"
            allowed = "encoded_text: the models served here read text alone"
            raise RefusedRequest(f"{place}.model_input[{at}]", f"a chunk of the kind {kind}", allowed)
        parts.append(_numbers(chunk.encoded_text.tokens, np.dtype(np.int32), f"{place}.model_input[{at}]"))
    tokens = np.concatenate(parts).astype(np.int64) if parts else np.empty(0, np.int64)
    inputs = {pair.key: _array(pair.value, f"{place}.{pair.key}") for pair in message.loss_fn_inputs}
    return Datum(tokens, inputs)


def _array(message: Any, place: str) -> Array:
    """Decode an array to a dense one; RefusedRequest if it is invalid. `place`: its field, for errors."""
    dtype = _DTYPES.get(message.dtype)
    if dtype is None:
        raise RefusedRequest(place, f"numbers of the type {message.dtype}", "float32 (1) or int64 (2)")
    shape = tuple(message.shape)
    if any(size < 0 for size in shape):
        raise RefusedRequest(place, f"the shape {shape}", "sizes of 0 or more")
    if message.HasField("sparse_csr"):
        return _dense(message.sparse_csr, dtype, shape, place)
    flat = _numbers(message.dense, dtype, place)
    if shape and math.prod(shape) != len(flat):
        raise RefusedRequest(place, f"{len(flat)} numbers for the shape {shape}", f"{math.prod(shape)} numbers")
    return flat.reshape(shape) if shape else flat


def _dense(csr: Any, dtype: np.dtype[Any], shape: tuple[int, ...], place: str) -> Array:
    """Convert a sparse array in CSR format to a dense one; elements that it does not list are 0. Raises RefusedRequest
    for indices that do not fit together, and for a shape without two axes. `place`: for messages."""
    if len(shape) != 2:
        raise RefusedRequest(place, f"a sparse array of the shape {shape}", "two axes")
    values = _numbers(csr.values, dtype, place)
    rows, columns = (_numbers(part, _INT64, place) for part in (csr.crow_indices, csr.col_indices))
    whole = (
        len(rows) == shape[0] + 1
        and len(columns) == len(values)
        and rows[0] == 0
        and rows[-1] == len(values)
        and bool((np.diff(rows) >= 0).all())
        and (not len(columns) or 0 <= columns.min() <= columns.max() < shape[1])
    )
    if not whole:
        raise RefusedRequest(place, "a sparse array whose indices do not fit together", "rows and columns in order")
    dense: Array = np.zeros(shape, dtype)
    dense[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = values
    return dense


def _numbers(raw: bytes, dtype: np.dtype[Any], place: str) -> Array:
    if len(raw) % dtype.itemsize:
        raise RefusedRequest(place, f"{len(raw)} bytes", f"a multiple of {dtype.itemsize}, the size of {dtype}")
    return np.frombuffer(raw, dtype)


def check(datums: Sequence[Datum], takes: Mapping[str, bool], vocabulary: int, context: int, *, several: bool) -> None:
    """Check that a loss can be computed on all data.

    Args:
        takes: names of the inputs that the loss reads, each with whether it is required.
        vocabulary: number of tokens of the model.
        context: most tokens of a sequence.
        several: whether a position may have several targets.

    Raises:
        RefusedRequest: names the first wrong datum and field, its value, and what is allowed.
    """
    for at, datum in enumerate(datums):
        place = f"data[{at}]"
        length = len(datum.tokens)
        if not 1 <= length <= context:
            raise RefusedRequest(f"{place}.model_input", f"{length} tokens", f"1 to {context}, the context")
        _check_ids(f"{place}.model_input", datum.tokens, vocabulary)
        for name in datum.inputs:
            if name not in takes:
                raise RefusedRequest(f"{place}.{name}", "an input that this loss does not read", nearest(name, takes))
        for name, needed in takes.items():
            if needed and name not in datum.inputs:
                raise RefusedRequest(f"{place}.{name}", "missing", f"the loss needs it, of the shape ({length},)")
        _check_inputs(datum, place, vocabulary, several=several)


def _check_inputs(datum: Datum, place: str, vocabulary: int, *, several: bool) -> None:
    length = len(datum.tokens)
    targets = datum.inputs["target_tokens"]
    shape = targets.shape
    if not (shape == (length,) or (several and len(shape) == 2 and shape[0] == length and shape[1] > 0)):
        allowed = f"({length},), one for each input token" + (f", or ({length}, K)" if several else "")
        raise RefusedRequest(f"{place}.target_tokens", f"the shape {shape}", allowed)
    if targets.size > _MOST_TARGETS:
        told = f"{targets.size:,} targets"
        raise RefusedRequest(f"{place}.target_tokens", told, f"at most {_MOST_TARGETS:,} for a sequence")
    if targets.dtype != np.int64:
        raise RefusedRequest(f"{place}.target_tokens", f"numbers of the type {targets.dtype}", "int64")
    _check_ids(f"{place}.target_tokens", targets, vocabulary)
    for name, array in datum.inputs.items():
        if name == "target_tokens":
            continue
        if array.shape != shape:
            raise RefusedRequest(f"{place}.{name}", f"the shape {array.shape}", f"{shape}, as target_tokens")
        if not bool(np.isfinite(array).all()):
            raise RefusedRequest(f"{place}.{name}", "a number that is NaN or infinite", "finite numbers")


def _check_ids(place: str, ids: Array, vocabulary: int) -> None:
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocabulary:
        outside = ids[(ids < 0) | (ids >= vocabulary)].ravel()[0]
        raise RefusedRequest(place, f"token {outside}", f"0 to {vocabulary - 1}, the vocabulary")
