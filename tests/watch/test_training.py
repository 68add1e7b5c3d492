"""Promises of what is shown of training: a step without a record says so; a record that is damaged, a link or a pipe is
a fault of its own, and the part of the ledger is shown.
"""

import os
from pathlib import Path

import httpx

from tests.watch.conftest import alone
from tests.watch.runs import write_run


def test_a_step_that_kept_no_tokens_says_so(client: httpx.Client, first: str) -> None:
    found = client.get(f"{first}/trajectories/0.a.0/0").json()
    assert found["training"] is None
    assert found["training_fault"].startswith(
        "what became of each token in step 1 is not on record; the recipe's logging"
    )
    tokens = found["segments"][0]["tokens"]
    assert tokens["fate"] == ["trained"] * 3
    assert [tokens[name] for name in ("trainer_logprob", "difference", "ratio", "advantage")] == [None] * 4
    untrained = client.get(f"{first}/trajectories/1.a.0/0").json()
    assert (untrained["training"], untrained["training_fault"]) == (None, "")


def test_a_record_of_tokens_that_is_no_plain_file_or_damaged_is_a_fault_of_its_own(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "one")
    file = run / "tokens" / "step-000002.safetensors"
    whole = file.read_bytes()
    with alone(tmp_path) as (client, address):

        def fault() -> str:
            shown = client.get(f"{address}/trajectories/0.b.0/0").json()
            assert shown["segments"][0]["tokens"]["fate"] == ["masked", "trained", "trained", "trained"]
            told: str = shown["training_fault"]
            return told

        file.write_bytes(whole[:-2])
        assert "cannot be read" in fault()
        file.unlink()
        file.symlink_to("/etc/passwd")
        assert "is a link" in fault()
        file.unlink()
        os.mkfifo(file)
        assert "no regular file" in fault()
        file.unlink()
        (run / "tokens").rmdir()
        (run / "tokens").symlink_to("/etc")
        assert "is a link" in fault()
