"""Weights that do not fit their config are found before anything is loaded; those that do are what is loaded."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stretto.core.errors import ModelFolderError
from stretto.model.hf.folder import inspect_model_folder, load_policy
from stretto.model.hf.skeleton import check_fit
from tests.model.test_folder import SMALL, edit
from tests.model.test_folder import folder as folder
from tests.model.test_folder import good as good

Q = "model.layers.0.self_attn.q_proj.weight"


def change(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the weights of a folder."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def configured(**changes: object) -> Callable[[Path], None]:
    return lambda folder: edit(folder / "config.json", **changes)


def weighed(do: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    return lambda folder: change(folder, do)


def one_for_another(weights: dict[str, Tensor]) -> None:
    weights["extra.weight"] = weights.pop(Q)


def renamed(weights: dict[str, Tensor]) -> None:
    for name in list(weights):
        weights[f"other.{name}"] = weights.pop(name)


def without_norm_beside_another(weights: dict[str, Tensor]) -> None:
    """No translation of names makes a norm of what has another shape."""
    del weights["model.norm.weight"]
    weights["extra.weight"] = torch.zeros(3)


def whole_numbers(weights: dict[str, Tensor]) -> None:
    weights[Q] = weights[Q].to(torch.int8)


BROKEN: list[tuple[Callable[[Path], None], str]] = [
    (configured(model_type="nonesuch", architectures=["NonesuchForCausalLM"]), "cannot be loaded: ValueError"),
    (configured(model_type=3), "cannot be loaded"),
    (configured(model_type="vit"), "cannot be loaded"),
    (configured(hidden_act="nonesuch"), "cannot be loaded: KeyError: 'nonesuch'"),
    (configured(rope_parameters={"rope_type": "nonesuch"}), "cannot be loaded"),
    (configured(hidden_size=32), "config.json asks for (6, 32)"),
    (configured(intermediate_size=48), "mlp.gate_proj.weight is of the shape (24, 16), config.json asks for (48, 16)"),
    (configured(head_dim=4), "q_proj.weight is of the shape (16, 16), config.json asks for (8, 16)"),
    (configured(num_attention_heads=3), "config.json asks for (24, 16)"),
    (configured(num_hidden_layers=3, layer_types=["full_attention"] * 3), "lacks the weight model.layers.2."),
    (configured(tie_word_embeddings=False), "lacks the weight lm_head.weight"),
    (weighed(lambda weights: weights.pop("model.norm.weight")), "lacks the weight model.norm.weight"),
    (weighed(lambda weights: weights.update({Q: weights[Q][:-1].clone()})), f"{Q} is of the shape (15, 16)"),
    (weighed(whole_numbers), f"{Q} holds I8; weights are one of F64, F32, F16, BF16"),
    (weighed(renamed), "lacks the weight model.embed_tokens.weight"),
    (weighed(without_norm_beside_another), "lacks the weight model.norm.weight"),
    (weighed(one_for_another), f"lacks the weight {Q}"),
    (weighed(renamed), "more like these"),
]


@pytest.mark.parametrize(("breaks", "message"), BROKEN)
def test_weights_that_misfit_their_config_are_named(folder: Path, breaks: Callable[[Path], None], message: str) -> None:
    breaks(folder)
    with pytest.raises(ModelFolderError) as error:
        check_fit(inspect_model_folder(folder))
    assert error.value.exit_code == 2
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) <= 6


def named_as_the_body(weights: dict[str, Tensor]) -> None:
    for name in list(weights):
        weights[name.removeprefix("model.")] = weights.pop(name)


def named_as_the_body_beside_a_buffer(weights: dict[str, Tensor]) -> None:
    named_as_the_body(weights)
    weights["layers.0.self_attn.bias"] = torch.ones(1, 1, 4, 4, dtype=torch.bool)


@pytest.mark.parametrize("do", [dict, named_as_the_body, named_as_the_body_beside_a_buffer])
def test_what_fits_is_what_is_loaded(folder: Path, do: Callable[[dict[str, Tensor]], object]) -> None:
    """Parameters may have the names by which the hub has GPT-2."""
    change(folder, do)
    check_fit(inspect_model_folder(folder))
    assert load_policy(folder).config.num_hidden_layers == SMALL.layers


def test_numbers_that_are_not_finite_are_named_when_they_are_loaded(folder: Path) -> None:
    change(folder, lambda weights: weights["model.norm.weight"].fill_(torch.nan))
    with pytest.raises(ModelFolderError, match=r"model\.norm\.weight holds numbers that are not finite"):
        load_policy(folder)
