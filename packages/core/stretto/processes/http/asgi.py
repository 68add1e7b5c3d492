"""ASGI helpers of every server: request bodies and their parsing into records, replies, server-sent events, clients
that disconnect, and the check of the header ``Host`` against DNS rebinding.

A web page of another site can point its own host name at this machine; the browser then takes the server for that site
and sends the name in ``Host``. IP addresses, and names that only this machine gives itself, cannot be forged so.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import math
import re
import socket
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
import msgspec.inspect
from starlette.types import ASGIApp, Receive, Scope, Send

from stretto.core.errors import UNREADABLE, RefusedRequest, nearest
from stretto.core.tasks import cancel_and_wait

#: Default limit on the body of a request, in bytes; a longer body is refused before it is read to its end.
LARGEST_BODY = 16 << 20
DROPPED_BYTES, DROPPED_SECONDS = 64 << 20, 5.0  #: most that is read and dropped of a refused request
#: ASGI extension: a function with which an application writes a part of a reply at once (`processes.http.server`).
WRITE_NOW = "stretto.write_now"
KEEP_ALIVE = b": keep-alive\n\n"  #: a comment in a stream of events, which clients skip

_TURNS_TO_NOTICE = 8  # turns of the event loop from a request to the end of its connection, if both have come

Header = tuple[bytes, bytes]
T = TypeVar("T")


async def read_body(scope: Scope, receive: Receive, largest: int = LARGEST_BODY) -> bytes | None:
    """Read the body of a request; None if it has more than `largest` bytes.

    Most clients send everything before they read the reply, and would see a reset connection. So the rest of a body
    that is too large is read and dropped, up to 64 MiB and 5 seconds, unless the client waits for ``100 Continue``.
    Raises RefusedRequest if the client has disconnected before the end of the body.
    """
    if int(header(scope, b"content-length") or 0) > largest:
        if header(scope, b"expect") is None:
            await _drop(receive)
        return None
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RefusedRequest("body", f"broken off after {size:,} bytes", "a whole body")
        part = message.get("body", b"")
        parts.append(part)
        size += len(part)
        more = message.get("more_body", False)
        if size > largest:
            parts.clear()
            if more:
                await _drop(receive)
            return None
    return b"".join(parts)


async def _drop(receive: Receive) -> None:
    """Read and drop the rest of a body, at most 64 MiB and for at most 5 seconds."""
    left, more = DROPPED_BYTES, True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DROPPED_SECONDS):
            while more and left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                more = message.get("more_body", False)


def header(scope: Scope, name: bytes) -> bytes | None:
    """Value of the first header with this name, or None if there is none; `name` in lower case."""
    return next((value for key, value in scope["headers"] if key == name), None)


async def reply(send: Send, status: int, content_type: str, body: bytes, headers: Iterable[Header] = ()) -> None:
    """Send a whole reply with its content length. `headers`: further headers."""
    told = [(b"content-type", content_type.encode()), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": told})
    await send({"type": "http.response.body", "body": body})


async def when_gone(receive: Receive, leave: Callable[[], None]) -> None:
    """Wait until the client has disconnected, then call `leave`. Run it as a task, after the body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
    leave()


async def has_gone(receive: Receive) -> bool:
    """Whether the client has disconnected already. Waits a few turns of the event loop, to notice also an end of the
    connection that came together with the request. Call it after the body has been read from `receive`."""
    gone = asyncio.create_task(when_gone(receive, lambda: None))
    for _ in range(_TURNS_TO_NOTICE):
        await asyncio.sleep(0)
    found = gone.done()
    await cancel_and_wait([gone])
    return found


async def unless_gone(
    receive: Receive,
    work: Coroutine[Any, Any, T],
    alive: Callable[[], Coroutine[Any, Any, None]] | None = None,
    seconds: float | None = None,
) -> T | None:
    """Await `work` and return its result; None, with the work cancelled, if the client disconnects first. Until then
    `alive`, if given, is awaited every `seconds`, to send a comment for example. No deadline of its own: that of the
    work or the client applies. Call it after the body has been read from `receive`."""
    working, gone = asyncio.create_task(work), asyncio.create_task(when_gone(receive, lambda: None))
    try:
        while not (await asyncio.wait((working, gone), timeout=seconds, return_when=asyncio.FIRST_COMPLETED))[0]:
            if alive is not None:
                await alive()
        return working.result() if working.done() else None
    finally:
        await cancel_and_wait([working, gone])


