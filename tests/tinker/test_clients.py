"""Clients beside each other: what is another's is not there, and turns are fair."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stretto_tinker.compute.base import LocalBackend
from stretto_tinker.record import Asked
from stretto_tinker.serve import TinkerServer
from stretto_tinker.work.sampling import SampleQueue, Waiting
from tests.tinker.speaking import Client, a_client, held, job, serving, tokens_of, told
from tests.tinker.test_training import data_for


def test_nothing_of_another_key_is_there(address: str) -> None:
    ann, bob = Client(address, "tml-ann"), Client(address, "tml-bob")
    id = ann.create()
    asked = ann.forward_backward(id, 1, data_for("cross_entropy"))
    ann.output(asked)
    path = ann.save(id, 2, "mine")["path"]
    sampler = ann.sampler(0, path)
    sample = ann.sample(sampler, 0, [3, 4])
    foreign = [
        bob.post("forward_backward", job(id, 3, data_for("cross_entropy"))),
        bob.post("optim_step", {"model_id": id, "seq_id": 3, "adam_params": {}}),
        bob.post("get_info", {"model_id": id}),
        bob.post("retrieve_future", {"request_id": asked}),
        bob.post("cancel_future", {"request_id": sample}),
        bob.post("retrieve_futures", {"target": {"sampling_session_id": sampler}, "timeout": 0}),
        bob.post("session_heartbeat", {"session_id": ann.session}),
        bob.post(f"sessions/{ann.session}/finish", {"reason": {"type": "success"}}),
        bob.post("weights_info", {"tinker_path": path}),
        bob.get(f"training_runs/{id}"),
        bob.get(f"training_runs/{id}/checkpoints"),
        bob.get(f"samplers/{sampler}"),
        bob.delete(f"training_runs/{id}/checkpoints/weights/mine"),
        bob.post(
            "create_sampling_session", {"session_id": bob.opened(), "sampling_session_seq_id": 0, "model_path": path}
        ),
    ]
    assert [reply.status_code for reply in foreign] == [404] * len(foreign)
    assert told(bob.get("training_runs"))["training_runs"] == []
    assert told(bob.get("checkpoints"))["checkpoints"] == []
    assert ann.session not in told(bob.get("sessions"))["sessions"]
    assert len(told(ann.get("checkpoints"))["checkpoints"]) == 1


def test_published_weights_may_be_read_by_others_and_changed_by_none(address: str) -> None:
    ann, bob = Client(address, "tml-ann2"), Client(address, "tml-bob2")
    id = ann.create()
    path = ann.save(id, 1, "shared", "save_weights_for_sampler")["path"]
    at = f"training_runs/{id}/checkpoints/sampler_weights/shared"
    assert bob.post("weights_info", {"tinker_path": path}).status_code == 404
    told(ann.post(f"{at}/publish"))
    assert told(bob.post("weights_info", {"tinker_path": path}))["lora_rank"] == 4
    assert len(bob.sampled(bob.sample(bob.sampler(0, path), 0, [3, 4])).sequences) == 1
    assert bob.delete(at).status_code == 404
    told(ann.delete(f"{at}/publish"))
    assert bob.post("weights_info", {"tinker_path": path}).status_code == 404


def test_only_keys_that_were_given_are_let_in(backend: LocalBackend, tmp_path: Path) -> None:
    with serving(backend, tmp_path, ["tml-in"]) as (address, _):
        assert Client(address, "tml-in").get("get_server_capabilities").status_code == 200
        for key in ("tml-out", "", "tml-i"):
            reply = Client(address, key).get("get_server_capabilities")
            assert (reply.status_code, reply.json()["detail"]) == (401, "X-API-Key: the key is missing or wrong")


def test_samplers_in_flight_follow_the_newest_weights(client: Client, id: str) -> None:
    first = client.save(id, 1, None, "save_weights_for_sampler", sampling_session_seq_id=0, kind="inflight")
    frozen = client.save(id, 2, None, "save_weights_for_sampler", sampling_session_seq_id=1)
    sampler, kept = first["sampling_session_id"], frozen["sampling_session_id"]
    prompt = [3, 4, 5, 6]

    def score(one: str, seq: int) -> bytes:
        return bytes(client.sampled(client.sample(one, seq, prompt, prompt_logprobs=True)).prompt_logprobs)

    before = score(sampler, 0)
    client.forward_backward(id, 3, data_for("cross_entropy"))
    client.step(id, 4, learning_rate=0.05)
    client.save(id, 5, None, "save_weights_for_sampler", sampling_session_seq_id=2, kind="inflight")
    assert score(sampler, 1) != before
    assert score(kept, 0) == before


def test_a_client_that_finishes_leaves_its_work_done_and_its_session_closed(address: str) -> None:
    client = Client(address, "tml-done")
    id = client.create()
    asked = client.forward_backward(id, 1, data_for("cross_entropy"))
    early = client.forward_backward(id, 7, data_for("cross_entropy"))  # 2 to 6 never come
    told(client.post(f"sessions/{client.session}/finish", {"reason": {"type": "success"}}))
    assert client.output(asked).loss > 0
    assert client.post("forward_backward", job(id, 2, data_for("cross_entropy"))).status_code == 410
    assert client.post("session_heartbeat", {"session_id": client.session}).status_code == 410
    assert "the requests before it never came" in client.result(early)["error"]


def test_sessions_are_searched_by_name_metadata_and_status(address: str) -> None:
    names, ids, client = ["nightly run", "nightly test", "other"], list[str](), Client(address, "tml-search")
    for at, name in enumerate(names):
        body = {"tags": [], "user_metadata": {"at": str(at)}, "sdk_version": "test", "display_name": name}
        ids.append(told(client.post("create_session", body, headers={"x-idempotency-key": str(at)}))["session_id"])
    told(client.post(f"sessions/{ids[1]}/finish", {"reason": {"type": "errored"}}))

    def found(**wanted: Any) -> list[str]:
        return [one["session_id"] for one in told(client.post("sessions/search", wanted))["sessions"]]

    assert set(found(owner={"type": "own"}, user_metadata={})) == set(ids)  # as the SDK asks when nothing is given
    assert set(found(owner={"type": "accessible"}, display_name="RUN nightly")) == {ids[0]}
    assert set(found(display_name="nightly", session_id=ids[2])) == set(ids)
    assert found(user_metadata={"at": "2"}) == [ids[2]]
    assert found(user_metadata={"at": 2}) == []
    assert found(owner={"type": "user", "owner_urns": ["nobody"]}) == []
    assert set(found(statuses=[{"type": "active"}])) == {ids[0], ids[2]}
    assert found(statuses=[{"type": "client_finished", "reasons": ["errored"]}]) == [ids[1]]
    assert found(statuses=[{"type": "client_finished", "reasons": ["success"]}, {"type": "failed"}]) == []
    pages, cursor = list[str](), None
    while len(pages) < 3:
        page = told(client.post("sessions/search", {"limit": 1, "cursor": cursor}))
        pages += [one["session_id"] for one in page["sessions"]]
        cursor = page["next_cursor"]
    assert (sorted(pages), cursor) == (sorted(ids), None)
    assert Client(address, "tml-else").post("sessions/search", {"session_id": ids[0]}).json()["sessions"] == []
    refused = {"project_ids": ["p"], "statuses": [{"type": "asleep"}], "owner": {"type": "all"}, "cursor": "x"}
    for name, value in refused.items():
        reply = client.post("sessions/search", {name: value})
        assert (reply.status_code, name in reply.json()["detail"]) == (400, True), reply.text


def test_sampled_logprobs_score_again_to_1e_4(client: Client, id: str) -> None:
    client.forward_backward(id, 1, data_for("cross_entropy"))
    client.step(id, 2, learning_rate=0.05)
    sampler = client.save(id, 3, None, "save_weights_for_sampler", sampling_session_seq_id=0)["sampling_session_id"]
    prompt, numbers = [3, 4, 5], itertools.count()
    ways: list[tuple[dict[str, Any], set[int]]]  # what is asked, and the tokens that end an answer: 1 the end, 9 a "7"
    ways = [({}, {1}), ({"stop": []}, set()), ({"stop": [5]}, {1, 5}), ({"stop": "7"}, {1, 9})]
    for stop, ends in ways:
        asked = client.sample(sampler, next(numbers), prompt, n=4, params={"max_tokens": 40, **stop})
        for sequence in client.sampled(asked).sequences:
            tokens = tokens_of(sequence)
            scored = client.sample(sampler, next(numbers), [*prompt, *tokens], prompt_logprobs=True)
            again = np.frombuffer(client.sampled(scored).prompt_logprobs, np.float32)[len(prompt) :]
            np.testing.assert_allclose(again, np.frombuffer(sequence.logprobs, np.float32), atol=1e-4)
            ended = tokens[-1] in ends  # the last of 40 may be an end as well
            assert (sequence.stop_reason, ends & {*tokens[:-1]}) == (0 if ended else 1, set())
            assert ended or len(tokens) == 40


def test_what_only_an_ended_session_knows_is_removed(backend: LocalBackend, tmp_path: Path) -> None:
    with a_client(backend, tmp_path) as (client, server):
        id = client.create()
        client.save(id, 1, None, "save_weights_for_sampler", sampling_session_seq_id=0)
        client.save(id, 2, "kept")
        asked = client.forward_backward(id, 3, data_for("cross_entropy"))
        client.output(asked)
        told(client.post(f"sessions/{client.session}/finish", {"reason": {"type": "success"}}))
        assert [one["checkpoint_id"] for one in told(client.get("checkpoints"))["checkpoints"]] == ["weights/kept"]
        assert not list((tmp_path / "weights").rglob("unnamed-*"))
        assert client.output(asked).loss > 0
        server.record.forget_sessions(-1.0)
        assert client.fetch(asked).status_code == 404


def test_what_a_queued_request_needs_outlives_its_session(backend: LocalBackend, tmp_path: Path) -> None:
    with a_client(backend, tmp_path) as (client, server):
        id = client.create()
        client.output(client.forward_backward(id, 1, data_for("cross_entropy")))
        client.result(client.step(id, 2))
        loss = client.output(client.forward_backward(id, 3, data_for("cross_entropy"), forward_only=True)).loss
        with held(server):
            asked = client.forward_backward(id, 4, data_for("cross_entropy"), forward_only=True)
            told(client.post(f"sessions/{client.session}/finish", {"reason": {"type": "success"}}))
            server.worker.models.forget(id)  # as after a kill
            server.record.forget_sessions(-1.0)
        assert client.output(asked).loss == loss
        server.record.forget_sessions(-1.0)
        assert client.fetch(asked).status_code == 404


def test_a_small_client_is_not_kept_waiting_by_a_large_one(server: tuple[str, TinkerServer]) -> None:
    """By the tokens that are computed until it has its results, so that no clock is asked."""
    address, running = server
    large, small = Client(address, "tml-large"), Client(address, "tml-small")
    busy, quick, before = large.create(), small.create(), running.worker.computed
    data = data_for("cross_entropy", sequences=32)
    asked = [large.forward_backward(busy, seq, data) for seq in range(1, 13)]
    for seq in range(1, 4):
        small.output(small.forward_backward(quick, seq, data_for("cross_entropy", sequences=1)))
    waited = running.worker.computed - before
    large.output(asked[-1])
    assert waited < (running.worker.computed - before) / 2


def test_nobody_waits_for_anothers_backlog_of_samples(backend: LocalBackend, tmp_path: Path) -> None:
    """By the order of the results, so that no clock is asked."""
    with serving(backend, tmp_path) as (address, server):
        large, small = Client(address, "tml-large"), Client(address, "tml-small")
        many, few = large.sampler(0), small.sampler(0)
        with held(server):
            backlog = [
                large.sample(many, seq, [3, 4, 5, 6], n=100, params={"max_tokens": 20, "stop": []}) for seq in range(6)
            ]
            quick = small.sample(few, 0, [3, 4, 5, 6], params={"max_tokens": 2})
        small.sampled(quick)
        for one in backlog:
            large.sampled(one)
        places = {id: place for id, _, _, place in server.record.settled_after(few, 0, 0, 9)}
        places |= {id: place for id, _, _, place in server.record.settled_after(many, 0, 0, 9)}
        assert sum(places[one] < places[quick] for one in backlog) <= 2  # those that were open already


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=12))
def test_the_client_with_the_fewest_open_is_begun_next(owners: list[str]) -> None:
    queue, open_ = SampleQueue(), dict[str, int]()
    for seq, owner in enumerate(owners):
        queue.add(Waiting(Asked(str(seq), "lane", seq, owner, "sample", b""), 1, 1))
    order = list[Asked]()
    while (found := queue.next(open_, queue.owners)) is not None:
        asked = found.asked
        assert open_.get(asked.owner, 0) == min(open_.get(owner, 0) for owner in queue.owners)
        queue.remove(found)
        open_[asked.owner] = open_.get(asked.owner, 0) + 1
        order.append(asked)
    assert sorted(int(asked.id) for asked in order) == list(range(len(owners)))
    for owner in set(owners):
        own = [asked.seq for asked in order if asked.owner == owner]
        assert own == sorted(own)


def test_a_client_that_asks_for_a_result_or_sends_heartbeats_is_there(backend: LocalBackend, tmp_path: Path) -> None:
    with a_client(backend, tmp_path) as (client, server):
        sampler = client.sampler(0)
        asked = client.sample(sampler, 1, [3, 4, 5, 6])
        signs: dict[str, Callable[[], Any]] = {
            "heartbeat": lambda: client.post("session_heartbeat", {"session_id": client.session}),
            "one future": lambda: client.sampled(asked),
            "futures": lambda: client.post(
                "retrieve_futures", {"target": {"sampling_session_id": sampler}, "timeout": 0}
            ),
        }
        for sign in signs.values():
            server._service._seen[client.session] = -1e9
            sign()
            server._service.look_after(60.0)
            assert client.session in server._service._seen
