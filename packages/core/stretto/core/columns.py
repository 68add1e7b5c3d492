"""The tokens of a segment as bytes: token ids (int32), then log-probabilities (float32, or float64 where float32 would
lose digits), both little-endian. Given tokens have no log-probabilities.

They are packed where they were sampled, and pass as these bytes through the conductor, into the ledger and to the
trainer. The readers are `ids_of` and `logprobs_of`; the writers of engines pack NumPy arrays themselves.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby
from typing import TypeVar

import msgspec
import xxhash

Value = TypeVar("Value")

#: Run-length encoding of one value per token: (value, number of consecutive tokens) pairs in the order of the tokens.
Counted = tuple[tuple[Value, int], ...]

#: Run-length encoded versions of tokens: ``((6, 2), (7, 1))`` stands for (6, 6, 7).
Stamps = Counted[int]

_ID, _SINGLE, _DOUBLE = 4, 4, 8  # bytes
_encode = msgspec.msgpack.Encoder().encode

assert sys.byteorder == "little", "columns are read as they lie in memory"


def pack(token_ids: Sequence[int], logprobs: Sequence[float]) -> bytes:
    """Pack token ids and their log-probabilities (empty for given tokens, which were not sampled) into bytes.

    >>> ids_of(pack((4, 2), (-0.5, -0.25)), 2), logprobs_of(pack((4, 2), (-0.5, 0.1)), 2)
    ((4, 2), (-0.5, 0.1))

    Raises:
        ValueError: there are log-probabilities, but not one per token.
        OverflowError: a token id has more than 31 bits.
    """
    if len(logprobs) not in (0, len(token_ids)):
        raise ValueError(f"{len(token_ids)} tokens have {len(logprobs)} log-probabilities")
    single = array("f", logprobs)
    exact = single if single.tolist() == list(logprobs) else array("d", logprobs)
    return array("i", token_ids).tobytes() + exact.tobytes()


def ids_of(columns: bytes, length: int) -> tuple[int, ...]:
    """Unpack the token ids from packed `columns` of `length` tokens."""
    return tuple(memoryview(columns)[: _ID * length].cast("i"))


def view_of_ids(columns: bytes, length: int) -> memoryview:
    """The token ids of packed `columns` of `length` tokens as a view of these bytes (int32), without a copy."""
    return memoryview(columns)[: _ID * length].cast("i")


def logprobs_of(columns: bytes, length: int) -> tuple[float, ...]:
    """Unpack the log-probabilities (nats) from packed `columns` of `length` tokens; empty if the tokens are given, not
    sampled."""
    return tuple(memoryview(columns)[_ID * length :].cast("d" if _width(columns, length) == _DOUBLE else "f"))


def are_whole(columns: bytes, length: int, stamps: Stamps) -> bool:
    """Whether `columns` has exactly the size of `length` tokens. With `stamps` (sampled tokens) it must hold their
    log-probabilities too, and `stamps` one version per token; without `stamps` (given tokens), only token ids."""
    stamped = stamps[0][1] if len(stamps) == 1 else sum([count if count > 0 else length + 1 for _, count in stamps])
    wide = len(columns) in ((_ID + _SINGLE) * length, (_ID + _DOUBLE) * length)
    return (wide and stamped == length > 0) if stamps else len(columns) == _ID * length


def rest(columns: bytes, length: int, begin: int) -> bytes:
    """The packed `columns` of `length` tokens, without the first `begin` tokens."""
    width = _width(columns, length)
    return columns[_ID * begin : _ID * length] + columns[_ID * length + width * begin :]


def joined(pieces: Sequence[tuple[bytes, int]]) -> bytes:
    """Join the packed columns of consecutive pieces, given as (columns, length), to the columns of all tokens.
    Log-probabilities become float64 if the pieces differ in precision."""
    pieces = [piece for piece in pieces if piece[1]]
    if len(pieces) == 1:
        return pieces[0][0]
    widths = {_width(*piece) for piece in pieces}
    ids = [columns[: _ID * length] for columns, length in pieces]
    if len(widths) <= 1:
        return b"".join(ids + [columns[_ID * length :] for columns, length in pieces])
    return b"".join([*ids, *(array("d", logprobs_of(*piece)).tobytes() for piece in pieces)])


def begin_alike(columns: bytes, length: int, prefix: bytes, tokens: int) -> bool:
    """Whether the packed `columns` of `length` tokens begin with the ids of all `tokens` tokens of the packed `prefix`;
    False if `columns` is shorter."""
    return tokens <= length and columns[: _ID * tokens] == prefix[: _ID * tokens]


def checksum(columns: bytes, length: int, stamps: Stamps) -> int:
    """XXH3 checksum (64 bits) of tokens with their log-probabilities and versions; 0 if there are no tokens."""
    if not length:
        return 0
    hashed = xxhash.xxh3_64(_encode((length, stamps)))
    hashed.update(columns)
    return hashed.intdigest()


def stamps_of(versions: Iterable[int]) -> Stamps:
    """Run-length encode the version of each token.

    >>> stamps_of((6, 6, 7))
    ((6, 2), (7, 1))
    """
    return tuple([(version, len([*alike])) for version, alike in groupby(versions)])


def versions_of(stamps: Stamps) -> tuple[int, ...]:
    """The version of each token: the inverse of `stamps_of`."""
    return tuple([version for version, count in stamps for _ in range(count)])


def after(counted: Counted[Value], tokens: int) -> Counted[Value]:
    """Remove the first `tokens` tokens from a run-length encoding."""
    ends = tuple(accumulate([count for _, count in counted]))
    return tuple(
        [(value, min(count, end - tokens)) for (value, count), end in zip(counted, ends, strict=True) if end > tokens]
    )


def counts_joined(pieces: Iterable[Counted[Value]]) -> Counted[Value]:
    """Join run-length encodings of consecutive pieces; equal values at a seam become one entry with the sum of both
    counts.

    >>> counts_joined([(("a", 5),), (("a", 2), ("b", 1))])
    (('a', 7), ('b', 1))
    """
    found: list[tuple[Value, int]] = []
    for counted in pieces:
        for value, count in counted:
            if found and found[-1][0] == value:
                found[-1] = (value, found[-1][1] + count)
            else:
                found.append((value, count))
    return tuple(found)


def _width(columns: bytes, length: int) -> int:
    """Bytes of one log-probability in `columns` of `length` tokens: 4 or 8; 0 if the tokens are given."""
    return (len(columns) - _ID * length) // length if length else 0
