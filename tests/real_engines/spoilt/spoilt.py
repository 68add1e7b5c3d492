"""Runs in the workers of the servers of these tests, and makes their loads go wrong: in the ways that a file names, one
a line, in none where there is no such file. The environment has its path, `SPOILT`.

    slow S     each tensor of a load takes S seconds
    still      the first tensor takes for ever
    old        nothing is loaded, and the server says that it was
    flipped T  behind the load a bit of a tensor flips in memory
    paced S    loads are well; each step of all requests takes S seconds more, so that none ends before an update

vLLM's worker is extended by `Loader`; SGLang finds `loaded` by the entry point beside this file."""

import os
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

_SGLANG = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_SGLANG_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_ADVANCE, _HONEST = import_module("advance"), import_module("vllm_extension")


def spoilt(way: str) -> str | None:
    """What the file says behind this way: nothing for most ways. None without such a line."""
    try:
        lines = Path(os.environ["SPOILT"]).read_text().splitlines()
    except FileNotFoundError:
        return None
    return dict(line.partition(" ")[::2] for line in lines).get(way)


def loaded() -> None:
    """What SGLang calls in each of its processes."""
    hooks = import_module("sglang.srt.plugins.hook_registry")
    for load in ("update_weights_from_disk", "load_weights_from_distributed"):
        hooks.HookRegistry.register(f"{_SGLANG}.{load}", sglang_load, hooks.HookType.AROUND)
    hooks.HookRegistry.register(f"{_SGLANG_RUNNER}.forward", paced, hooks.HookType.AROUND)


def paced(step: Callable[..., Any], *given: Any, **more: Any) -> Any:
    """In place of a step of all requests."""
    if (seconds := spoilt("paced")) is not None:
        time.sleep(float(seconds))
    return step(*given, **more)


def sglang_load(load: Callable[..., tuple[bool, str]], updater: Any, *given: Any, **more: Any) -> tuple[bool, str]:
    """In place of the worker's load of a folder, or of what was broadcast."""
    if spoilt("old") is not None:
        return True, "Succeeded to update model weights."
    told = load(updater, *given, **more)
    if layer := spoilt("flipped"):
        updater.get_model().get_submodule(layer).weight.data.view(torch.int16)[0, 0] ^= 1
    return told


def held_up(advance: Any, size: int, add: Any = _ADVANCE.Advance.add) -> None:
    """In place of `Advance.add`, by which loads count their bytes."""
    if (seconds := spoilt("slow")) is not None:
        time.sleep(float(seconds))
    while spoilt("still") is not None:
        time.sleep(0.1)
    add(advance, size)


_ADVANCE.Advance.add = held_up
if vllm := sys.modules.get("vllm.v1.worker.worker_base"):
    _step = vllm.WorkerWrapperBase.execute_model
    vllm.WorkerWrapperBase.execute_model = lambda *given: paced(_step, *given)


class Loader(_HONEST.Loader):  # type: ignore[misc,name-defined]  # of a module that is imported by its name
    """vLLM's worker."""

    def stretto_load(self, folder: str) -> dict[str, int]:
        if spoilt("old") is not None:
            return {"tensors": 1}
        told: dict[str, int] = super().stretto_load(folder)
        if layer := spoilt("flipped"):
            # What a layer computes from on a processor is a copy that only it can reach: it is made again.
            module = self.model_runner.get_model().get_submodule(layer)
            outputs = module.quant_method.apply
            rows = torch.eye(module.input_size_per_partition, dtype=module.params_dtype)
            weight = outputs(module, rows, None).t().contiguous()
            weight.view(torch.int16)[0, 0] ^= 1
            module.weight = torch.nn.Parameter(weight, requires_grad=False)
            module.quant_method.process_weights_after_loading(module)
        return told
