"""What users suffered: what was trained on is not what was sampled, since each turn's history is written as text and
encoded again, or since the template drops what was thought (verl#6719, trl#6250, ART#726, ms-swift#10012, minimind#850,
sglang#26555).

Promise: over many turns behind a template that drops old thinking, in tokens that no encoder would choose and with a
special token inside of answers, a conversation is one row, and the tokens of that row which are trained on are those
that were sampled."""

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from stretto.core.forest import TurnRequest
from stretto.core.records import Segment
from stretto_workflows.session import Sampler, SessionRecord
from tests.gateway.serving import MODEL, ScriptedModel, served_gateway, tokenizer_of
from tests.gateway.test_chat_sessions import ASK, turn

SPECIAL = "<|endoftext|>"


@dataclass
class Noting(ScriptedModel):
    """A scripted model that notes what it has sampled. In the middle of each answer it says a special token: first the
    token, then its letters, which spell the same, and so on."""

    sampled: list[tuple[int, ...]] = field(default_factory=list)

    def sampler(self, name: str, record: SessionRecord) -> Sampler:
        sample = super().sampler(name, record)

        async def noted(request: TurnRequest) -> Segment:
            segment = await sample(request)
            self.sampled.append(segment.token_ids)
            return segment

        return noted

    def _said(self, request: TurnRequest) -> Segment:
        said = super()._said(request)
        letters = [token for letter in SPECIAL for token in self.tokenizer.encode(letter, special_tokens=False)]
        begin = next(at for at in range(len(said.token_ids)) if list(said.token_ids[at : at + len(letters)]) == letters)
        if len(self.sampled) % 2:
            return said
        tokens = said.token_ids
        special = self.tokenizer.encode(SPECIAL, special_tokens=False)
        tokens = (*tokens[:begin], *special, *tokens[begin + len(letters) :])
        return Segment.of(
            tokens,
            said.behavior_logprobs[: len(tokens)],
            said.versions[: len(tokens)],
            stop_reason=said.stop_reason,
            engines=((MODEL, len(tokens)),),
        )


@pytest.mark.parametrize("turns", [24, pytest.param(128, marks=pytest.mark.long)])
async def test_many_turns_are_one_row_that_trains_on_what_was_sampled(tmp_path: Path, turns: int) -> None:
    number = itertools.count()
    model = Noting(
        lambda prompt: f"<think>\nthe bus, the {next(number)}th\n</think>\n\nthe {SPECIAL} others",
        tokenizer_of("qwen3"),
    )
    history: list[Any] = list(ASK)
    async with served_gateway(model, tmp_path) as gateway:
        session = await gateway.open()
        for place in range(turns):
            said = await turn(gateway, session, history)
            history += [said, {"role": "user", "content": f"and the {place}th?"}]
        shown = await gateway.shown(session)
    nodes = {node["id"]: node for node in shown["nodes"]}
    assert (len(shown["samples"]), shown["branches"]) == (1, {})
    (row,) = shown["samples"]
    assert [tuple(nodes[id]["token_ids"]) for id in row if nodes[id]["sampled"]] == model.sampled
    assert len(model.sampled) == turns
    for asked, sampled, following in zip(model.asked, model.sampled, model.asked[1:], strict=False):
        assert following[: len(asked) + len(sampled)] == asked + sampled
    (special,), (longer,) = (model.tokenizer.encode(text, special_tokens=False) for text in (SPECIAL, "the"))
    assert [special in sampled for sampled in model.sampled] == [True, False] * (turns // 2)
    assert not any(longer in sampled for sampled in model.sampled), "an encoder would have taken longer pieces"
