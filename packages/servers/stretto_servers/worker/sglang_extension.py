"""Plugin of SGLang that reports the progress of loads and the content of a worker's memory.

SGLang loads it in each of its processes, by the entry point beside this file. It wraps two functions:

    the tensors of a load      counted as they are read (`advance`)
    /weights_checker           action "stretto_held": the sums of `readback` in place of checksums
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from torch import Tensor

_HERE = f"{__package__}." if __package__ else ""  # in a server, its path leads to the modules of this folder
_ADVANCE, _READBACK = (import_module(f"{_HERE}{name}") for name in ("advance", "readback"))

ACTION = "stretto_held"
_HOOKS = "sglang.srt.plugins.hook_registry"
_CHECKER = "sglang.srt.utils.weight_checker.WeightChecker.handle"
_LOADER = "sglang.srt.model_loader.loader.DefaultModelLoader._get_weights_iterator"


def register() -> None:
    """Entry point: install the wrappers."""
    hooks = import_module(_HOOKS)
    hooks.HookRegistry.register(_CHECKER, handle, hooks.HookType.AROUND)
    hooks.HookRegistry.register(_LOADER, counted, hooks.HookType.AROUND)


def handle(original: Callable[..., Any], checker: Any, action: str, *arguments: Any, **settings: Any) -> Any:
    """SGLang's handler with an additional action; `skip_tensor_list` has the folder of the version, and the shapes of
    its tensors as JSON."""
    if action != ACTION:
        return original(checker, action, *arguments, **settings)
    folder, shapes = settings["skip_tensor_list"]
    sums = _READBACK.held(checker._get_model(), json.loads(shapes), _ADVANCE.Advance(folder).add)
    info = checker._parallelism_info(role=settings["role"]).model_dump()
    return {"checksums": sums, "per_gpu_checksum": "", "parallelism_info": info}


def counted(
    original: Callable[..., Iterator[tuple[str, Tensor]]], loader: Any, source: Any, *arguments: Any, **settings: Any
) -> Iterator[tuple[str, Tensor]]:
    """The same tensors, counted when the next one is requested."""
    advance = _ADVANCE.Advance(str(source.model_or_path))
    for name, tensor in original(loader, source, *arguments, **settings):
        yield name, tensor
        advance.add(tensor.nbytes)
