"""Promise: a session that an earlier version recorded (`tests/data/session`, before the servers shared their dialects)
answers each request byte for byte as it did then, in every dialect, and samples nothing anew."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.gateway.serving import ScriptedModel, in_a_loop, served_gateway

RECORDED = Path(__file__).parents[1] / "data" / "session"


@in_a_loop
async def test_a_recorded_session_answers_as_it_did(tmp_path: Path) -> None:
    recorded = json.loads((RECORDED / "replies.json").read_text())
    opened = json.loads((RECORDED / "session.jsonl").read_text().splitlines()[0])
    shutil.copy(RECORDED / "session.jsonl", tmp_path / f"{opened['id']}.jsonl")
    model = ScriptedModel(lambda prompt: "something else")
    async with served_gateway(model, tmp_path) as gateway:
        for asked in recorded["replies"]:
            reply = await gateway.client.post(recorded["base"] + asked["path"], json=asked["body"])
            assert (reply.status_code, reply.text) == (200, asked["reply"])
    assert model.asked == []
