"""Create a model without weights, to inspect its parameters at no cost, to check that a folder's weights fit its
config, or to fill it later (`stretto_cluster.ranks.filling`).
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from stretto.core.errors import ModelFolderError, Problem
from stretto.model.hf.folder import quiet_transformers
from stretto.model.hf.inspection import ModelFolder, eos_token_ids, read_weights, shape_of


def skeleton(path: Path | str, attention: str | None = None) -> PreTrainedModel:
    """Create the causal language model of a folder on torch's meta device: parameters have names and shapes, no values.

    `attention`: name of the attention path (`folder.load_policy`); None: the model's own, for shapes alone. If it is
    given, the model is in eval mode, and can be used after `stretto_cluster.ranks.filling.fill` has filled it and
    `attention_support.check_attention` has accepted it.

    Raises:
        ModelFolderError: transformers cannot create the model of config.json.
    """
    with quiet_transformers(), torch.device("meta"):
        try:
            config = AutoConfig.from_pretrained(path, local_files_only=True)
            chosen = {} if attention is None else {"attn_implementation": attention}
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **chosen)
        except Exception as error:  # a config can make the module of any model fail in any way
            found = " ".join(f"{type(error).__name__}: {error}".split())
            raise ModelFolderError([Problem(str(path), f"cannot be loaded: {found}", "repair config.json")]) from error
    if attention is not None:
        model.eval()
    return model


def outlined(folder: Path) -> tuple[ModelFolder, PreTrainedConfig]:
    """Return facts and config of a model from its config.json, for a folder without weights (`bytes` is 0). Raises
    ModelFolderError if config.json is broken or lacks a field, or transformers cannot create the model."""
    problems: list[Problem] = []
    shape = shape_of(folder, problems)
    if shape is None:
        raise ModelFolderError(problems)
    model = skeleton(folder)
    facts = ModelFolder(
        path=folder,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        bytes=0,
        eos_token_ids=eos_token_ids(folder),
        dtype=str(model.config.dtype or "float32").removeprefix("torch."),
        **shape,
    )
    return facts, model.config


_LAYER = re.compile(r"(?<=\.)[0-9]+(?=\.)")
_FLOATING = ("F64", "F32", "F16", "BF16")
_SHOWN = 5


def check_fit(folder: ModelFolder) -> PreTrainedConfig:
    """Check names, shapes and dtypes of a folder's weights against its config, and return the config. Weights are not
    read, and names that transformers translates while loading are not checked.

    Raises:
        ModelFolderError: transformers cannot create the model; weights are missing, have another shape, or are not
            floating-point numbers (the first five are named).
    """
    place, model = str(folder.path), skeleton(folder.path)
    parameters = {name: tuple(tensor.shape) for name, tensor in model.named_parameters(remove_duplicate=True)}
    known, prefix = set(model.state_dict()), model.base_model_prefix
    weights = read_weights(folder.path)  # some folders have the names of the model without its head
    held = {own if (own := f"{prefix}.{name}") in known else name: tensor for name, tensor in weights.items()}
    problems = [
        Problem(place, f"{name} is of the shape {held[name].shape}, config.json asks for {shape}", "repair config.json")
        for name, shape in parameters.items()
        if name in held and held[name].shape != shape
    ]
    problems += [
        Problem(place, f"{name} holds {tensor.dtype}", f"weights are one of {', '.join(_FLOATING)}")
        for name, tensor in held.items()
        if name in parameters and tensor.dtype not in _FLOATING
    ]
    missing = [name for name in parameters if name not in held]
    if known & held.keys() and not held.keys() <= known:  # some may have other names in the folder
        of_layers = {_LAYER.sub("#", name) for name in held}  # names of a single layer are not translated
        strangers = {tuple(tensor.shape) for name, tensor in held.items() if name not in known}
        missing = [
            name
            for name in missing
            if (_LAYER.sub("#", name) in of_layers if _LAYER.search(name) else parameters[name] not in strangers)
        ]
    problems += [Problem(place, f"lacks the weight {name}", "copy or download the folder again") for name in missing]
    if problems:
        more = len(problems) - _SHOWN
        raise ModelFolderError(problems[:_SHOWN] + ([Problem(place, f"{more} more like these")] if more > 0 else []))
    config: PreTrainedConfig = model.config
    return config
