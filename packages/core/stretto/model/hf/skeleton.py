"""Create a model without weights, to inspect its parameters at no cost, or to fill it later (`model.hf.filling`)."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from stretto.core.errors import ModelFolderError, Problem
from stretto.model.hf.folder import quiet_transformers
from stretto.model.hf.inspection import ModelFolder, eos_token_ids, shape_of


def skeleton(path: Path | str, attention: str | None = None) -> PreTrainedModel:
    """Create the causal language model of a folder on torch's meta device: parameters have names and shapes, no values.

    `attention`: as for `folder.load_policy`. If it is given, the model is in eval mode, and can be used after
    `model.hf.filling.fill` has filled it and `attention_support.check_attention` has accepted it.

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
        if (Path(path) / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
    return model


def outlined(folder: Path) -> tuple[ModelFolder, PreTrainedConfig]:
    """Facts and config of a model from its config.json, for a folder without weights.

    Raises:
        ModelFolderError: config.json is broken or lacks a field, or transformers cannot create the model.
    """
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
