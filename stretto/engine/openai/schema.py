"""The OpenAPI 3.1 description of the interface, made from the records into which requests are decoded.

The server refuses every body that this description refuses. It refuses more: what depends on the model (tokens,
context), and other values of neutral fields (`stretto.engine.openai.requests`).
"""

from __future__ import annotations

from typing import Any

import msgspec

from stretto.engine.openai.replies import ErrorReply, ModelCard, ModelList
from stretto.engine.openai.requests import ChatBody, CompletionBody

_ERRORS = {
    "400": "a field is wrong",
    "401": "the server has a key, and it was not given",
    "404": "no such model",
    "413": "the body is too large",
    "503": "the server stops",
}


def openapi(model: str) -> bytes:
    """The description as JSON, for the server of one model."""
    kinds = (CompletionBody, ChatBody, ModelList, ModelCard, ErrorReply)
    references, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    completion, chat, models, card, error = references
    for kind in (CompletionBody, ChatBody):
        schemas[kind.__name__]["properties"]["model"] = {"enum": [model]}
    name = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    paths = {
        "/v1/completions": {"post": _answering(completion, error)},
        "/v1/chat/completions": {"post": _answering(chat, error)},
        "/v1/models": {"get": {"responses": {"200": _reply("the model that is served", models)}}},
        "/v1/models/{model}": {
            "parameters": [name],
            "get": {"responses": {"200": _reply("the model", card), "404": _reply(_ERRORS["404"], error)}},
        },
        "/health": {"get": {"responses": {"200": _reply("counters of the engine", {"type": "object"})}}},
        "/openapi.json": {"get": {"responses": {"200": _reply("this description", {"type": "object"})}}},
        "/metrics": {"get": {"responses": {"200": {"description": "counters", "content": {"text/plain": {}}}}}},
    }
    described = {
        "openapi": "3.1.0",
        "info": {"title": "stretto serve", "version": "1"},
        "paths": paths,
        "components": {"schemas": schemas},
    }
    return msgspec.json.encode(described)


def _answering(body: dict[str, Any], error: dict[str, Any]) -> dict[str, Any]:
    whole = {"description": "a completion", "content": {"application/json": {}, "text/event-stream": {}}}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {"200": whole} | {status: _reply(why, error) for status, why in _ERRORS.items()},
    }


def _reply(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}
