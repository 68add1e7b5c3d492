"""Losses, gradients and steps against a plain computation with transformers and peft: equal to 1e-5."""

from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from stretto_tinker.compute.files import ALPHA
from tests.tinker.speaking import Client, Data

_CLOSE = 1e-5
pytestmark = pytest.mark.filterwarnings("ignore:.*(tie_word_embeddings|ensure_weight_tying):UserWarning")


def data_for(loss: str, seed: int = 0, *, sequences: int = 5) -> Data:
    """Sequences of several lengths with what a loss reads."""
    random = np.random.default_rng(seed)
    made: list[tuple[list[int], dict[str, Any]]] = []
    for length in random.integers(3, 40, sequences).tolist():
        tokens, targets = random.integers(0, 22, (2, length)).tolist()
        inputs: dict[str, Any] = {"target_tokens": targets}
        if loss == "cross_entropy":
            inputs["weights"] = random.random(length).astype(np.float32)
        else:
            inputs["logprobs"] = (-3 * random.random(length)).astype(np.float32)
            inputs["advantages"] = random.normal(size=length).astype(np.float32)
        if loss == "gspo":
            inputs["sequence_ratio_mask"] = (random.random(length) > 0.3).astype(np.float32)
        made.append((tokens, inputs))
    return made


def plain_loss(loss: str, logprobs: torch.Tensor, inputs: dict[str, Any], **config: float) -> torch.Tensor:
    """The formulas of the SDK's documentation, word for word."""
    given = {name: torch.tensor(np.asarray(values)) for name, values in inputs.items()}
    if loss == "cross_entropy":
        return (-logprobs * given["weights"]).sum()
    ratio = torch.exp(logprobs - given["logprobs"])
    low, high = config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2)
    if loss == "importance_sampling":
        return -(ratio * given["advantages"]).sum()
    if loss == "cispo":
        return -(torch.clamp(ratio, low, high).detach() * logprobs * given["advantages"]).sum()
    if loss == "dro":
        quadratic = (logprobs - given["logprobs"]) ** 2
        return -(logprobs * given["advantages"] - 0.5 * config.get("beta", 0.05) * quadratic).sum()
    if loss == "gspo":
        inside = given["sequence_ratio_mask"] != 0
        mean = (logprobs.detach() - given["logprobs"])[inside].mean()
        ratio = torch.exp(mean + logprobs - logprobs.detach())
    clipped = torch.clamp(ratio, low, high)
    return -torch.min(ratio * given["advantages"], clipped * given["advantages"]).sum()


