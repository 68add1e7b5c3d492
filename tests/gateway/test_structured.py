"""Promises of a gateway whose engine follows grammars: with a random model, `response_format` gives JSON of the schema,
and a forced tool a call that can be made, in every dialect; nothing of it is named as not applied; a schema that cannot
be followed is a 4xx in the dialect's form."""

import json
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel

from stretto.engine.config import EngineConfig
from stretto.engine.http.client import HttpEngine
from stretto.engine.native.engine import NativeEngine
from stretto.model.hf.grammar import Grammars
from stretto.model.hf.tokenizer import Tokenizer, load_tokenizer
from stretto_gateway.requests import CallForms
from stretto_workflows.chat.messages import ChatRequest, SamplingOptions, Tool
from stretto_workflows.chat.tool_calls import form_of
from stretto_workflows.session import Sampler, SessionRecord, WholeTurns
from tests.engine.serving import served
from tests.gateway.serving import ENDS, MODEL, ServedGateway, build_chat_model, served_gateway, tokenizer_of, wished

DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
SUM = {"type": "object", "properties": {"a": DIGIT, "b": DIGIT}, "required": ["a", "b"], "additionalProperties": False}
NEVER = {"type": "nonsense"}
PATHS = ("chat/completions", "responses", "messages")


class Sum(BaseModel):
    a: int
    b: bool


