"""A fault that one request or one client meets is its own: the requests of others go on, and none is lost."""

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from google.protobuf.message import EncodeError

from stretto.core.errors import StoreError
from stretto.engine.config import EngineConfig
from stretto_tinker.checkpoints import Place
from stretto_tinker.compute.base import LocalBackend
from stretto_tinker.compute.learner import Learner
from stretto_tinker.compute.sampler import Sampler
from stretto_tinker.record import QUEUED, Asked, Record
from stretto_tinker.serve import TinkerServer
from stretto_tinker.wire.outputs import Sampled, encode_sampled
from stretto_tinker.work import sampling, turns, worker
from stretto_tinker.work.sampling import Engines, Lane, SampleQueue
from tests.launch.running import wait_until
from tests.tinker.speaking import NAME, Client, held, serving, told
from tests.tinker.test_laws import leaves
from tests.tinker.test_training import data_for

_SLOTS = 4
_PROMPT = [3, 4, 5]
_LONG = {"max_tokens": 160, "stop": []}


class OneEngine(LocalBackend):
    """A base model of which there is room for one engine."""

    engines = 0

    def sampled(self, folder: Path | None) -> Sampler:
        self.engines += 1
        if self.engines > 1:
            raise StoreError("no room")
        return super().sampled(folder)


@pytest.fixture(scope="module")
def small(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, TinkerServer]]:
    backend = OneEngine(model, NAME, EngineConfig(slots=_SLOTS, cache_gib=0.25, device="cpu"), 512)
    with serving(backend, tmp_path_factory.mktemp("small")) as found:
        yield found


def test_a_client_for_which_no_engine_can_be_made_fails_alone(small: tuple[str, TinkerServer]) -> None:
    address, server = small
    ann, bob = Client(address, "tml-many"), Client(address, "tml-one")
    many, one = ann.sampler(0), bob.sampler(0)
    with held(server):
        asked = [ann.sample(many, seq, _PROMPT, n=_SLOTS, params=_LONG) for seq in range(3)]
        alone = bob.sample(one, 0, _PROMPT, params=_LONG)
    assert [len(ann.sampled(id).sequences) for id in asked] == [_SLOTS] * 3
    assert bob.fetch(alone).status_code == 200  # computed, or failed with a reason, and settled in any case
    assert len(bob.sampled(bob.sample(one, 1, _PROMPT)).sequences) == 1
    assert cast(OneEngine, server.worker._engines._backend).engines > 1  # a further one was asked for