def sent_event(data: object, kind: str = "") -> bytes:
    r"""Encode one server-sent event, with `data` as JSON. `kind`: its event field, "" for none.

    >>> sent_event({"a": 1}, "news")
    b'event: news\ndata: {"a":1}\n\n'
    """
    head = f"event: {kind}\n" if kind else ""
    return b"%bdata: %b\n\n" % (head.encode(), msgspec.json.encode(data))


_LISTS = msgspec.inspect.ListType | msgspec.inspect.VarTupleType
_FREE = msgspec.inspect.DictType | msgspec.inspect.AnyType
AnyRecord = TypeVar("AnyRecord", bound=msgspec.Struct)
_PLACE = re.compile(r" - at `\$\.?(?P<path>.*)`$")
_STEP = re.compile(r"[^.\[\]]+(?=[.\[]|$)|\[")  # of a place, as messages[0].role
_FIELD = re.compile(r"^Object (?:contains unknown|missing required) field `(?P<name>[^`]*)`")


def parse_record(raw: bytes, kind: type[AnyRecord]) -> AnyRecord:
    """Parse the JSON body `raw` into a record of type `kind`. Unknown fields that are null, and null in a field that
    may not be null, count as absent, since some clients send every field of their types. Raises RefusedRequest, with
    the first wrong field, if the body is invalid."""
    try:
        try:
            return msgspec.json.decode(raw, type=kind)
        except msgspec.ValidationError:
            told = _without_nulls(msgspec.json.decode(raw), [msgspec.inspect.type_info(kind)])
            return msgspec.json.decode(msgspec.json.encode(told), type=kind)
    except msgspec.ValidationError as error:
        raise refusal_of(str(error), kind) from None
    except RecursionError:
        raise RefusedRequest("body", "JSON that is nested too deeply", "a JSON object") from None
    except UNREADABLE as error:
        field, found, allowed = _field_that_is_no_json(raw)
        if field is not None:
            raise RefusedRequest(field, found, allowed) from None
        raise RefusedRequest("body", f"no JSON: {error}", "a JSON object") from None


def _without_nulls(value: Any, kinds: Sequence[msgspec.inspect.Type]) -> Any:
    """Copy a decoded value without the null fields that count as absent. `kinds`: types that the value may have.
    Free-form JSON, such as the arguments of a call or a schema, is unchanged."""
    kinds = [one for kind in kinds for one in (kind.types if isinstance(kind, msgspec.inspect.UnionType) else [kind])]
    if isinstance(value, list):
        items = [kind.item_type for kind in kinds if isinstance(kind, _LISTS)]
        return [_without_nulls(item, items) for item in value] if items else value
    records = [kind for kind in kinds if isinstance(kind, msgspec.inspect.StructType)]
    if not (isinstance(value, dict) and records) or any(isinstance(kind, _FREE) for kind in kinds):
        return value
    meant = [one for one in records if one.tag_field is None or value.get(one.tag_field) == one.tag] or records
    fields: dict[str, list[msgspec.inspect.Type]] = {}
    for field in (field for one in meant for field in one.fields):
        fields.setdefault(field.encode_name, []).append(field.type)
    return {
        name: _without_nulls(child, fields.get(name, ()))
        for name, child in value.items()
        if child is not None or any(map(_takes_null, fields.get(name, ())))
    }


def _takes_null(kind: msgspec.inspect.Type) -> bool:
    if isinstance(kind, msgspec.inspect.UnionType):
        return any(map(_takes_null, kind.types))
    return isinstance(kind, msgspec.inspect.NoneType | msgspec.inspect.AnyType)


def refusal_of(message: str, kind: Any, remedy: str = "see /openapi.json") -> RefusedRequest:
    """Convert `message`, an error message of msgspec about a body of type `kind`, to a refusal that names the field;
    the field "body" if the message names none. `remedy`: text for what is allowed; for an unknown field, a field with a
    similar name is suggested instead."""
    place = _PLACE.search(message)
    path, sentence = (place["path"], message[: place.start()]) if place else ("", message)
    name = _FIELD.match(sentence)
    if name is None:
        return RefusedRequest(path or "body", sentence, remedy)
    field = f"{path}.{name['name']}".removeprefix(".")
    if "missing" in sentence:
        return RefusedRequest(field, "missing", remedy)
    near = nearest(name["name"], _fields(msgspec.inspect.type_info(kind), _STEP.findall(path)))
    return RefusedRequest(field, "unknown field", near if near.startswith("did") else remedy)


