"""Laws of the server under any requests, in any order.

- Every request that was acknowledged is settled, its client's neighbours' too, whatever it asked for.
- A sampler has the weights of its name as they were saved last.
- What a client left behind, by silence or by an end, is computed, and leaves the memory and the disk.
- A number has one body.
- A request that kills the server is given up."""

import itertools
import shutil
import sqlite3
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stretto_tinker.compute.base import LocalBackend
from stretto_tinker.compute.sampler import Sampler
from stretto_tinker.http.service import Service
from stretto_tinker.serve import TinkerServer
from tests.tinker.speaking import Client, a_client, held, serving, told
from tests.tinker.test_training import data_for

_FEW = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
_NUMBERS = itertools.count(1)
_PROMPT = [3, 4, 5, 6]


def leaves(server: TinkerServer, model: str) -> bool:
    """Whether the model is computed to its end and leaves the memory."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        with server.worker._wake:
            done = not (server.worker._ready() or server.worker._orders)
        if done and model not in server.worker.models._live:
            return True
        time.sleep(0.02)
    return False


def scores(client: Client, sampler: str, seq: int) -> list[float]:
    reply = client.sampled(client.sample(sampler, seq, _PROMPT, prompt_logprobs=True))
    return np.frombuffer(reply.prompt_logprobs, np.float32)[1:].tolist()  # type: ignore[no-any-return]


def learnt(client: Client, model: str, seq: int) -> list[float]:
    """The same numbers, by the model that is trained."""
    data = [(_PROMPT[:-1], {"target_tokens": _PROMPT[1:]})]
    return client.output(client.forward_backward(model, seq, data, forward_only=True)).logprobs[0].tolist()  # type: ignore[no-any-return]


# Samples

_IDS = st.lists(st.integers(-2, 30) | st.just(10**6), min_size=1, max_size=4)
_SAMPLES = st.fixed_dictionaries(
    {},
    optional={
        "num_samples": st.integers(0, 3),
        "prompt_logprobs": st.booleans(),
        "topk_prompt_logprobs": st.integers(0, 40),
        "topk_sample_logprobs": st.integers(0, 40),
        "prompt_alt_tokens_k": st.integers(0, 3),
        "prompt_logprobs_last_n": st.integers(-1, 5),
        "target_prompt_logprobs": st.builds(lambda ids: {"data": ids, "shape": [len(ids), 1]}, _IDS),
        "prompt": st.builds(lambda ids: {"chunks": [{"type": "encoded_text", "tokens": ids}]}, _IDS),
        "sampling_params": st.fixed_dictionaries(
            {"max_tokens": st.integers(0, 4)},
            optional={
                "temperature": st.sampled_from([0.0, 1e-44, 1e-3, 1.0, 99.0, -1.0]),
                "top_p": st.sampled_from([0.0, 1e-9, 0.5, 1.0]),
                "top_k": st.integers(-2, 3),
                "stop": st.sampled_from([[], [5], "7", ["7", 5], [-1], [10**9]]),
                "seed": st.integers(-(2**40), 2**40),
            },
        ),
    },
)


@_FEW
@given(wild=st.lists(_SAMPLES, min_size=1, max_size=4))
def test_whatever_one_client_asks_all_that_was_acknowledged_is_settled(
    server: tuple[str, TinkerServer], wild: list[dict[str, Any]]
) -> None:
    address, running = server
    one, other = Client(address, "tml-wild"), Client(address, "tml-good")
    ours, theirs = one.sampler(0), other.sampler(0)
    plain = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": _PROMPT}]}, "num_samples": 1}
    with held(running):
        replies = []
        for body in wild:
            named = {"sampling_session_id": ours, "seq_id": next(_NUMBERS), "sampling_params": {"max_tokens": 2}}
            replies.append(one.post("asample", {**plain, **named, **body}))
        good = other.sample(theirs, next(_NUMBERS), _PROMPT, params={"max_tokens": 3})
    assert {reply.status_code for reply in replies} <= {200, 400}
    assert len(other.sampled(good).sequences) == 1
    for reply in replies:
        if reply.status_code == 200:
            assert one.fetch(reply.json()["request_id"]).status_code == 200


def test_an_engine_that_fails_is_told_to_its_clients_and_replaced(
    backend: LocalBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with a_client(backend, tmp_path) as (client, server):
        sampler = client.sampler(0)
        step, left = Sampler.step, 1

        def failing(self: Sampler) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                raise RuntimeError("no memory for this step")
            return step(self)

        monkeypatch.setattr(Sampler, "step", failing)
        with held(server):
            asked = [client.sample(sampler, seq, _PROMPT) for seq in range(2)]
        failed = client.result(asked[0])
        assert failed["category"] == "server"
        assert "RuntimeError: no memory for this step" in failed["error"]
        assert client.fetch(asked[1]).status_code == 200  # it failed too, or the new engine has sampled it
        assert client.sampled(client.sample(sampler, 2, _PROMPT)).sequences


# Weights and names


_ACTS = ["train", "overwrite", "again", "busy"]


def test_a_sampler_has_the_weights_that_its_name_has(server: tuple[str, TinkerServer]) -> None:
    weights_after(server, ["train", "overwrite", "train", "busy", "train", "again"])


@pytest.mark.long
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(_ACTS), min_size=3, max_size=6))
def test_a_sampler_has_the_weights_of_its_name_in_any_order(server: tuple[str, TinkerServer], acts: list[str]) -> None:
    weights_after(server, acts)


def weights_after(server: tuple[str, TinkerServer], acts: list[str]) -> None:
    address, running = server
    client = Client(address, f"tml-{next(_NUMBERS)}")
    model, seq, samplers = client.create(), 0, itertools.count()

    def next_seq() -> int:
        nonlocal seq
        seq += 1
        return seq

    def train() -> None:
        client.output(client.forward_backward(model, next_seq(), data_for("cross_entropy", seq)))
        client.result(client.step(model, next_seq(), learning_rate=0.05))

    train()
    path = client.save(model, next_seq(), "latest", "save_weights_for_sampler")["path"]
    assert "is there already" in client.save(model, next_seq(), "latest", "save_weights_for_sampler")["error"]
    for act in acts:
        if act == "train":
            train()
            continue
        if act == "busy":  # a sampler of the name is sampling while it gets other weights
            with held(running):
                busy = client.sample(client.sampler(next(samplers), path), 0, _PROMPT, params={"max_tokens": 60})
            del busy
        if act == "again":
            assert client.delete(f"training_runs/{model}/checkpoints/sampler_weights/latest").status_code == 200
        saved = client.save(model, next_seq(), "latest", "save_weights_for_sampler", overwrite=act != "again")
        assert saved["path"] == path
        found = scores(client, client.sampler(next(samplers), path), 1)
        np.testing.assert_allclose(found, learnt(client, model, next_seq()), atol=1e-4)


def test_engines_of_weights_that_nobody_samples_by_are_few(backend: LocalBackend, tmp_path: Path) -> None:
    with a_client(backend, tmp_path) as (client, server):
        model = client.create()
        paths = [client.save(model, seq, f"w{seq}", "save_weights_for_sampler")["path"] for seq in range(1, 6)]
        samplers = [client.sampler(seq, path) for seq, path in enumerate(paths)]
        with held(server):  # all of them are needed at once
            asked = [client.sample(sampler, 0, _PROMPT) for sampler in samplers]
        for one in asked:
            client.sampled(one)
        client.sampled(client.sample(client.sampler(20), 0, _PROMPT))
        assert len(server.worker._engines._engines) <= 3 + 1


def test_a_number_of_a_sampler_that_is_in_use_is_refused(client: Client) -> None:
    client.sampler(0)
    failed = client.save(client.create(), 1, None, "save_weights_for_sampler", sampling_session_seq_id=0)
    assert "sampling_session_seq_id: 0 is another sampler already" in failed["error"]


@pytest.mark.parametrize("state", ["queued", "done", "forgotten"])
def test_a_number_has_one_body_in_every_state(state: str, server: tuple[str, TinkerServer]) -> None:
    address, running = server
    client = Client(address, f"tml-one-{state}")
    sampler = client.sampler(0)
    with held(running):
        asked = client.sample(sampler, 1, _PROMPT)
        if state != "queued":
            running.worker._orders.insert(0, lambda: None)
        else:
            _refuses_another(client, sampler)
    client.sampled(asked)
    if state == "forgotten":
        running.record.forget_results(sampler, [asked])
    _refuses_another(client, sampler)
    assert client.sample(sampler, 1, _PROMPT) == asked


def _refuses_another(client: Client, sampler: str) -> None:
    chunks = [{"type": "encoded_text", "tokens": [5, 6, 7]}]
    body = {"sampling_session_id": sampler, "seq_id": 1, "num_samples": 1, "prompt": {"chunks": chunks}}
    assert client.post("asample", {**body, "sampling_params": {"max_tokens": 8}}).status_code == 422


# Clients that leave


_WAYS = ["silent", "finished", "killed"]


@pytest.mark.parametrize("how", _WAYS)
def test_what_a_client_left_is_computed_and_leaves_the_memory(how: str, backend: LocalBackend, tmp_path: Path) -> None:
    whole_after_a_leave(backend, tmp_path, {1, 2, 4, 7}, how)  # 3 is missing


@pytest.mark.long
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sent=st.sets(st.integers(1, 8), min_size=1), how=st.sampled_from(_WAYS))
def test_whatever_a_client_left_is_computed(backend: LocalBackend, tmp_path: Path, sent: set[int], how: str) -> None:
    whole_after_a_leave(backend, tmp_path / str(next(_NUMBERS)), sent, how)


def whole_after_a_leave(backend: LocalBackend, folder: Path, sent: set[int], how: str) -> None:
    data = data_for("cross_entropy", sequences=1)

    def send(client: Client, model: str, seq: int) -> str:
        return client.forward_backward(model, seq, data) if seq % 2 else client.step(model, seq)

    with a_client(backend, folder) as (client, server):
        model = client.create()
        with held(server):
            asked = {seq: send(client, model, seq) for seq in sorted(sent, reverse=True)}
            if how == "finished":
                told(client.post(f"sessions/{client.session}/finish", {"reason": {"type": "success"}}))
            elif how == "silent":
                server._service.look_after(-1.0)
        assert how == "killed" or leaves(server, model)
        states = {seq: server.record.request(id) for seq, id in asked.items()}
    if how == "finished":
        assert all(row is not None and row.state != "queued" for row in states.values())
        return
    with serving(backend, folder) as (address, server):
        client.address = address
        for seq in set(range(1, 9)) - sent:  # it comes back, and sends what was missing
            asked[seq] = send(client, model, seq)
        losses = [client.output(asked[seq]).loss for seq in range(1, 9, 2)]
        steps = [client.result(asked[seq])["metrics"]["grad_norm"] for seq in range(2, 9, 2)]
        assert losses == sorted(losses, reverse=True)
        assert all(norm > 0 for norm in steps)


def test_a_session_that_ends_with_work_in_flight_is_the_next_servers(backend: LocalBackend, tmp_path: Path) -> None:
    with a_client(backend, tmp_path) as (client, server):
        model = client.create()
        server.worker.stop()
        early = client.step(model, 7)
        told(client.post(f"sessions/{client.session}/finish", {"reason": {"type": "success"}}))
    with serving(backend, tmp_path) as (address, server):
        client.address = address
        assert "the requests before it never came" in client.result(early)["error"]
        assert model not in server.worker._models


def test_what_is_on_disk_is_what_is_on_record(backend: LocalBackend, tmp_path: Path) -> None:
    with a_client(backend, tmp_path) as (client, server):
        model = client.create()
        for seq in range(1, 6):  # a follower needs the newest weights, and a late request those before
            client.save(model, seq, None, "save_weights_for_sampler", sampling_session_seq_id=seq, kind="inflight")
        weights = tmp_path / "weights" / model.replace(":", "_")
        assert len(list((weights / "sampler_weights").iterdir())) == 2
        client.save(model, 6, "kept")
        shutil.copytree(weights / "weights" / "kept", weights / "weights" / ".kept.77.partial")
        shutil.copytree(weights / "weights" / "kept", weights / "sampler_weights" / "unknown")
        shutil.copytree(weights / "weights" / "kept", tmp_path / "snapshots" / "gone_train_0" / "4")
        assert scores(client, client.sampler(9, f"tinker://{model}/weights/kept"), 1)
    (weights / "weights" / "kept").rename(weights / "weights" / ".kept.77.replaced")  # killed while it was overwritten
    with serving(backend, tmp_path) as (address, server):
        found = {one.relative_to(weights).as_posix() for one in weights.glob("*/*")}
        assert found - {one for one in found if "unnamed" in one} == {"weights/kept"}
        assert not (tmp_path / "snapshots" / "gone_train_0" / "4").exists()
        client.address = address
        row = server.record.session(client.session)
        assert row is not None
        server._service.end_session(row, "silent")
        server._service.look_after(1e9)
        assert [one.name for one in weights.glob("*/*")] == ["kept"]


def test_the_disk_of_a_long_session_and_of_ended_ones_is_bounded(backend: LocalBackend, tmp_path: Path) -> None:
    """Weeks go by as the record's dates are moved."""
    with a_client(backend, tmp_path) as (client, server):
        model, data = client.create(), data_for("cross_entropy")
        samplers = []
        for at in range(8):  # a loop that samples by the weights of each step
            client.output(client.forward_backward(model, 3 * at + 1, data))
            client.result(client.step(model, 3 * at + 2))
            saved = client.save(model, 3 * at + 3, None, "save_weights_for_sampler", sampling_session_seq_id=at)
            samplers.append(saved["sampling_session_id"])
        client.save(model, 25, "for-an-hour", ttl_seconds=3600)
        client.save(model, 26, "kept")
        server.record._all("UPDATE checkpoints SET created = created - 7200, expires = expires - 7200")
        client.sampled(client.sample(samplers[1], 0, _PROMPT))  # an old one that is in use
        server._service.look_after(1e9)
        weights = tmp_path / "weights" / model.replace(":", "_")
        kept = {f"unnamed-{3 * at + 3}" for at in (1, 4, 5, 6, 7)} | {"kept"}
        assert {one.name for one in weights.glob("*/*")} == kept
        assert "are not there" in client.result(client.sample(samplers[0], 0, _PROMPT))["error"]
        assert client.sampled(client.sample(samplers[7], 0, _PROMPT)).sequences
        server.worker.retire(model, "", ended=False)  # a snapshot is written, and what was fetched long ago goes
        assert leaves(server, model)
        server.record._all("UPDATE fetched SET at = at - 100000")
        server._service.look_after(1e9)
        [(left,)] = server.record._all("SELECT COUNT(*) FROM requests WHERE lane = ? AND result IS NOT NULL", model)
        assert left == 0
        client.output(client.forward_backward(model, 27, data))  # and the model goes on
        assert list((tmp_path / "snapshots").glob("*/*"))
        told(client.post(f"sessions/{client.session}/finish", {"reason": {"type": "success"}}))
        assert leaves(server, model)
        assert not list((tmp_path / "snapshots").glob("*/*"))
        server.record._all("UPDATE sessions SET ended_at = ended_at - 100000")
        server._service.look_after(1e9)
        assert [one.name for one in weights.glob("*/*")] == ["kept"]
        assert server.record._all("SELECT COUNT(*) FROM requests") == [(0,)]
        assert server.record._all("SELECT COUNT(*) FROM samplers") == [(0,)]


