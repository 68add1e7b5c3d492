"""Promise: a client that names an earlier response in place of its messages goes on behind the tokens of that response,
whether it tells the instructions again, as OpenAI's clients do, or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gateway.serving import MODEL, ScriptedModel, in_a_loop, served_gateway


@pytest.mark.parametrize("again", [{}, {"instructions": "Be brief."}])
@in_a_loop
async def test_an_earlier_response_stands_for_its_messages(tmp_path: Path, again: dict[str, Any]) -> None:
    model = ScriptedModel(lambda prompt: "It is 3.")
    async with served_gateway(model, tmp_path) as gateway:
        session = await gateway.open()

        async def ask(**body: Any) -> dict[str, Any]:
            url, headers = "/v1/responses", {"Authorization": f"Bearer {session['api_key']}"}
            return dict((await gateway.client.post(url, json={"model": MODEL, **body}, headers=headers)).json())

        first = await ask(input="1+2?", instructions="Be brief.")
        await ask(input="Sure?", previous_response_id=first["id"], **again)
        shown = await gateway.shown(session)
        assert (shown["branches"], len(shown["samples"])) == ({}, 1)
        text = model.tokenizer.spell(model.asked[1])
        assert text.count("Be brief.") == text.count("It is 3.") == text.count("Sure?") == 1
