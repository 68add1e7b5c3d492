"""A body that is not the record that it should be is refused with its first wrong field, and an unknown field with the
nearest name that the object may have there, however deep it stands."""

import json

import msgspec
import pytest

from stretto.core.errors import RefusedRequest
from stretto.core.records import Record
from stretto.processes.http.asgi import parse_record, refusal_of


class Part(Record, frozen=True):
    text: str
    kind: str = ""


class Message(Record, frozen=True):
    role: str
    content: str | tuple[Part, ...] | None = None


class Asked(Record, frozen=True):
    model: str
    messages: tuple[Message, ...] = ()
    temperature: float | None = None
    options: Part | None = None


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"model": "m", "temprature": 1}, "temprature: unknown field; did you mean 'temperature'?"),
        ({"model": "m", "zzz": 1}, "zzz: unknown field; see /openapi.json"),
        (
            {"model": "m", "messages": [{"role": "user"}, {"role": "user", "content": [{"text": "", "kinds": ""}]}]},
            "messages[1].content[0].kinds: unknown field; did you mean 'kind'?",
        ),
        ({"model": "m", "options": {"txt": ""}}, "options.txt: unknown field; did you mean 'text'?"),
        ({"temperature": 1}, "model: missing; see /openapi.json"),
    ],
)
def test_an_unknown_field_comes_with_the_nearest_name_of_its_object(body: dict[str, object], told: str) -> None:
    with pytest.raises(RefusedRequest) as refused:
        parse_record(json.dumps(body).encode(), Asked)
    assert str(refused.value) == told


def test_a_list_of_records_is_no_different() -> None:
    with pytest.raises(msgspec.ValidationError) as refused:
        msgspec.convert([{"model": "m"}, {"model": "m", "mesages": []}], list[Asked])
    told = refusal_of(str(refused.value), list[Asked], "as documented")
    assert str(told) == "[1].mesages: unknown field; did you mean 'messages'?"


def test_a_body_nested_too_deeply_is_refused_as_such() -> None:
    with pytest.raises(RefusedRequest) as refused:
        parse_record(b'{"model": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", Asked)
    assert str(refused.value) == "body: JSON that is nested too deeply; a JSON object"
