"""Check that a folder's weights fit its config, using a model on the meta device."""

from __future__ import annotations

import re

from transformers import PreTrainedConfig

from stretto.core.errors import ModelFolderError, Problem
from stretto.model.hf.inspection import ModelFolder, read_weights
from stretto.model.hf.skeleton import skeleton

_LAYER = re.compile(r"(?<=\.)[0-9]+(?=\.)")
_FLOATING = ("F64", "F32", "F16", "BF16")
_SHOWN = 5


def check_fit(folder: ModelFolder) -> PreTrainedConfig:
    """Check names, shapes and dtypes of a folder's weights against its config, and return the config. Weights are not
    read.

    Names that transformers translates while loading are not checked.

    Raises:
        ModelFolderError: transformers cannot create the model; weights are missing, have another shape, or are not
            floating-point numbers.
    """
    place, model = str(folder.path), skeleton(folder.path)
    parameters = {name: tuple(tensor.shape) for name, tensor in model.named_parameters(remove_duplicate=True)}
    held = read_weights(folder.path)
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
    known = set(model.state_dict())
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