def test_a_load_that_comes_again_is_answered_although_its_checkpoint_is_gone(client: Client, id: str) -> None:
    path = client.save(id, 1, "x")["path"]
    body = {"model_id": id, "seq_id": 2, "path": path, "optimizer": True}
    first = told(client.post("load_weights", body))
    assert client.result(first["request_id"])["path"] == path
    client.delete(f"training_runs/{id}/checkpoints/weights/x")
    assert told(client.post("load_weights", body)) == first
    assert client.post("load_weights", {**body, "optimizer": False}).status_code == 422


def test_a_record_that_cannot_be_read_does_not_end_the_server(
    backend: LocalBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with a_client(backend, tmp_path) as (client, server):
        client.opened()

        def failing(*_: Any) -> Any:
            raise sqlite3.OperationalError("disk I/O error")

        for name in ("samplers", "checkpoints", "forget_sessions"):
            monkeypatch.setattr(server.record, name, failing)
        server._service.look_after(-1.0)
        monkeypatch.undo()
        assert client.session in server._service._seen  # the next sweep looks again
        server._service.look_after(-1.0)
        assert client.session in server._service._silent
        assert client.post("session_heartbeat", {"session_id": client.session}).status_code == 200
        assert client.session not in server._service._silent
        assert isinstance(server._service, Service)


def test_a_request_under_which_the_server_died_three_times_is_given_up(backend: LocalBackend, tmp_path: Path) -> None:
    with a_client(backend, tmp_path) as (client, server):
        model, sampler = client.create(), client.sampler(0)
        server.worker.stop()
        deadly = client.forward_backward(model, 1, data_for("cross_entropy"))
        step = client.step(model, 2)
        sample, other = (client.sample(sampler, seq, _PROMPT) for seq in range(2))
        for id in (deadly, sample):
            assert [server.record.begin(id) for _ in range(3)] == [1, 2, 3]  # what three kills leave
        server.worker.stop = lambda seconds=30.0: None  # type: ignore[method-assign]  # nor does this one end well
    with serving(backend, tmp_path) as (address, server):
        client.address = address
        for id in (deadly, sample):
            failed = client.result(id)
            assert (failed["category"], failed["error"][:29]) == ("server", "the server was killed 3 times")
        assert "forward_backward 1 before this step failed: the server was killed" in client.result(step)["error"]
        assert client.sampled(other).sequences
        assert client.output(client.forward_backward(model, 3, data_for("cross_entropy"))).loss > 0


def test_a_result_that_no_row_can_hold_fails_its_request_and_is_no_part_of_the_gradient(
    backend: LocalBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with a_client(backend, tmp_path) as (client, server):
        model, data = client.create(), data_for("cross_entropy")
        client.output(client.forward_backward(model, 1, data))
        settle = server.record.settle

        def failing(id: str, state: str, *more: Any, **named: Any) -> None:
            if id.endswith(":2") and state == "done":
                raise sqlite3.DataError("string or blob too big")
            settle(id, state, *more, **named)

        monkeypatch.setattr(server.record, "settle", failing)
        failed = client.result(client.forward_backward(model, 2, data))
        monkeypatch.undo()
        assert "the result cannot be kept: string or blob too big" in failed["error"]
        assert "before this step failed" in client.result(client.step(model, 3))["error"]
        client.output(client.forward_backward(model, 4, data))
        norm = client.result(client.step(model, 5))["metrics"]["grad_norm"]
        calm = client.create(1)
        client.output(client.forward_backward(calm, 1, data))
        assert client.result(client.step(calm, 2))["metrics"]["grad_norm"] == norm
