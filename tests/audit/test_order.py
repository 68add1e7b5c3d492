"""The law of the data: the questions are those on record, and come in the order that seed, epoch and weights say.

The law computes the order from the record alone, and agrees with the stream that drew it.
"""

import hashlib
import json
import math
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from stretto.core.records import Prompt
from stretto.rollout.config import RolloutConfig
from stretto.rollout.controller import Controller
from stretto.rollout.prompts import PromptSource, PromptStream
from stretto_report.audit.check import check_run
from tests.audit.runs import RECIPE
from tests.store.make import judged, ledger_at

LAW = "prompts come in their order"
UNBOUNDED = RECIPE.replace("max_staleness = 1.0", "max_staleness = inf")


WEIGHTED = (PromptSource("a", 3, 1.0), PromptSource("b", 8, 1.0))
EASY_AND_HARD = {"a:0": 2, "b:1": 0}  # right ones of 2; the others have 1


def asked(sources: Sequence[PromptSource]) -> list[Prompt]:
    return [
        Prompt(id=f"{source.name}:{at}", token_ids=(at,), text=f"{source.name}\u2028{at}?", answer=str(at))
        for source in sources
        for at in range(source.prompts)
    ]


def record(folder: Path, sources: Sequence[PromptSource], groups: int, rests: bool = False) -> Path:
    """The ledger of a run that has issued `groups` groups, all of them judged."""
    folder.mkdir(exist_ok=True)
    (folder / "recipe.toml").write_text(UNBOUNDED)
    prompts, whole = asked(sources), hashlib.blake2b(digest_size=16)
    lines = [{"id": one.id, "prompt": one.text, "answer": one.answer} for one in prompts]
    (folder / "questions.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    for line in lines:
        for text in line.values():
            whole.update(f"{len(text)}:{text}".encode())
    bounds = {"easy": 1.0, "hard": 0.0} if rests else {"easy": None, "hard": None}
    config = RolloutConfig(batch_size=2, group_size=2, max_in_flight=1, max_staleness=math.inf, beyond_bound="train")
    with ledger_at(folder / "ledger.sqlite") as ledger:
        ledger.put("data", {"digest": whole.hexdigest(), "seed": 4, "sources": sources} | bounds)
        stream = PromptStream(prompts, 4, None, sources, lambda rate: rests and rate in (0.0, 1.0))
        control = Controller(config, stream, ledger, seed=4)
        ledger.watch("standing", control.state)
        for _ in range(groups):
            ticket = control.admit()
            assert ticket is not None
            right = EASY_AND_HARD.get(ticket.draw.prompt.id, 1)
            rewards = [float(member < right) for member in range(2)]
            control.finish(ticket, [judged(f"{ticket.group_id}/{at}", one) for at, one in enumerate(rewards)])
    return folder


def breaches(folder: Path) -> Sequence[str]:
    return check_run(folder).breaches[LAW]


def broken(folder: Path, statement: str) -> Mapping[str, tuple[str, ...]]:
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as connection:
        connection.create_function("seal", -1, lambda *values: b"")
        connection.execute(statement)
        connection.commit()
    return check_run(folder).breaches


@pytest.mark.parametrize("groups", [1, 5, 6, 7, 20, 50])
@pytest.mark.parametrize("rests", [False, True])
@pytest.mark.parametrize("sources", [WEIGHTED, (PromptSource("", 5),)], ids=["weighted", "one"])
def test_a_streams_order_is_lawful(tmp_path: Path, sources: Sequence[PromptSource], groups: int, rests: bool) -> None:
    findings = check_run(record(tmp_path, sources, groups, rests))
    assert findings.kept, findings.breaches


def test_an_order_of_another_seed_is_a_breach(tmp_path: Path) -> None:
    found = broken(
        record(tmp_path, WEIGHTED, 9), "UPDATE meta SET value = json_set(value, '$.seed', 5) WHERE name = 'data'"
    )
    assert found[LAW][0].startswith("epoch 0: prompt 1 to be asked was ")


def test_other_weights_are_a_breach(tmp_path: Path) -> None:
    statement = "UPDATE meta SET value = json_set(value, '$.sources[0].weight', 2.0) WHERE name = 'data'"
    assert broken(record(tmp_path, WEIGHTED, 9), statement)[LAW]


def test_questions_that_have_changed_are_a_breach(tmp_path: Path) -> None:
    folder = record(tmp_path, WEIGHTED, 4)
    path = folder / "questions.jsonl"
    path.write_text(path.read_text().replace('"answer": "2"', '"answer": "3"', 1))
    (told,) = breaches(folder)
    assert told.startswith("questions.jsonl has the digest ")
    path.write_bytes(path.read_bytes()[:-30] + b"\xff")
    assert breaches(folder)[0].startswith("questions.jsonl has the digest none (UnicodeDecodeError: ")
    path.write_text("[" * 100_000)
    assert breaches(folder)[0].startswith("questions.jsonl has the digest none (RecursionError: ")
    path.unlink()
    assert breaches(folder)[0].startswith("questions.jsonl has the digest none (FileNotFoundError: ")


def test_a_prompt_that_was_left_out_without_a_reason_is_a_breach(tmp_path: Path) -> None:
    folder = record(tmp_path, (PromptSource("a", 4),), 7, rests=True)  # a:0 rests in epoch 1
    assert not breaches(folder)
    statement = (
        "UPDATE trajectories SET verdict = 'wrong' WHERE member = 0"
        " AND group_key = (SELECT key FROM groups WHERE id = '0.a:0.0')"
    )
    found = broken(folder, statement)[LAW]
    assert found == ("epoch 1: prompt a:0 was left out, and was neither too easy nor too hard in epoch 0",)


def test_a_run_without_a_record_of_its_data_is_not_judged(tmp_path: Path) -> None:
    assert not broken(record(tmp_path, WEIGHTED, 9), "DELETE FROM meta WHERE name = 'data'")[LAW]