@dataclass
class RandomModel:
    """A real engine in the test's own event loop (a `serving.SpeakingModel`)."""

    engine: HttpEngine
    tokenizer: Tokenizer

    def sampler(self, name: str, record: SessionRecord) -> Sampler:
        """See `stretto_gateway.sessions.sessions.MakeSampler`."""
        return WholeTurns(self.engine.generate, record, name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_chat_model(tmp_path_factory.mktemp("model") / "chatml", context=2048)


@asynccontextmanager
async def following(folder: Path, sessions: Path) -> AsyncIterator[ServedGateway]:
    tokenizer = load_tokenizer(folder)
    engine = NativeEngine.load(folder, EngineConfig(slots=4))
    forms = CallForms(form_of(tokenizer.chat_template), tokenizer.vocabulary)
    async with served(engine, sessions / "engine") as client:
        model = RandomModel(client, tokenizer)
        async with served_gateway(model, sessions, context=2048, forms=forms) as gateway:
            yield gateway
        assert engine.idle


def is_sum(said: Any) -> bool:
    return list(said) == ["a", "b"] and all(0 <= number <= 9 for number in said.values())


async def test_each_dialect_gets_the_json_and_the_call_that_it_wants(folder: Path, tmp_path: Path) -> None:
    async with following(folder, tmp_path) as gateway:
        session = await gateway.open()
        for shaped in (False, True):
            told: dict[str, Any] = {}
            for path in PATHS:
                body = wished(path, schema=SUM) if shaped else wished(path, tool=SUM, one=True)
                reply = await gateway.client.post(f"{session['base_url']}/{path}", json=body)
                assert (reply.status_code, reply.headers.get("x-stretto-unapplied")) == (200, None), reply.text
                told[path] = reply.json()
            chat = told["chat/completions"]["choices"][0]
            if shaped:
                texts = chat["message"]["content"], told["responses"]["output"][0]["content"][0]["text"]
                said = [json.loads(text) for text in (*texts, told["messages"]["content"][0]["text"])]
            else:
                [call], [other] = chat["message"]["tool_calls"], told["responses"]["output"]
                [block] = told["messages"]["content"]
                assert chat["finish_reason"] == "tool_calls"
                assert {call["function"]["name"], other["name"], block["name"]} == {"add"}
                said = [json.loads(call["function"]["arguments"]), json.loads(other["arguments"]), block["input"]]
            assert all(map(is_sum, said))
        assert (await gateway.shown(session))["unapplied"] == {}


async def test_the_openai_package_parses_every_answer(folder: Path, tmp_path: Path) -> None:
    async with following(folder, tmp_path) as gateway:
        session = await gateway.open()
        async with AsyncOpenAI(base_url=session["base_url"], api_key="none", max_retries=0) as client:
            for seed in range(3):
                ask: list[Any] = [{"role": "user", "content": f"{seed}?"}]
                told = await client.chat.completions.parse(model=MODEL, messages=ask, response_format=Sum)
                assert isinstance(told.choices[0].message.parsed, Sum)


async def test_a_schema_that_cannot_be_followed_is_refused_in_the_dialects_form(folder: Path, tmp_path: Path) -> None:
    never = {**SUM, "properties": {"a": NEVER, "b": NEVER}}
    async with following(folder, tmp_path) as gateway:
        session = await gateway.open()
        for path in PATHS:
            bodies = {"tools": wished(path, tool=never, one=True), "response_format": wished(path, schema=never)}
            for field, body in bodies.items():
                reply = await gateway.client.post(f"{session['base_url']}/{path}", json=body)
                assert reply.status_code == 400, reply.text
                assert f"{field}: " in reply.json()["error"]["message"]
                assert "Invalid type" in reply.json()["error"]["message"]
            fine = await gateway.client.post(f"{session['base_url']}/{path}", json=wished(path, schema=SUM))
            assert fine.status_code == 200


def walked(grammars: Grammars, grammar: str, ends: Sequence[int], seed: int) -> tuple[int, ...]:
    """What a model says that likes all tokens equally."""
    grammars.check(grammar, ends)
    matcher, chosen, said = grammars.matcher(grammar), random.Random(seed), list[int]()
    for _ in range(2000):
        matcher.look()
        bits = np.unpackbits(matcher.allowed.view(np.uint8), bitorder="little")
        said.append(int(chosen.choice(bits.nonzero()[0])))
        if said[-1] in ends:
            return tuple(said[:-1])
        assert matcher.take(said[-1:])
    raise AssertionError("the grammar has no end")


@pytest.mark.parametrize("template", ENDS)
def test_forced_calls_are_read_in_the_form_of_each_family(template: str) -> None:
    tokenizer = tokenizer_of(template)
    form = form_of(tokenizer.chat_template)
    forms = CallForms(form, tokenizer.vocabulary)
    grammars = Grammars(lambda: tokenizer, 0)
    tools = (Tool("add", "", SUM), Tool('wei"rd é', "", {"type": "object", "additionalProperties": False}))
    numbers = count()
    for choice, parallel in (("required", True), ("required", False), ("add", True)):
        asked = ChatRequest(MODEL, (), tools, SamplingOptions(tool_choice=choice, parallel_calls=parallel))
        for seed in range(4):
            said = tokenizer.spell(walked(grammars, forms.grammar(asked), tokenizer.eos_token_ids, seed))
            parsed = form.parse(said, lambda _: str(next(numbers)))
            assert parsed.calls, said
            assert not parsed.text
            assert len(parsed.calls) == 1 or (parallel and choice == "required")
            assert {call.name for call in parsed.calls} <= {
                tool.name for tool in tools if choice in ("required", tool.name)
            }
            assert all(is_sum(json.loads(call.arguments)) for call in parsed.calls if call.name == "add")


def test_text_of_a_schema_may_be_a_call_where_tools_are_offered() -> None:
    tokenizer = tokenizer_of()
    forms, grammars = CallForms(form_of(tokenizer.chat_template), tokenizer.vocabulary), Grammars(lambda: tokenizer, 0)
    asked = ChatRequest(MODEL, (), (Tool("add", "", SUM),), SamplingOptions(json=True, schema=SUM))
    said = [tokenizer.spell(walked(grammars, forms.grammar(asked), tokenizer.eos_token_ids, seed)) for seed in range(8)]
    calls = [text for text in said if text.startswith("<tool_call>")]
    assert 0 < len(calls) < len(said)
    assert all(is_sum(json.loads(text)) for text in said if text not in calls)


def test_the_folders_grammars_are_served(folder: Path) -> None:
    assert Grammars(partial(load_tokenizer, folder), 0).problem == ""
