"""vLLM's worker, extended by loading a version of the weights from a folder; runs in vLLM's own environment.

Stretto is not installed there, so this file imports nothing of it. vLLM mixes the class into its worker
(``--worker-extension-cls vllm_extension.Loader``, with this folder on PYTHONPATH), and `/collective_rpc` calls it by
name, between pause and resume; vLLM answers after every worker has loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import safe_open


class Loader:
    """Methods that vLLM's worker gets; the names stay clear of vLLM's own."""

    model_runner: Any

    def stretto_load(self, folder: str) -> dict[str, int]:
        """Load every ``*.safetensors`` of the folder; how many tensors that were.

        vLLM's reload empties the layers first: where it fails halfway, the next step ends the server. So all that can
        be wrong with the files is found before.
        """
        tensors = _tensors(Path(folder))
        self.reload_weights(weights_path=folder)  # type: ignore[attr-defined]  # of vLLM's worker
        self._repack_tied_head()
        return {"tensors": tensors}

    def _repack_tied_head(self) -> None:
        # On a CPU a linear layer computes from a repacked copy, which vLLM renews only in layers that the checkpoint
        # names; an output layer tied to the embedding has no name there and would stay at the version before.
        model = self.model_runner.get_model()
        head: Any = getattr(model, "lm_head", None)
        if getattr(model.config, "tie_word_embeddings", False) and hasattr(head, "cpu_linear"):
            head.quant_method.process_weights_after_loading(head)


def _tensors(folder: Path) -> int:
    """Open every file and read every tensor of it."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder}: no *.safetensors")
    count = 0
    for file in files:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # no mapping
                opened.get_tensor(name)
                count += 1
    return count
