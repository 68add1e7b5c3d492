"""Memory: models in training have one budget, and the weights of samplers another, whatever their clients create; those
that leave the memory come back bit for bit. What has ended holds none."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stretto.engine.config import EngineConfig
from stretto_tinker.compute.base import LocalBackend
from stretto_tinker.compute.files import Shape, read_optimizer, write_optimizer
from stretto_tinker.compute.learner import Learner
from stretto_tinker.compute.sampler import Sampler, Wish
from stretto_tinker.wire.bodies import Lora, SamplingParams
from stretto_tinker.work import turns
from stretto_tinker.work.sampling import Engines, Lane
from tests.tinker.speaking import NAME, Client, held, serving, tokens_of
from tests.tinker.test_laws import leaves
from tests.tinker.test_training import data_for

_SHAPE = Shape(Lora(4))  # that of `Client.create`
_CLIENTS, _STEPS = 3, 3


def backend_with(model: Path, models_bytes: int) -> LocalBackend:
    """A base model whose requests take several turns."""
    return LocalBackend(model, NAME, EngineConfig(cache_gib=0.25, device="cpu"), 32, models_bytes)


@pytest.mark.parametrize(
    "shape",
    [_SHAPE, Shape(Lora(2, train_mlp=False)), Shape(Lora(2, train_attn=False, train_unembed=False)), Shape(None)],
)
def test_a_model_needs_five_numbers_of_four_bytes_for_each_trained_weight(shape: Shape, backend: LocalBackend) -> None:
    trained = sum(one.numel() for one in backend.create(shape)._model.parameters() if one.requires_grad)
    assert backend.memory_of(shape) == 20 * trained


def trained_together(backend: LocalBackend, folder: Path) -> tuple[list[Any], int, int]:
    """Losses and gradients of clients that train at the same time; the number of their micro-batches; and the most
    bytes of models in memory."""
    most, micro_batches, micro_batch = 0, 0, Learner._micro_batch

    def counted(learner: Learner, *given: Any, **named: Any) -> float:
        nonlocal micro_batches
        micro_batches += 1
        return micro_batch(learner, *given, **named)

    with pytest.MonkeyPatch.context() as patch, serving(backend, folder) as (address, server):
        models, settled = server.worker.models, server.worker._settled
        patch.setattr(Learner, "_micro_batch", counted)

        def note(id: str, lane: str) -> None:
            nonlocal most
            assert models._live.keys() <= models._held.keys()
            most = max(most, sum(models._held.values()))
            settled(id, lane)

        server.worker._settled = note
        clients = [Client(address, f"tml-{at}") for at in range(_CLIENTS)]
        ids = [client.create(seed=at) for at, client in enumerate(clients)]
        asked = list[tuple[Client, str, bool]]()
        with held(server):
            for step in range(_STEPS):
                for client, id in zip(clients, ids, strict=True):
                    for part in (1, 2):  # the gradient is in no snapshot
                        seq = 3 * step + part
                        asked.append((client, client.forward_backward(id, seq, data_for("cross_entropy", seq)), False))
                    asked.append((client, client.step(id, 3 * step + 3), True))
        found = [client.result(id) if step else client.output(id).loss for client, id, step in asked]
    return found, micro_batches, most


@pytest.mark.parametrize("room", [1, 2])
def test_models_that_do_not_fit_together_are_trained_as_those_that_do(room: int, model: Path, tmp_path: Path) -> None:
    size = backend_with(model, 0).memory_of(_SHAPE)
    *wide, all_of_them = trained_together(backend_with(model, 10 * size), tmp_path / "wide")
    *tight, most = trained_together(backend_with(model, room * size), tmp_path / "tight")
    assert tight == wide  # and nothing was computed twice
    assert (most, all_of_them) == (room * size, _CLIENTS * size)


def test_a_model_larger_than_the_budget_is_refused_with_both_numbers_and_one_that_was_accepted_goes_on(
    model: Path, tmp_path: Path
) -> None:
    size = backend_with(model, 0).memory_of(_SHAPE)
    data = data_for("cross_entropy")
    with serving(backend_with(model, size), tmp_path) as (address, _):
        client = Client(address)
        id = client.create()
        body = {"session_id": client.session, "model_seq_id": 1, "base_model": NAME, "lora_config": {"rank": 8}}
        refused = client.post("create_model", body)
        assert refused.status_code == 400
        told = f"such a model needs {2 * size / 2**20:,.1f} MiB of memory for its training; "
        assert refused.json()["detail"] == (
            f"lora_config.rank: {told}at most {size / 2**20:,.1f} MiB (--models-gib of the server)"
        )
        assert client.post("create_model", {**body, "lora_config": None}).status_code == 400
    with serving(backend_with(model, size - 1), tmp_path) as (address, _):
        client.address = address
        assert client.create() == id  # its creation comes again
        assert client.output(client.forward_backward(id, 1, data)).loss > 0


def test_a_gradient_that_is_not_whole_is_none_once_its_model_left_memory(backend: LocalBackend, tmp_path: Path) -> None:
    with serving(backend, tmp_path) as (address, server):
        client = Client(address)
        id = client.create()
        client.output(client.forward_backward(id, 1, data_for("cross_entropy")))
        assert "error" in client.result(client.forward_backward(id, 2, [([3], {"target_tokens": [99]})]))
        server.worker.retire(id, "", ended=False)
        assert leaves(server, id)
        assert [one.name for one in tmp_path.glob("snapshots/*/*")] == ["2"]
        assert "forward_backward 2 before this step failed" in client.result(client.step(id, 3))["error"]


def test_a_step_names_the_request_that_failed_also_if_the_model_left_the_memory_without_a_snapshot(
    backend: LocalBackend, tmp_path: Path
) -> None:
    with serving(backend, tmp_path) as (address, server):
        client = Client(address)
        id = client.create()
        server.worker.retire(id, "", ended=False)
        assert leaves(server, id)
        why = client.result(client.forward_backward(id, 1, [([3], {"target_tokens": [99]})]))["error"]
        server.worker.retire(id, "", ended=False)
        assert leaves(server, id)
        told = client.result(client.step(id, 2))["error"]
        assert told.startswith(f"optim_step: forward_backward 1 before this step failed: {why}; ")


@pytest.mark.parametrize("lora", [Lora(4), Lora(2, train_mlp=False), None])
def test_a_sampler_needs_two_numbers_of_four_bytes_for_each_weight_of_its_own(
    lora: Lora | None, backend: LocalBackend, tmp_path: Path
) -> None:
    learner = backend.create(Shape(lora))
    learner.save(tmp_path)
    trained = sum(one.numel() for one in learner._model.parameters() if one.requires_grad)
    assert backend.memory_of_sampler(tmp_path) == 8 * trained


_SAMPLERS, _ROUNDS = 5, 2


def sampled_together(backend: LocalBackend, folder: Path) -> tuple[list[list[int]], int, int]:
    """Tokens that clients sample at the same time, each from weights of its own; the most bytes of engines' weights in
    memory; and the number of engines that were made or given other weights."""
    most, made, of = 0, 0, Engines.of

    def noted(engines: Engines, lane: Lane, folder: Path | None) -> Sampler:
        nonlocal most, made
        made += lane not in engines._engines
        engine = of(engines, lane, folder)
        assert engines._sizes.keys() == engines._engines.keys()
        most = max(most, engines.weights)
        return engine

    with pytest.MonkeyPatch.context() as patch, serving(backend, folder) as (address, server):
        patch.setattr(Engines, "of", noted)
        patch.setattr(turns, "TURN_SECONDS", 0.0)  # a turn is one step, so all are under way at the same time
        clients = [Client(address, f"tml-{at}") for at in range(_SAMPLERS)]
        samplers = list[str]()
        for at, client in enumerate(clients):
            id = client.create(seed=at)
            client.output(client.forward_backward(id, 1, data_for("cross_entropy", at)))
            client.result(client.step(id, 2, learning_rate=0.1))
            samplers.append(client.sampler(0, client.save(id, 3, "kept", "save_weights_for_sampler")["path"]))
        found = list[list[int]]()
        for turn in range(_ROUNDS):
            with held(server):
                asked = [
                    client.sample(sampler, turn, [3, 4, 5], params={"max_tokens": 40, "seed": turn, "stop": []})
                    for client, sampler in zip(clients, samplers, strict=True)
                ]
            for client, id in zip(clients, asked, strict=True):
                [sequence] = client.sampled(id).sequences
                found.append(tokens_of(sequence))
    return found, most, made


@pytest.mark.parametrize("room", [0, 2])
def test_samplers_that_do_not_fit_together_sample_what_others_do(room: int, model: Path, tmp_path: Path) -> None:
    """One that is larger than the budget has it alone."""
    backend = backend_with(model, 1 << 30)
    size = backend.memory_of(_SHAPE) // 5 * 2
    wide, all_of_them, _ = sampled_together(backend, tmp_path / "wide")
    backend.samplers_bytes = room * size
    tight, most, made = sampled_together(backend, tmp_path / "tight")
    assert tight == wide
    assert len({tuple(tokens) for tokens in wide[:_SAMPLERS]}) == _SAMPLERS  # each has weights of its own
    assert all_of_them == _SAMPLERS * size
    assert most == max(1, room) * size
    assert made >= _ROUNDS * _SAMPLERS - room  # all but those that stayed from one round to the next


def test_an_engine_holds_nothing_of_a_request_that_has_ended(backend: LocalBackend) -> None:
    sampler = backend.sampled(None)
    sampler.add("request", Wish((3, 4, 5), (1, 2), SamplingParams(max_tokens=2), scored=True))
    while not sampler.idle:
        sampler.step()
    holders = [sampler, sampler._engine, sampler._engine._scheduler, sampler._engine._completions]
    named = [name for one in holders for name, value in vars(one).items() if isinstance(value, dict | set)]
    full = [name for one in holders for name, value in vars(one).items() if name in named and "request" in value]
    assert full == []


def test_the_state_of_an_optimizer_is_read_to_the_device_of_its_parameters(tmp_path: Path) -> None:
    layer = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(2)).sum().backward()
    optimizer.step()
    write_optimizer(tmp_path, layer, optimizer)
    elsewhere = nn.Linear(2, 2, bias=False, device="meta")
    other = torch.optim.AdamW(elsewhere.parameters())
    read_optimizer(tmp_path, elsewhere, other)
    [state] = other.state.values()
    assert {kind: value.device.type for kind, value in state.items()} == dict.fromkeys(state, "meta")