class Plain:
    """The base model with peft's adapters, set to those that the server drew."""

    def __init__(self, model: Path, adapters: Path) -> None:
        whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.model: Any = peft.PeftModel.from_pretrained(whole, adapters, is_trainable=True)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-2, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0)

    def loss(self, loss: str, data: Data, **config: float) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Sequence by sequence, without packing."""
        total, rows = torch.zeros(()), []
        for tokens, inputs in data:
            logits = self.model(input_ids=torch.tensor([list(tokens)])).logits[0]
            targets = torch.tensor(inputs["target_tokens"])[:, None]
            logprobs = logits.log_softmax(-1).gather(1, targets)[:, 0]
            rows.append(logprobs)
            total = total + plain_loss(loss, logprobs, inputs, **config)
        return total, rows


def adapters_of(client: Client, model: str, seq: int, folder: Path) -> Path:
    """What peft loads, fetched as the SDK fetches it."""
    client.save(model, seq, f"for-peft-{seq}", "save_weights_external")
    reply = client.get(f"training_runs/{model}/checkpoints/external_weights/for-peft-{seq}/external_weights_urls")
    folder.mkdir(parents=True, exist_ok=True)
    for name, url in reply.json()["urls"].items():
        (folder / name).write_bytes(client.http.get(url).raise_for_status().content)
    return folder


LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo")
RUNS = [("cross_entropy", 10), *((loss, 2) for loss in LOSSES[1:])]
RUNS_LONG = [pytest.param(loss, 10, marks=pytest.mark.long) for loss in LOSSES[1:]]


@pytest.mark.parametrize(("loss", "steps"), [*RUNS, *RUNS_LONG])
def test_steps_of_each_loss_equal_those_of_a_plain_loop(
    loss: str, steps: int, client: Client, id: str, model: Path, tmp_path: Path
) -> None:
    plain = Plain(model, adapters_of(client, id, 1, tmp_path / "adapters"))
    for step in range(steps):
        data = data_for(loss, step)
        found = client.forward_backward(id, 2 * step + 2, data, loss)
        stepped = client.step(id, 2 * step + 3)
        expected, rows = plain.loss(loss, data)
        plain.optimizer.zero_grad()
        expected.backward()
        plain.optimizer.step()
        output = client.output(found)
        assert output.loss == pytest.approx(float(expected.detach()), rel=_CLOSE, abs=_CLOSE * 10)
        for got, row in zip(output.logprobs, rows, strict=True):
            np.testing.assert_allclose(got, row.detach().numpy(), rtol=_CLOSE * 10, atol=_CLOSE * 10)
        assert client.result(stepped)["metrics"]["grad_norm"] > 0


def test_settings_of_a_loss_are_heeded(client: Client, id: str, model: Path, tmp_path: Path) -> None:
    plain = Plain(model, adapters_of(client, id, 1, tmp_path))
    for seq, (loss, config) in enumerate(
        [("ppo", {"clip_low_threshold": 0.95, "clip_high_threshold": 1.05}), ("dro", {"beta": 0.5})], 2
    ):
        data = data_for(loss)
        output = client.output(client.forward_backward(id, seq, data, loss, forward_only=True, **config))
        with torch.no_grad():
            expected, _ = plain.loss(loss, data, **config)
            other, _ = plain.loss(loss, data)
        assert output.loss == pytest.approx(float(expected), rel=_CLOSE)
        assert abs(float(expected) - float(other)) > 1e-2


def test_gradients_of_several_requests_are_one_gradient(client: Client, model: Path, tmp_path: Path) -> None:
    whole, parts = client.create(0), client.create(1)
    data = data_for("cross_entropy", sequences=6)
    client.forward_backward(whole, 1, data)
    client.forward_backward(parts, 1, data[:2])
    client.forward_backward(parts, 2, data[2:], forward_only=True)  # changes nothing
    client.forward_backward(parts, 3, data[2:])
    norms = [client.result(client.step(one, seq))["metrics"]["grad_norm"] for one, seq in ((whole, 2), (parts, 4))]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_several_targets_a_place_are_scored_and_weighed(client: Client, id: str, model: Path, tmp_path: Path) -> None:
    plain = Plain(model, adapters_of(client, id, 1, tmp_path))
    tokens, targets = [3, 4, 5, 6], [[3, 4, 5], [4, 5, 6], [5, 6, 7], [6, 7, 8]]
    weights = np.linspace(0, 1, 12, dtype=np.float32).reshape(4, 3)
    output = client.output(client.forward_backward(id, 2, [(tokens, {"target_tokens": targets, "weights": weights})]))
    logits = plain.model(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
    expected = logits.gather(1, torch.tensor(targets)).detach().numpy()
    np.testing.assert_allclose(output.logprobs[0], expected, atol=1e-4)
    assert output.loss == pytest.approx(float(-(expected * weights).sum()), rel=1e-5)


def test_adapters_are_where_they_were_asked_for(client: Client, tmp_path: Path) -> None:
    only_mlp = client.create(0, train_attn=False, train_unembed=False)
    every = client.create(1)
    found = {}
    for name, id in (("mlp", only_mlp), ("all", every)):
        config = peft.PeftConfig.from_pretrained(str(adapters_of(client, id, 1, tmp_path / name)))
        found[name] = {str(one).rsplit(".", 1)[-1] for one in config.target_modules or ()}
        assert config.lora_alpha == ALPHA
    assert found["mlp"] == {"gate_proj", "up_proj", "down_proj"}
    assert found["all"] == found["mlp"] | {"q_proj", "k_proj", "v_proj", "o_proj", "lm_head"}


def test_a_whole_model_is_trained_where_no_adapters_are_asked_for(client: Client) -> None:
    body = {"session_id": client.opened(), "model_seq_id": 0, "base_model": "base"}
    id = client.result(client.post("create_model", body).json()["request_id"])["model_id"]
    assert client.post("get_info", {"model_id": id}).json()["is_lora"] is False
    data = data_for("cross_entropy")
    losses = []
    for step in range(4):
        losses.append(client.output(client.forward_backward(id, 2 * step + 1, data)).loss)
        client.step(id, 2 * step + 2)
    assert losses[-1] < losses[0]
    saved = client.save(id, 9, None, "save_weights_for_sampler", sampling_session_seq_id=0)
    sampled = client.sampled(client.sample(saved["sampling_session_id"], 0, [3, 4, 5], prompt_logprobs=True))
    base = client.sampled(client.sample(client.sampler(1), 0, [3, 4, 5], prompt_logprobs=True))
    assert sampled.prompt_logprobs != base.prompt_logprobs
