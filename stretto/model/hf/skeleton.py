"""A model without weights, to inspect its parameters at no cost."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from stretto.core.errors import ModelFolderError, Problem
from stretto.model.hf.folder import quiet_transformers


def skeleton(path: Path | str) -> PreTrainedModel:
    """The causal language model of a folder on torch's device "meta": names and shapes of parameters, no values.

    Raises:
        ModelFolderError: transformers cannot make the model that config.json describes.
    """
    with quiet_transformers(), torch.device("meta"):
        try:
            config = AutoConfig.from_pretrained(path, local_files_only=True)
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        except Exception as error:  # a config can make the module of any model fail in any way
            found = " ".join(f"{type(error).__name__}: {error}".split())
            raise ModelFolderError([Problem(str(path), f"cannot be loaded: {found}", "repair config.json")]) from error
    return model
