"""Promises of adapters (LoRA): the start is the policy itself; nothing but the adapters is trained and published, and
an engine's model with them is the policy that was trained; the policy at the start is there as reference without a
second model; a checkpoint holds the adapters alone, and peft reads what is saved of them.
"""

import json
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from stretto.core.errors import StoreError
from stretto.core.records import Sampling
from stretto.engine.native.parameters import Parameters
from stretto.model.hf.layers import linear_layers
from stretto.model.packed.logprobs import pack_tokens
from stretto.trainer.adapters import adapt, adapted_layers, gather_adapters, plain_parameters
from stretto.trainer.config import LoraConfig, TrainerConfig
from stretto.trainer.messages import SavePolicy
from stretto.trainer.objective.algorithm import AlgorithmConfig, ReferenceConfig
from stretto.trainer.optimizer import UNCHANGED, Learner
from stretto.trainer.ranks import ALONE
from stretto.trainer.reference import ReferencePolicy
from stretto.trainer.roles.trainer import TrainerRole
from stretto.trainer.trainer import Trainer
from stretto.weights.shared_memory import SharedMemoryPublisher, SharedMemorySubscriber
from tests.tiny_policy import sized
from tests.tolerances import assert_close, near, rounding
from tests.trainer.batches import batch
from tests.trainer.tiny import FORWARD, spec_of, tiny

LORA = LoraConfig(rank=2, alpha=4, target_modules=("q_proj", "down_proj"))
CONFIG = TrainerConfig(learning_rate=3e-3, minibatches=2, lora=LORA)
PACKED = pack_tokens([(1, 2, 3, 4), (5, 6)])


def adapted(algorithm: AlgorithmConfig | None = None) -> Trainer:
    model = tiny()
    adapt(model, LORA)
    return Trainer(model, CONFIG, algorithm or AlgorithmConfig())


def test_the_start_is_the_policy_itself() -> None:
    trainer = adapted()
    plain = Learner(tiny(), CONFIG)
    assert_close(trainer.learner.logprobs(PACKED).logprobs, plain.logprobs(PACKED).logprobs, FORWARD)  # one is fused
    for (name, ours), (theirs, parameter) in zip(
        trainer.full_parameters(), plain.model.named_parameters(), strict=True
    ):
        assert name == theirs
        assert torch.equal(ours, parameter)


def test_nothing_but_the_adapters_is_trained() -> None:
    trainer, start = adapted(), dict(tiny().named_parameters())
    for version in range(3):
        trainer.train(batch(version))
    moved = {name for name, parameter in trainer.full_parameters() if not torch.equal(parameter, start[name])}
    assert moved == {
        f"model.layers.{layer}.{name}.weight" for layer in (0, 1) for name in ("self_attn.q_proj", "mlp.down_proj")
    }
    held = sum(p.numel() for group in trainer.learner.adamw.param_groups for p in group["params"])
    assert held == 2 * (2 * (16 + 16) + 2 * (24 + 16))  # layers * (A and B of q_proj, 16 to 16; of down_proj, 24 to 16)


def test_adapters_alone_are_published_and_come_to_the_policy_that_was_trained(tmp_path: Path) -> None:
    """A plain model that has loaded the published versions gives the log-probabilities of the adapted one."""
    trainer, plain = adapted(), tiny().requires_grad_(False)
    loaded = Parameters(plain)
    for version in range(3):
        trainer.train(batch(version))
        trainer.publish(SharedMemoryPublisher("a", tmp_path))
        published = SharedMemorySubscriber("a", tmp_path).load(version + 1)
        assert sum(tensor.numel() for tensor in published.values()) == 2 * (2 * (16 + 16) + 2 * (24 + 16))  # as trained
        loaded.check(version + 1, published)
        loaded.load(published)
    for (_, whole), parameter in zip(trainer.full_parameters(), plain.parameters(), strict=True):
        assert_close(whole, parameter.detach())
    ours, theirs = trainer.learner.logprobs(PACKED).logprobs, Learner(plain, CONFIG).logprobs(PACKED).logprobs
    assert_close(ours, theirs, FORWARD)


def test_the_policy_at_the_start_is_the_reference_without_a_second_model() -> None:
    trainer = adapted(AlgorithmConfig(reference=ReferenceConfig(weight=0.1)))
    second = ReferencePolicy(tiny(), CONFIG, UNCHANGED)
    kl = [trainer.train(batch(version)).metrics["kl_reference"] for version in range(3)]
    assert kl[2] > rounding(FORWARD)
    assert trainer._gradients._reference is not None
    assert_close(trainer._gradients._reference.logprobs(PACKED), second.logprobs(PACKED), FORWARD)
    assert not torch.equal(trainer.learner.logprobs(PACKED).logprobs, second.logprobs(PACKED))
    ours, theirs = (one.token_logprobs(batch(0)) for one in (trainer._gradients._reference, second))
    assert ours.keys() == theirs.keys()
    assert all([*ours[id]] == near([*column], FORWARD) for id, column in theirs.items())


