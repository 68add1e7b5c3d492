"""Nobody waits for what others asked: turns are cut by tokens, not by requests."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from stretto.engine.config import EngineConfig
from stretto_tinker.compute.base import LocalBackend
from stretto_tinker.compute.sampler import Sampler
from stretto_tinker.http.service import owner_of
from stretto_tinker.serve import TinkerServer
from stretto_tinker.work import turns
from stretto_tinker.work.turns import Turns
from tests.tinker.speaking import NAME, Client, Data, a_client, held, serving, tokens_of

_TURN, _SLOTS, _MICRO_BATCH = 256, 8, 64
_FEW = settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
_KINDS = ["samples", "own samples", "many samples", "scores", "training"]
_PROMPT = [3, 4, 5, 6]
_STEP = 64  # tokens of a micro-batch, and the most of a step of sampling
_OWN = 64  # the most tokens of a small request


@pytest.fixture(scope="module")
def crowded(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, TinkerServer]]:
    """A server with few slots and little cache, whose clock counts computed tokens: its turns are the same on any
    machine."""
    patch = pytest.MonkeyPatch()
    patch.setattr(turns, "TURN_SECONDS", float(_TURN))
    patch.setattr(turns, "TURN_TOKENS", _TURN)
    backend = LocalBackend(model, NAME, EngineConfig(slots=_SLOTS, cache_gib=0.00015, device="cpu"), _MICRO_BATCH)
    with serving(backend, tmp_path_factory.mktemp("crowded")) as (address, server):
        worker = server.worker
        worker._clock = lambda: float(worker.computed)
        yield address, server
    patch.undo()


def data_of(sequences: int) -> Data:
    return [([*_PROMPT] * 4, {"target_tokens": [4, 5, 6, 7] * 4}) for _ in range(sequences)]


def ask(client: Client, kind: str, size: int) -> list[str]:
    """A large request of a kind, or several."""
    endless = {"max_tokens": 40 + size, "stop": []}
    if kind == "training":
        return [client.forward_backward(client.create(), 1, data_of(8 * size))]
    if kind == "own samples":
        path = client.save(client.create(), 1, "own", "save_weights_for_sampler")["path"]
        return [client.sample(client.sampler(0, path), 0, _PROMPT, n=size, params=endless)]
    sampler = client.sampler(0)
    if kind == "samples":
        return [client.sample(sampler, 0, _PROMPT, n=2 * size, params=endless)]
    if kind == "many samples":
        return [client.sample(sampler, seq, _PROMPT, params=endless) for seq in range(2 * size)]
    return [
        client.sample(sampler, seq, _PROMPT * 10, params={"max_tokens": 1}, prompt_logprobs=True) for seq in range(size)
    ]


@_FEW
@given(
    others=st.lists(st.tuples(st.sampled_from(_KINDS), st.integers(1, 10)), min_size=1, max_size=4),
    small=st.sampled_from(["sample", "score", "training"]),
    number=st.integers(1, 10**9),
)
@example(others=[("training", 10)] * 4, small="sample", number=1)
@example(others=[("many samples", 10)] * 4, small="score", number=2)
def test_a_small_request_waits_for_a_turn_of_each_other_client_and_two_of_its_lane(
    crowded: tuple[str, TinkerServer], others: list[tuple[str, int]], small: str, number: int
) -> None:
    address, server = crowded
    quick = Client(address, f"tml-quick-{number}-{time.monotonic_ns()}")
    model, sampler = quick.create(), quick.sampler(0)
    clients = [Client(address, f"tml-large-{at}-{number}-{time.monotonic_ns()}") for at in range(len(others))]
    asked = [(one, id) for one, (kind, size) in zip(clients, others, strict=True) for id in ask(one, kind, size)]
    computed: dict[str, int] = {}
    settled = server.worker._settled

    def note(id: str, lane: str) -> None:
        computed[id] = server.worker.computed
        settled(id, lane)

    with held(server):
        server.worker._turns._spent.pop(owner_of(quick.key), None)  # what was computed for it is long ago
        server.worker._settled, before = note, server.worker.computed
        if small == "training":
            id = quick.forward_backward(model, 1, data_of(1))
        else:
            id = quick.sample(
                sampler, 0, _PROMPT, params={"max_tokens": 4, "stop": []}, prompt_logprobs=small == "score"
            )
    assert quick.fetch(id).status_code == 200
    server.worker._settled = settled
    assert computed[id] - before <= (len(others) + 2) * (_TURN + _STEP) + _OWN
    for client, one in asked:
        assert client.fetch(one).status_code == 200


def test_requests_for_one_engine_are_sampled_in_the_same_steps(
    crowded: tuple[str, TinkerServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, server = crowded
    client, steps, step = Client(address, "tml-together"), 0, Sampler.step

    def counted(sampler: Sampler) -> Any:
        nonlocal steps
        steps += 1
        return step(sampler)

    sampler = client.sampler(0)
    monkeypatch.setattr(Sampler, "step", counted)
    with held(server):
        asked = [client.sample(sampler, seq, _PROMPT, params={"max_tokens": 20, "stop": []}) for seq in range(4)]
    assert all(client.sampled(id).sequences for id in asked)
    assert steps == 20


@given(
    st.lists(
        st.tuples(st.sets(st.sampled_from("abcd"), max_size=4), st.lists(st.floats(0.1, 1.0), min_size=1, max_size=12)),
        max_size=12,
    )
)
def test_no_client_is_a_turn_ahead_of_another_while_both_are_busy(spells: list[tuple[set[str], list[float]]]) -> None:
    """Whoever was busy before: of two that are busy for a while, each gets as much as the other, but for two turns."""
    chooser = Turns()
    for busy, lengths in spells:
        if not busy:
            continue
        got = dict.fromkeys(sorted(busy), 0.0)
        for seconds in lengths:
            owner = chooser.choose({f"lane of {one}": [one] for one in got})[-1]
            chooser.spent([owner], seconds)
            got[owner] += seconds
        assert max(got.values()) - min(got.values()) <= 2.0


@given(
    shared=st.lists(st.integers(1, 50), min_size=1, max_size=4), turn=st.floats(0.01, 1.0), alone=st.floats(0.01, 1.0)
)
def test_requests_in_a_shared_lane_take_no_more_than_the_shares_of_their_clients(
    shared: list[int], turn: float, alone: float
) -> None:
    """A client in a lane of its own gets the share of one client, however many requests each of the others has."""
    chooser, got = Turns(), {"shared": 0.0, "alone": 0.0}
    many = [f"client {at}" for at, requests in enumerate(shared) for _ in range(requests)]
    lanes = {"shared": many, "alone": ["alone"]}
    for _ in range(50):
        lane = chooser.choose(lanes)
        seconds = turn if lane == "shared" else alone
        chooser.spent(lanes[lane], seconds)
        got[lane] += seconds
        assert got["shared"] <= len(shared) * got["alone"] + turn + 1e-9
        assert got["alone"] <= got["shared"] / len(shared) + alone + 1e-9


def test_one_who_comes_when_nobody_is_there_is_not_owed_the_hours_of_others() -> None:
    chooser = Turns()
    for _ in range(1000):
        chooser.choose({"a": ["ann"]})
        chooser.spent(["ann"], 1.0)
    order = []
    for at in range(20):
        lane = chooser.choose({"b": ["bob"]} if at == 0 else {"a": ["ann"], "b": ["bob"]})
        chooser.spent(["bob" if lane == "b" else "ann"], 1.0)
        order.append(lane)
    assert 8 <= order.count("a") <= 11


def sampled_by_many(backend: LocalBackend, folder: Path) -> tuple[list[list[int]], int]:
    """Tokens of long samples by three sets of weights and the base model at once; and the most bytes of cache."""
    most = 0
    with a_client(backend, folder) as (client, server):
        settled = server.worker._settled

        def note(id: str, lane: str) -> None:
            nonlocal most
            most = max(most, sum(engine.cache for engine in server.worker._engines._engines.values()))
            settled(id, lane)

        server.worker._settled = note
        model = client.create()
        paths = [client.save(model, seq, f"w{seq}", "save_weights_for_sampler")["path"] for seq in range(1, 4)]
        samplers = [client.sampler(seq, path) for seq, path in enumerate([*paths, None])]
        params = {"max_tokens": 64, "stop": [], "seed": 3}
        with held(server):
            asked = [client.sample(one, at, _PROMPT, n=4, params=params) for one in samplers for at in range(2)]
        found = [client.sampled(one) for one in asked]
    return [tokens_of(sequence) for one in found for sequence in one.sequences], most


def test_samplers_of_many_weights_have_one_budget_of_cache(model: Path, tmp_path: Path) -> None:
    tight, wide = (
        LocalBackend(model, NAME, EngineConfig(slots=_SLOTS, cache_gib=gib, device="cpu"), _MICRO_BATCH)
        for gib in (0.0002, 0.25)
    )
    few, held_by_few = sampled_by_many(tight, tmp_path / "tight")
    many, held_by_many = sampled_by_many(wide, tmp_path / "wide")
    assert held_by_few <= tight.cache_bytes < held_by_many / 2
    assert few == many
