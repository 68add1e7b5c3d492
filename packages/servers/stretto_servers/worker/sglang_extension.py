"""Plugin of SGLang that reports the progress of loads and the content of a worker's memory.

SGLang loads it in each of its processes, by the entry point beside this file. It wraps two functions:

    the iterator over a load's tensors   counts them as they are read (`advance`)
    the handler of /weights_checker      has another action "stretto_held", which returns the sums of `readback`
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from torch import Tensor

_HERE = f"{__package__}." if __package__ else ""  # in a server, this folder itself is on the import path
_ADVANCE, _READBACK = (import_module(f"{_HERE}{name}") for name in ("advance", "readback"))

ACTION = "stretto_held"
_HOOKS = "sglang.srt.plugins.hook_registry"
_CHECKER = "sglang.srt.utils.weight_checker.WeightChecker.handle"
_LOADER = "sglang.srt.model_loader.loader.DefaultModelLoader._get_weights_iterator"


def register() -> None:
    """Entry point of the plugin: wrap SGLang's weights checker and the iterator over a load's tensors."""
    hooks = import_module(_HOOKS)
    hooks.HookRegistry.register(_CHECKER, handle, hooks.HookType.AROUND)
    hooks.HookRegistry.register(_LOADER, counted, hooks.HookType.AROUND)


def handle(original: Callable[..., Any], checker: Any, action: str, *arguments: Any, **settings: Any) -> Any:
    """Wrapper of SGLang's handler `original` with one `action` more, "stretto_held", which returns the checksums of the
    `checker`'s model. For it, `skip_tensor_list` holds the folder of the loaded version, and the shapes of its tensors
    as JSON."""
    if action != ACTION:
        return original(checker, action, *arguments, **settings)
    folder, shapes = settings["skip_tensor_list"]
    sums = _READBACK.held(checker._get_model(), json.loads(shapes), _ADVANCE.Advance(folder).add)
    info = checker._parallelism_info(role=settings["role"]).model_dump()
    return {"checksums": sums, "per_gpu_checksum": "", "parallelism_info": info}


def counted(
    original: Callable[..., Iterator[tuple[str, Tensor]]], loader: Any, source: Any, *arguments: Any, **settings: Any
) -> Iterator[tuple[str, Tensor]]:
    """Wrapper of SGLang's iterator over the tensors of a load. Each tensor's bytes are added to the counter in the
    folder of `source` when the next one is requested."""
    advance = _ADVANCE.Advance(str(source.model_or_path))
    for name, tensor in original(loader, source, *arguments, **settings):
        yield name, tensor
        advance.add(tensor.nbytes)