def test_a_checkpoint_holds_the_adapters_and_goes_on(tmp_path: Path) -> None:
    straight, first = adapted(), adapted()
    for version in range(4):
        straight.train(batch(version))
    for version in range(2):
        first.train(batch(version))
    first.save_checkpoint(tmp_path / "v2")
    resumed = adapted()
    resumed.load_checkpoint(tmp_path / "v2")
    for version in range(2, 4):
        resumed.train(batch(version))
    for (_, ours), (_, theirs) in zip(resumed.full_parameters(), straight.full_parameters(), strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(StoreError, match=r"is of another model; these parameters differ: .*lora_A"):
        Trainer(tiny(), CONFIG, AlgorithmConfig()).load_checkpoint(tmp_path / "v2")


def test_a_checkpoint_of_adapters_with_another_scale_is_refused(tmp_path: Path) -> None:
    trainer = adapted()
    trainer.train(batch(0))
    trainer.save_checkpoint(tmp_path / "v1")
    model = tiny()
    adapt(model, LORA.model_copy(update={"alpha": 3 * LORA.alpha}))
    other = Trainer(model, CONFIG, AlgorithmConfig())
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(StoreError, match=r"is of other adapters: their scale alpha / rank is .*, and here it is "):
        other.load_checkpoint(tmp_path / "v1")
    assert all(torch.equal(*both) for both in zip(before, model.parameters(), strict=True))
    position = json.loads((tmp_path / "v1" / "trainer.json").read_bytes())
    assert position.pop("scale") == LORA.alpha / LORA.rank
    (tmp_path / "v1" / "trainer.json").write_text(json.dumps(position))  # as earlier versions wrote it
    other.load_checkpoint(tmp_path / "v1")
    assert other.version == 1


def test_peft_reads_what_is_saved_of_them(tmp_path: Path) -> None:
    trainer = adapted()
    trainer.train(batch(0))
    gather_adapters(trainer.learner.model, LORA, ALONE)(tmp_path)
    theirs = peft.PeftModel.from_pretrained(tiny(), tmp_path / "adapter").merge_and_unload()
    found: dict[str, Tensor] = dict(theirs.named_parameters())
    for name, parameter in trainer.full_parameters():
        assert_close(found[name], parameter)


def test_a_saved_policy_has_its_adapters_when_it_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny().save_pretrained(tmp_path / "start")
    policy = tmp_path / "policy" / "v000001"
    appeared: list[bool] = []

    def save(tensors: dict[str, Tensor], file: Path, metadata: dict[str, str]) -> None:
        appeared.append(policy.exists())
        save_file(tensors, file, metadata)

    monkeypatch.setattr("stretto.trainer.adapters.save_file", save)
    spec = spec_of(tmp_path / "start", CONFIG, Sampling(max_tokens=4))
    role = TrainerRole(spec, SharedMemoryPublisher("none", tmp_path), ALONE, lambda told: None)
    role.carry_out(SavePolicy(folder=str(policy)))
    assert appeared == [False]
    assert sorted(path.name for path in (policy / "adapter").iterdir() if path.suffix != ".md") == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def test_without_names_every_linear_layer_of_the_decoder_gets_one() -> None:
    model = tiny()
    adapt(model, LoraConfig(rank=1))
    trained = {name.split(".")[-4] for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize("family", ["dots1", "qwen3_moe"])
def test_the_dense_and_shared_layers_of_a_mixture_get_adapters_and_its_experts_none(family: str) -> None:
    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "pad_token_id": 0}
    special = {"dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}}
    shape = sized(13, width=32, inner=48, layers=2, heads=(2, 1), head=16, **experts)
    own = special.get(family, {"num_experts": 4, "mlp_only_layers": [0]})
    config = AutoConfig.for_model(family, **shape, **own)
    model = AutoModelForCausalLM.from_config(config)
    linear, plain = sorted(linear_layers(model)), sorted(name for name, _ in model.named_parameters())
    adapt(model, LORA.model_copy(update={"target_modules": ()}))
    assert any(name.endswith("mlp.gate_proj") for name in linear)
    assert sorted(adapted_layers(model)) == linear
    assert sorted(name for name, _ in plain_parameters(model)) == plain
    assert {name for name, one in model.named_parameters() if one.requires_grad} == {
        f"{name}.lora_{kind}.default.weight" for name in linear for kind in "AB"
    }
