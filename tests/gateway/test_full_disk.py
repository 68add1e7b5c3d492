"""A session whose record cannot be written for a moment: what fails has not happened, and what a client was told is
there after a restart. One session whose file is damaged is set aside, and the others go on."""

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from stretto_gateway.sessions import sessions
from stretto_gateway.sessions.sessions import FolderRecord, Line
from tests.gateway.serving import ScriptedModel, ServedGateway, one_session, served_gateway

QUESTIONS = ("first", "second", "third")


class FullDisk(FolderRecord):
    """Its `after`-th write of all sessions fails, and no other."""

    after = 0

    def write(self, line: Line) -> None:
        FullDisk.after -= 1
        if FullDisk.after == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(line)


async def conversation(gateway: ServedGateway, session: dict[str, str]) -> tuple[list[bytes], int]:
    """An agent that asks three times and repeats what fails, and is given a reward for the first turn; its replies, and
    how often it was told that something failed."""
    messages: list[dict[str, Any]] = []
    replies, failures = list[bytes](), 0
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        while (reply := await gateway.chat(session, messages)).status_code != 200:
            failures += 1
        replies.append(reply.content)
        messages.append(reply.json()["choices"][0]["message"])
    while (await gateway.client.post(f"/sessions/{session['id']}/reward", json={"reward": 0.5})).status_code != 200:
        failures += 1
    return replies, failures


@pytest.mark.parametrize("nth", range(1, 17))
async def test_whichever_write_fails_what_was_told_is_there_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    """16 writes after the opening: five of each turn (the begin of the call, given tokens, the begin of the turn, the
    sampled tokens, the reply), and the reward."""
    monkeypatch.setattr(sessions, "FolderRecord", FullDisk)
    model = ScriptedModel(lambda prompt: f"answer {len(prompt)}")
    async with one_session(model, tmp_path) as (gateway, session):
        FullDisk.after = nth
        told, failures = await conversation(gateway, session)
        assert failures == 1
        before = await gateway.shown(session)
    sampled = len(model.asked)
    async with served_gateway(model, tmp_path) as gateway:
        after = await gateway.shown(session)
        assert {**after, "retries": 0} == {**before, "retries": 0}
        assert await conversation(gateway, session) == (told, 0)
    assert len(model.asked) == sampled


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"type":"Written","node":9,"segment":["",0,[],0]}\n', "segment 2 is missing"),
        (b'{"type":"Replied","number":7,"reply":""}\n', "replies to call 7, which is missing"),
        (b'{"type":"Writ\xff\n', "is no record of a session"),
        (b'{"type":"Written","node":2,"segment":["",0,[],0,0,null,[],2]}\n', "follows segment 2"),
    ],
)
async def test_a_session_that_cannot_be_read_is_set_aside_with_why(tmp_path: Path, line: bytes, why: str) -> None:
    model = ScriptedModel(lambda prompt: "yes")
    ask = [{"role": "user", "content": "well?"}]
    async with served_gateway(model, tmp_path) as gateway:
        damaged, whole = await gateway.open(), await gateway.open()
        for session in (damaged, whole):
            assert (await gateway.chat(session, ask)).status_code == 200
    path = tmp_path / f"{damaged['id']}.jsonl"
    path.write_bytes(found := path.read_bytes() + line + b'{"type":"Ende')
    (tmp_path / "strange.jsonl").write_bytes(b"[]\n")
    async with served_gateway(model, tmp_path) as gateway:
        aside = gateway.app._host.set_aside  # type: ignore[attr-defined]
        assert set(aside) == {path.name, "strange.jsonl"}
        assert why in aside[path.name]
        assert path.read_bytes() == found
        assert (await gateway.chat(damaged, ask)).json()["error"]["code"] == "session_ended"
        assert (await gateway.shown(whole))["samples"] == [[0, 1]]
        assert (await gateway.chat(whole, ask)).status_code == 200


async def test_of_many_ended_sessions_the_newest_are_read_and_the_keys_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "_SHOWN", 1)
    model = ScriptedModel(lambda prompt: "yes")
    async with served_gateway(model, tmp_path) as gateway:
        ended = [await gateway.open() for _ in range(3)]
        for at, session in enumerate(ended):
            await gateway.client.post(f"/sessions/{session['id']}/end")
            os.utime(tmp_path / f"{session['id']}.jsonl", (at, at))
    read: list[Path] = []
    whole = sessions._read

    def noted(path: Path) -> Any:
        read.append(path)
        return whole(path)

    monkeypatch.setattr(sessions, "_read", noted)
    async with served_gateway(model, tmp_path) as gateway:
        assert [path.stem for path in read] == [ended[2]["id"]]
        assert (await gateway.shown(ended[2]))["state"] == "ended"
        ask = [{"role": "user", "content": "well?"}]
        assert [(await gateway.chat(session, ask)).status_code for session in ended] == [409, 409, 409]


async def test_what_holds_a_key_is_for_its_owner_only(tmp_path: Path) -> None:
    async with one_session(ScriptedModel(lambda prompt: "yes"), tmp_path) as (_, session):
        pass
    assert stat.S_IMODE((tmp_path / f"{session['id']}.jsonl").stat().st_mode) == 0o600
