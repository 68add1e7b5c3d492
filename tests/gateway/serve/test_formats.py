"""Promises of `response_format` of ``stretto serve``, by the `openai` package: what a random model says is parsed as
the class that was asked for; a schema that cannot be served is OpenAI's own exception, and the server goes on."""

import json
from typing import Annotated, Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from tests.engine.byte_policy import NAME
from tests.gateway.serve.serving import Serving


class Town(BaseModel):
    """Strict schemas of OpenAI's, with bounds, so that a random model comes to an end."""

    name: Literal["Paris", "Rom", "Łódź"]
    people: Annotated[int, Field(ge=0, le=9999)]
    old: bool
    rivers: Annotated[list[Literal["Seine", "Tiber"]], Field(max_length=2)]


def client_of(serving: Serving) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0, timeout=60)


ASK: list[Any] = [{"role": "user", "content": "a town"}]


def test_what_is_said_is_parsed_as_the_class_that_was_asked_for(serving: Serving) -> None:
    with client_of(serving) as client:
        told = client.chat.completions.parse(
            model=NAME, messages=ASK, response_format=Town, n=6, temperature=2, seed=4, logprobs=True
        )
        towns = [choice.message.parsed for choice in told.choices]
        streamed = client.chat.completions.create(
            model=NAME, messages=ASK, response_format={"type": "json_object"}, max_tokens=9, seed=1, stream=True
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
    assert all(isinstance(town, Town) for town in towns)
    assert len({town.model_dump_json() for town in towns if town}) > 1
    assert {choice.finish_reason for choice in told.choices} == {"stop"}
    assert text.startswith("{")


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nonsense"}}}, "Invalid type"),
        (
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {"pattern": "(?=a)", "type": "string"}}},
            "look",
        ),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["x" * 40_000]}}}, "at most 32,768"),
        ({"type": "json_schema"}, "response_format"),
        ({"type": "regex"}, "response_format"),
    ],
)
def test_a_schema_that_cannot_be_served_is_a_bad_request(serving: Serving, form: Any, message: str) -> None:
    with client_of(serving) as client:
        with pytest.raises(openai.BadRequestError, match=message) as refused:
            client.chat.completions.create(model=NAME, messages=ASK, response_format=form)
        assert json.dumps(refused.value.body).count("response_format")
        assert client.chat.completions.create(model=NAME, messages=ASK, max_tokens=2).choices[0].finish_reason
