"""A server that is killed: what was acknowledged is computed once, and gives the same results. A snapshot is on disk,
with the record that names it, before the earlier one is deleted. The record is its owner's only."""

import signal
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stretto.model.hf import folder as written
from stretto_tinker import checkpoints
from stretto_tinker.compute.base import LocalBackend
from stretto_tinker.record import Record
from stretto_tinker.serve import RECORD
from stretto_tinker.work import models, worker
from tests.launch.running import service
from tests.launch.warm import WarmCommand
from tests.tinker.speaking import Client, Output, a_client, job, serving, tokens_of, told
from tests.tinker.test_training import data_for

_BEGUN = "export TINKER_BASE_URL="
_STEPS = 12


@contextmanager
def tinker(model: Path, folder: Path, *words: str) -> Iterator[tuple[WarmCommand, str]]:
    """The command, and its address once it listens."""
    more: tuple[str | Path, ...] = ("--port", "0", "--name", "base", "--folder", folder, *words)
    with service("tinker", model, *more, serving=_BEGUN) as (process, said):
        (line,) = (line for line in said if line.startswith(_BEGUN))
        yield process, line.removeprefix(_BEGUN).split()[0]


def train(client: Client, id: str, first: int, last: int) -> list[str]:
    """Send the requests of some steps; their ids."""
    asked = []
    for step in range(first, last):
        asked.append(
            client.forward_backward(id, 2 * step + 1, data_for("importance_sampling", step), "importance_sampling")
        )
        asked.append(client.step(id, 2 * step + 2))
    return asked


def results(client: Client, asked: list[str]) -> list[Any]:
    return [client.output(one).metrics if not at % 2 else client.result(one)["metrics"] for at, one in enumerate(asked)]


def final(client: Client, id: str) -> Output:
    return client.output(client.forward_backward(id, 2 * _STEPS + 1, data_for("cross_entropy", 99), forward_only=True))


def test_a_server_killed_twice_gives_what_one_that_lives_gives(model: Path, tmp_path: Path) -> None:
    with tinker(model, tmp_path / "calm") as (_, address):
        calm = Client(address)
        id = calm.create()
        expected, left = results(calm, train(calm, id, 0, _STEPS)), final(calm, id)
    asked: list[str] = []
    with tinker(model, tmp_path / "killed") as (process, address):
        client = Client(address)
        id = client.create()
        asked += train(client, id, 0, 5)
        client.result(asked[3])  # the second step is taken, those after it are on their way
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    with tinker(model, tmp_path / "killed") as (process, address):
        client.address = address
        assert train(client, id, 2, 5) == asked[4:]  # a client that has heard nothing asks again
        asked += train(client, id, 5, 9)
        client.output(asked[10])
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    with tinker(model, tmp_path / "killed") as (_, address):
        client.address = address
        asked += train(client, id, 9, _STEPS)
        found, end = results(client, asked), final(client, id)
    assert found == expected
    assert [row.tolist() for row in end.logprobs] == [row.tolist() for row in left.logprobs]


def test_samples_that_were_acknowledged_are_sampled_again_by_their_seed(backend: LocalBackend, tmp_path: Path) -> None:
    with a_client(backend, tmp_path) as (client, server):
        sampler = client.sampler(0)
        done = client.sample(sampler, 0, [3, 4, 5], n=3, params={"max_tokens": 12})
        first = [tokens_of(one) for one in client.sampled(done).sequences]
        server.worker.stop()  # nothing is computed any more
        asked = client.sample(sampler, 1, [3, 4, 5], n=3, params={"max_tokens": 12, "seed": 5})
        again = client.sample(sampler, 2, [3, 4, 5], n=3, params={"max_tokens": 12, "seed": 5})
        unseeded = client.sample(sampler, 3, [3, 4, 5], n=3, params={"max_tokens": 12})
    with serving(backend, tmp_path) as (address, _):
        client.address = address
        assert [tokens_of(one) for one in client.sampled(done).sequences] == first
        one, other = (client.sampled(id) for id in (asked, again))
        assert [tokens_of(a) for a in one.sequences] == [tokens_of(b) for b in other.sequences]
        assert client.sample(sampler, 3, [3, 4, 5], n=3, params={"max_tokens": 12}) == unseeded
        assert len(client.sampled(unseeded).sequences) == 3


