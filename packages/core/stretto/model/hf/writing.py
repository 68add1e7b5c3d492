"""Write the weights of a model to safetensors layer by layer, so that no process holds all weights."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

_FILE_BYTES = 1 << 30
_LAYER = re.compile(r".*?\.\d+(?=\.)")


def write_weights(model: PreTrainedModel, parameters: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Write `parameters` of `model`, (name, tensor) pairs, to `folder` under the names of a Hugging Face folder, in
    files of about 1 GiB. At most one file and one layer are in memory.

    Raises:
        OSError, SafetensorError: the folder cannot be written.
    """
    parts: list[tuple[Path, list[str], int]] = []
    for tensors in _files(model, parameters):
        file = folder / f".part-{len(parts)}"
        save_file(tensors, file, metadata={"format": "pt"})
        parts.append((file, list(tensors), sum(tensor.nbytes for tensor in tensors.values())))
    if len(parts) == 1:
        parts[0][0].rename(folder / "model.safetensors")
        return
    listed: dict[str, str] = {}
    for number, (file, names, _) in enumerate(parts, 1):
        name = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        file.rename(folder / name)
        listed |= dict.fromkeys(names, name)
    index = {"metadata": {"total_size": sum(size for *_, size in parts)}, "weight_map": listed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _files(model: PreTrainedModel, parameters: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of each file, by name."""
    held: dict[str, Tensor] = {}
    for _, layer in groupby(parameters, key=lambda one: (_LAYER.match(one[0]) or one)[0]):
        named = revert_weight_conversion(model, dict(layer))
        own = {name: tensor.contiguous() for name, tensor in named.items()}
        size = sum(tensor.nbytes for tensor in (*held.values(), *own.values()))
        if held and size > _FILE_BYTES:
            yield held
            held = {}
        held |= own
    yield held