def _fields(kind: msgspec.inspect.Type, path: list[str]) -> Iterator[str]:
    """Yield the names of the fields that `kind` allows at `path`, which consists of names and ``[`` for each list; none
    if no record stands there."""
    if isinstance(kind, msgspec.inspect.UnionType):
        yield from chain.from_iterable(_fields(one, path) for one in kind.types)
    elif isinstance(kind, msgspec.inspect.ListType | msgspec.inspect.VarTupleType) and path[:1] == ["["]:
        yield from _fields(kind.item_type, path[1:])
    elif isinstance(kind, msgspec.inspect.StructType) and not path:
        yield from (field.encode_name for field in kind.fields)
    elif isinstance(kind, msgspec.inspect.StructType):
        yield from chain.from_iterable(
            _fields(field.type, path[1:]) for field in kind.fields if field.encode_name == path[0]
        )


def _field_that_is_no_json(raw: bytes) -> tuple[str | None, str, str]:
    """Find a value that Python's json accepts and JSON forbids (NaN, half of a surrogate pair). Returns its top-level
    field, a description of the value, and what is allowed; ``(None, "", "")`` if there is none."""
    try:
        tree = json.loads(raw)
        for field, value in tree.items() if isinstance(tree, dict) else ():
            for leaf in _leaves(value):
                if isinstance(leaf, float) and not math.isfinite(leaf):
                    return field, "NaN or infinite", "a finite number"
                if isinstance(leaf, str) and any("\ud800" <= character <= "\udfff" for character in leaf):
                    return field, "half of a surrogate pair", "characters"
    except (ValueError, RecursionError):
        pass  # not JSON at all, or nested too deeply: there is no field to name
    return None, "", ""


def _leaves(value: object) -> Iterator[object]:
    """Yield the leaves of nested lists and objects, keys included; of another value, the value itself."""
    parts = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else None
    if parts is None:
        yield value
    else:
        yield from chain.from_iterable(map(_leaves, parts))


_LOOPBACK_NAMES = frozenset({"localhost", "ip6-localhost"})
_AUTHORITY = re.compile(r"(\[[0-9a-fA-F:.]+\]|[\w.-]+)(:\d{1,5})?", re.ASCII)


class HostNames:
    """Values of ``Host`` that a server accepts."""

    def __init__(self, *given: str, loopback: bool) -> None:
        """Collect the names by which the server may be addressed. `given`: further names from the user. `loopback`: the
        server listens on loopback only, so only loopback addresses are accepted, and no name of the machine."""
        self._loopback = loopback
        self._names = _LOOPBACK_NAMES | {name.lower() for name in given}
        if not loopback:  # getfqdn asks the resolver, which may take seconds
            self._names |= {socket.gethostname().lower(), socket.getfqdn().lower()}

    def has(self, host: str) -> bool:
        """Whether `host`, a value of Host with or without a port, is an IP address (on a loopback server only a
        loopback one) or one of the accepted names; False if it is malformed."""
        try:
            name = urlsplit(f"//{host}").hostname if _AUTHORITY.fullmatch(host) else None
        except ValueError:
            return False
        if name is None:
            return False
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return name in self._names
        return address.is_loopback or not self._loopback

    def foreign(self, scope: Scope) -> str | None:
        """Host of a request, cut to 80 characters, if it is not accepted, else None. A missing Host is accepted:
        browsers always send one."""
        if (value := header(scope, b"host")) is None or self.has(host := value.decode("latin-1")):
            return None
        return host[:80]


LOOPBACK = HostNames(loopback=True)  #: for servers that listen on loopback only


def is_loopback(bound: socket.socket) -> bool:
    """Whether a socket is bound to a loopback address."""
    return ipaddress.ip_address(bound.getsockname()[0]).is_loopback


def by_own_names(inner: ASGIApp, names: HostNames) -> ASGIApp:
    """Make an ASGI application that refuses requests whose Host is not one of `names`, with status 403 and an error as
    JSON; all others go to `inner`."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        if (host := names.foreign(scope)) is None:
            await inner(scope, receive, send)
            return
        error = {"message": foreign_host(host), "type": "invalid_request_error", "param": "host", "code": None}
        await reply(send, 403, "application/json", msgspec.json.encode({"error": error}))

    return serve


def foreign_host(host: str) -> str:
    """Sentence for a caller whose Host header, `host`, is no name of this server; it says what to use instead."""
    return f"host: {host!r} is no name of this server; ask it by its address, or by localhost on its own machine"