def test_a_snapshot_and_the_requests_behind_it_are_the_state(
    backend: LocalBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a snapshot after each step, with one of the gradient at the end, and with none at all: the same numbers."""
    ends = []
    for name, least in (("often", 0.0), ("last", 1e9), ("never", 1e9)):
        monkeypatch.setattr(models, "_LEAST_SECONDS", least)
        monkeypatch.setattr(models, "_RATIO", 0.0)
        if name == "never":
            monkeypatch.setattr(models.Models, "retire", models.Models.forget)
        folder = tmp_path / name
        with a_client(backend, folder) as (client, _):
            id = client.create()
            results(client, train(client, id, 0, 4))
            client.forward_backward(id, 9, data_for("cross_entropy", 4))
        record = Record(folder / RECORD)
        row = record.model(id)
        record.close()
        assert row is not None
        assert row.snapshot == {"often": 9, "last": 9, "never": -1}[name]
        with serving(backend, folder) as (address, _):
            client.address = address
            norm = client.result(client.step(id, 10))["metrics"]["grad_norm"]
            ends.append((norm, client.output(client.forward_backward(id, 11, data_for("cross_entropy", 5))).metrics))
    assert ends[0] == ends[1] == ends[2]


@pytest.fixture
def _snapshots_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(models, "_LEAST_SECONDS", 0.0)
    monkeypatch.setattr(models, "_RATIO", 0.0)


def played(backend: LocalBackend, folder: Path, broken: str = "") -> Any:
    """The numbers of steps before and after a restart; `broken` of the record fails three times of the worker."""
    with serving(backend, folder) as (address, server), pytest.MonkeyPatch.context() as patch:
        client = Client(address)
        id = client.create()
        results(client, train(client, id, 0, 1))
        left = 3 if broken else 0
        if broken:
            whole = getattr(server.record, broken)

            def failing(*words: Any, **named: Any) -> Any:
                nonlocal left
                if left and threading.current_thread().name == "tinker-worker":
                    left -= 1
                    raise sqlite3.DatabaseError("database disk image is malformed")
                return whole(*words, **named)

            patch.setattr(server.record, broken, failing)
        numbers = results(client, train(client, id, 1, 4))
        end = client.output(client.forward_backward(id, 9, data_for("cross_entropy"))).metrics
        assert left == 0
    with serving(backend, folder) as (address, _):
        client.address = address
        return numbers, end, client.result(client.step(id, 10))["metrics"]


@pytest.fixture(scope="module")
def calm() -> list[Any]:
    """The numbers where nothing is broken, once they are there."""
    return []


@pytest.mark.usefixtures("_snapshots_at_once")
@pytest.mark.parametrize("broken", ["settle", "snapshotted", "model"])
def test_a_record_that_is_malformed_for_a_while_costs_no_step_and_takes_none_twice(
    broken: str, backend: LocalBackend, tmp_path: Path, calm: list[Any]
) -> None:
    """SQLite says so of a page that it cannot read (a `DatabaseError` that is no `OperationalError`)."""
    if not calm:
        calm.append(played(backend, tmp_path / "calm"))
    assert played(backend, tmp_path / "broken", broken) == calm[0]


def test_what_holds_prompts_and_a_secret_is_for_its_owner_only(tmp_path: Path) -> None:
    """Also a record that an earlier version made, with its log."""
    place = tmp_path / RECORD
    for _ in range(2):
        record = Record(place)
        record.fact("secret", "x" * 64)
        assert {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {
            RECORD + log: 0o600 for log in ("", "-wal", "-shm")
        }
        record.close()
        place.chmod(0o644)


def test_a_snapshot_is_on_disk_before_the_last_one_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the two, a loss of power leaves the one that the record names: its commit is synced, after all files."""
    synced: list[Path] = []
    monkeypatch.setattr(written, "sync", synced.append)
    record, weights = Record(tmp_path / RECORD), checkpoints.Weights(tmp_path)
    said: list[str] = []
    record._connection.set_trace_callback(said.append)

    def save(folder: Path) -> None:
        (folder / "a.safetensors").write_bytes(b"weights")
        assert said == []

    folder = weights.snapshot("s:1", 7)
    weights.write(folder, save)
    assert [path.name for path in synced[:1]] == ["a.safetensors"]
    assert synced[2:] == [folder.parent, folder.parent.parent, tmp_path]  # of those that were made, each parent
    record.snapshotted("s:1", 7)
    assert said[0] == "PRAGMA synchronous = FULL"
    assert said[-2:] == ["COMMIT", "PRAGMA synchronous = NORMAL"]
    assert record._all("PRAGMA synchronous") == [(1,)]
    record.close()


def test_requests_that_come_again_or_out_of_order_are_taken_once(client: Client, id: str) -> None:
    data = data_for("cross_entropy")
    bodies = {seq: job(id, seq, data) for seq in (1, 3, 5)}
    steps = {seq: {"model_id": id, "seq_id": seq, "adam_params": {"learning_rate": 1e-2}} for seq in (2, 4, 6)}
    sent: dict[int, list[str]] = {}

    def send(seq: int) -> None:
        reply = client.post("forward_backward", bodies[seq]) if seq in bodies else client.post("optim_step", steps[seq])
        sent.setdefault(seq, []).append(told(reply)["request_id"])

    threads = [threading.Thread(target=send, args=(seq,)) for seq in (6, 5, 4, 3, 2, 6, 4, 1, 1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len(set(ids)) == 1 for ids in sent.values())
    losses = [client.output(sent[seq][0]).loss for seq in (1, 3, 5)]
    calm = client.create(1)
    expected = []
    for seq in (1, 3, 5):
        expected.append(client.output(client.forward_backward(calm, seq, data)).loss)
        client.result(client.step(calm, seq + 1))
    assert losses == expected
    other = client.post("forward_backward", job(id, 3, data_for("cross_entropy", 1)))
    assert other.status_code == 422
    assert "another request already" in other.text


def test_a_step_without_a_whole_gradient_is_not_taken(client: Client, id: str) -> None:
    good, bad = data_for("cross_entropy"), [([3, 4], {"target_tokens": [4, 99]})]
    before = client.output(client.forward_backward(id, 1, good, forward_only=True)).loss
    assert "there is no gradient" in client.result(client.step(id, 2))["error"]
    client.output(client.forward_backward(id, 3, good))
    failed = client.result(client.forward_backward(id, 4, bad))
    assert failed["category"] == "user"
    assert "data[0].target_tokens: token 99; 0 to 21, the vocabulary" in failed["error"]
    assert "forward_backward 4 before this step failed" in client.result(client.step(id, 5))["error"]
    assert client.output(client.forward_backward(id, 6, good)).loss == before
    assert client.result(client.step(id, 7))["metrics"]["grad_norm"] > 0
