"""Extension of vLLM's worker: loads weights from a folder, and reports the content of its memory.

Stretto is not installed in vLLM's environment, so this file imports nothing of it. vLLM adds the class as a base of its
worker (``--worker-extension-cls vllm_extension.Loader``, with this folder on PYTHONPATH). `/collective_rpc` calls its
methods by name between pause and resume, and returns when every worker is done.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

_HERE = f"{__package__}." if __package__ else ""  # in a server, this folder itself is on the import path
_ADVANCE, _READBACK = (import_module(f"{_HERE}{name}") for name in ("advance", "readback"))


class Loader:
    """Methods added to vLLM's worker, to load weights from a folder and to sum what is held; their names do not clash
    with vLLM's own."""

    model_runner: Any

    def stretto_load(self, folder: str) -> dict[str, int]:
        """Load every ``*.safetensors`` file of the folder into the model; returns the number of tensors as "tensors".

        vLLM's reload empties the layers first, so that a failure halfway would end the server at its next step.
        Therefore all files are read once before.

        Raises:
            FileNotFoundError: the folder has no such file.
        """
        advance = _ADVANCE.Advance(folder)
        tensors = sum(1 for _ in _tensors(Path(folder), advance))
        self.reload_weights(weights_iterator=_tensors(Path(folder), advance))  # type: ignore[attr-defined]  # of vLLM's worker
        self._repack_tied_head()
        return {"tensors": tensors}

    def stretto_held(self, folder: str, shapes: str) -> dict[str, str]:
        """Checksums of the published tensors in this worker's memory, as text by name; those that cannot be read are
        left out (`readback.held`). `folder` gets the counter file of the bytes read. `shapes`: shapes of the published
        tensors, as JSON."""
        found: dict[str, str] = _READBACK.held(
            self.model_runner.get_model(), json.loads(shapes), _ADVANCE.Advance(folder).add
        )
        return found

    def _repack_tied_head(self) -> None:
        # On a CPU a linear layer computes from a repacked copy, which vLLM renews only for layers in the checkpoint. An
        # output layer that is tied to the embedding is not in the checkpoint, and would keep the earlier version.
        model = self.model_runner.get_model()
        head: Any = getattr(model, "lm_head", None)
        if getattr(model.config, "tie_word_embeddings", False) and hasattr(head, "cpu_linear"):
            head.quant_method.process_weights_after_loading(head)


def _tensors(folder: Path, advance: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of all tensors in the folder's ``*.safetensors`` files. The bytes of each are added to
    `advance` when the next one is requested.

    Raises:
        FileNotFoundError: the folder has no such file.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder}: no *.safetensors")
    for file in files:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # no mapping
                tensor = opened.get_tensor(name)
                yield name, tensor
                advance.add(tensor.nbytes)