def test_a_result_that_cannot_be_encoded_fails_its_request_alone(
    server: tuple[str, TinkerServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(sampled: Sampled) -> bytes:
        if len(sampled.sequences) == 3:
            raise EncodeError("too deep")
        return encode_sampled(sampled)

    monkeypatch.setattr(sampling, "encode_sampled", encode)
    address, running = server
    client = Client(address, "tml-encoding")
    sampler = client.sampler(0)
    with held(running):
        asked = [client.sample(sampler, seq, _PROMPT, n=n, params=_LONG) for seq, n in enumerate([1, 3, 2])]
    failed = client.result(asked[1])
    assert failed["category"] == "server"
    assert "too deep" in failed["error"]
    assert [len(client.sampled(asked[at]).sequences) for at in (0, 2)] == [1, 2]


def test_an_engine_that_has_failed_is_gone_under_every_name(backend: LocalBackend) -> None:
    engines = Engines(backend)
    lane = Lane("tinker://a/weights/one")
    kept, failed = engines.of(Lane(""), None), engines.of(lane, None)
    engines.drop(lane.weights)  # the weights were replaced while it had open requests
    engines.discard(failed)
    assert list(engines._engines.values()) == [kept]


def test_cancelled_requests_are_looked_for_once_however_many_they_are(
    server: tuple[str, TinkerServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    searches = 0
    discard: Callable[..., list[Asked]] = SampleQueue.discard

    def counted(queue: SampleQueue, chosen: Callable[[Asked], bool]) -> list[Asked]:
        nonlocal searches
        searches += 1
        return discard(queue, chosen)

    monkeypatch.setattr(SampleQueue, "discard", counted)
    address, running = server
    client = Client(address, "tml-cancelling")
    sampler = client.sampler(0)
    with held(running):
        asked = [client.sample(sampler, seq, _PROMPT, params=_LONG) for seq in range(12)]
        for id in asked[1:]:
            told(client.post("cancel_future", {"request_id": id}))
    assert len(client.sampled(asked[0]).sequences) == 1
    for id in asked[1:]:
        assert "cancelled" in client.result(id)["error"]
    assert searches == 1


@pytest.mark.parametrize("unread", ["next_seq", "begin", "request", "settled", "checkpoint"])
def test_an_accepted_request_is_computed_also_if_the_record_could_not_be_read_then(
    unread: str, server: tuple[str, TinkerServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four times, which are no kills; and others do not wait meanwhile."""
    address, running = server
    client, left, naps = Client(address, f"tml-{unread}"), 0, list[float]()
    model, sampler = client.create(), client.sampler(0)
    whole = getattr(running.record, unread)

    def failing(*words: Any) -> Any:
        nonlocal left
        if left and (unread == "next_seq" or threading.current_thread().name == "tinker-worker"):
            left -= 1
            raise sqlite3.OperationalError("disk I/O error")
        return whole(*words)

    monkeypatch.setattr(worker, "_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(running.record, unread, failing)
    if unread == "settled":  # the model has left the memory and is restored
        running.worker.retire(model, "", ended=False)
        assert leaves(running, model)
        left = 4
        assert client.output(client.forward_backward(model, 1, data_for("cross_entropy"))).loss > 0
    elif unread == "checkpoint":
        left = 4
        assert client.save(model, 1, "one")["path"] == f"tinker://{model}/weights/one"
    else:
        monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic=time.monotonic, sleep=naps.append))
        left = 4
        if unread == "next_seq":
            assert client.create(1)
        else:
            assert len(client.sampled(client.sample(sampler, 0, _PROMPT)).sequences) == 1
    assert (left, naps) == (0, [])


def failing_once(running: TinkerServer, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make the first look for a next number fail, as by a bad disk; returns whose numbers are looked for."""
    whole, read = running.record.next_seq, list[str]()

    def failing(lane: str) -> int | None:
        read.append(lane)
        if len(read) == 1:
            raise sqlite3.OperationalError("disk I/O error")
        return whole(lane)

    monkeypatch.setattr(running.record, "next_seq", failing)
    return read


def test_a_request_waits_no_longer_than_told_where_the_pause_ends_while_the_thread_looks(
    server: tuple[str, TinkerServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reading of the clock is 0.6 s after the one before: a pause of 1 s ends between two of them."""
    address, running = server
    client, read, ticks = Client(address, "tml-slow"), failing_once(running, monkeypatch), count()
    monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic=lambda: 0.6 * next(ticks), sleep=time.sleep))
    body = {"session_id": client.opened(), "model_seq_id": 0, "base_model": NAME, "lora_config": {"rank": 4}}
    asked = told(client.post("create_model", body))["request_id"]
    wait_until(lambda: len(read) > 1, "the second try", seconds=10)
    assert client.result(asked)["model_id"]


@pytest.mark.parametrize(("first", "says"), [(1, "grad_norm"), (2, "the requests before it never came")])
def test_accepted_requests_of_which_the_first_waits_for_the_record_are_settled_though_their_session_ends(
    first: int, says: str, server: tuple[str, TinkerServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, running = server
    client = Client(address, "tml-ended")
    model = client.create()
    running.worker.retire(model, "", ended=False)
    assert leaves(running, model)
    failing_once(running, monkeypatch)
    asked = [client.forward_backward(model, first, data_for("cross_entropy")), client.step(model, first + 1)]
    row = running.record.session(client.opened())
    assert row is not None
    running._service.end_session(row, "asked for")
    wait_until(lambda: all(states(running, asked)), "both are settled", seconds=10)
    assert says in str(client.result(asked[1]))
    assert leaves(running, model)
    assert not running.worker._leaving


def test_a_disk_that_is_full_is_told_as_such_and_leaves_the_record_as_it_was(tmp_path: Path) -> None:
    record = Record(tmp_path / "tinker.sqlite")
    [(pages,)] = record._all("PRAGMA page_count")
    record._all(f"PRAGMA max_page_count = {pages + 1}")
    asked = Asked("a:0", "a", 0, "ann", "sample", bytes(100_000))
    with pytest.raises(sqlite3.OperationalError, match="database or disk is full"):
        record.ask(asked)
    assert record.ask(replace(asked, body=b""))[2]
    record.close()


def test_a_kill_is_laid_to_what_was_computed_at_that_moment(
    server: tuple[str, TinkerServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples that are open while another client trains are not blamed for a kill by its training."""
    address, running = server
    ann, bob = Client(address, "tml-samples"), Client(address, "tml-trains")
    sampler, model = ann.sampler(0), bob.create()
    blamed: dict[str, list[tuple[str, int]]] = {"training": [], "sampling": []}

    def noting(turn: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **settings: Any) -> Any:
            blamed[turn] += running.record._all("SELECT id, times FROM begun WHERE times > 0")
            return inner(*arguments, **settings)

        return noted

    monkeypatch.setattr(turns, "TURN_TOKENS", 8)  # the samples take several turns
    monkeypatch.setattr(Learner, "_micro_batch", noting("training", Learner._micro_batch))
    monkeypatch.setattr(Sampler, "step", noting("sampling", Sampler.step))
    with held(running):
        samples = [ann.sample(sampler, seq, _PROMPT, params={"max_tokens": 100, "stop": []}) for seq in range(2)]
        trained = [bob.forward_backward(model, seq, data_for("cross_entropy")) for seq in (1, 2)]
    assert all(ann.sampled(id).sequences for id in samples)
    assert all(bob.output(id).loss > 0 for id in trained)
    assert set(blamed["training"]) == {(id, 1) for id in trained}
    assert set(blamed["sampling"]) == {(id, 1) for id in samples}


def test_a_list_of_sessions_reads_the_checkpoints_once(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    key, reads = "tml-lists", 0
    checkpoints: Callable[..., Any] = Record.checkpoints

    def counted(record: Record, **which: Any) -> Any:
        nonlocal reads
        reads += which.get("owner") is not None  # the sweep, which comes meanwhile or not, reads those of all
        return checkpoints(record, **which)

    first, second = Client(address, key), Client(address, key)
    first.save(first.create(), 1, "one")
    second.opened()
    with monkeypatch.context() as patch:
        patch.setattr(Record, "checkpoints", counted)
        found = told(first.post("sessions/search", {"limit": 100}))["sessions"]
    assert {one["session_id"]: one["checkpoints_count"] for one in found} == {first.session: 1, second.session: 0}
    assert reads == 1


@pytest.mark.parametrize("shape", ["[]", "3", "null", '"x"', "{}", '{"base": 3, "shape": []}', "{"])
def test_weights_whose_shape_is_damaged_fail_their_own_requests(
    shape: str, backend: LocalBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where another's samples are under way, so that the room for them is looked for."""
    monkeypatch.setattr(turns, "TURN_TOKENS", 8)
    with serving(backend, tmp_path) as (address, server):
        ann, bob = Client(address, "tml-ann"), Client(address, "tml-bob")
        paths = [one.save(one.create(), 1, "it", "save_weights_for_sampler")["path"] for one in (ann, bob)]
        whole, damaged = ann.sampler(0, paths[0]), bob.sampler(0, paths[1])
        (server._service.weights.folder(Place.of(paths[1])) / "shape.json").write_text(shape)
        with held(server):
            asked = [ann.sample(whole, 0, _PROMPT, params=_LONG), bob.sample(damaged, 0, _PROMPT)]
        wait_until(lambda: all(states(server, asked)), "both are settled", seconds=30)
        assert ann.sampled(asked[0]).sequences
        assert "tinker://" in bob.result(asked[1])["error"]


def states(server: TinkerServer, asked: list[str]) -> list[bool]:
    """Whether each request is settled."""
    return [found is not None and found.state != QUEUED for found in map(server.record.request, asked)]


@pytest.mark.parametrize("broken", ["_ready", "_held", "_turns"])
def test_a_bug_in_the_choice_of_a_turn_does_not_end_the_thread(
    broken: str, server: tuple[str, TinkerServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, running = server
    client, called = Client(address, f"tml{broken}"), count()
    owner, name = (running.worker._turns, "choose") if broken == "_turns" else (running.worker, broken)
    whole = getattr(owner, name)

    def failing(*words: Any) -> Any:
        if next(called) < 2:
            raise TypeError("a bug")
        return whole(*words)

    monkeypatch.setattr(worker, "_PAUSE_SECONDS", 0.01)
    model = client.create()
    monkeypatch.setattr(owner, name, failing)
    asked = client.forward_backward(model, 1, data_for("cross_entropy"))
    wait_until(lambda: all(states(running, [asked])), "it is settled", seconds=10)
    assert client.output(asked).loss > 0
