"""Hugging Face model folders: loading with one of stretto's attention paths, and atomic writing, layer by layer, so
that no process holds all weights.
"""

from __future__ import annotations

import copy
import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import logging

from stretto.core.errors import ModelFolderError, Problem, RecipeError, folder_fault, naming
from stretto.model.attention_support import check_attention
from stretto.model.hf.inspection import ModelFolder, eos_token_ids, inspect_model_folder, weights_dtype
from stretto.model.hf.layers import saved_buffers

__all__ = [
    "ModelFolder",
    "eos_token_ids",
    "inspect_model_folder",
    "load_policy",
    "save_policy",
    "saved_dtype",
    "weights_dtype",
    "whole_folder",
]

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


#: Prefix of the names of stretto's attention paths.
OURS = "stretto_"

#: Patterns of the files that a model folder may contain.
_PARTS = (
    *("*.safetensors", "pytorch_model*", "*.index.json", "config.json", "generation_config.json", "adapter*"),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template*"),
    *("*.model", "preprocessor_config.json", "processor_config.json", "*.md", "LICENSE*", ".git*"),
)
_WEIGHTS = ("model*.safetensors", "pytorch_model*", "*.index.json", "config.json", "generation_config.json")


def load_policy(
    path: Path | str,
    *,
    attention: str = "sdpa",
    dtype: torch.dtype | str = torch.float32,
    device: str = "cpu",
) -> PreTrainedModel:
    """Load the causal language model of a folder, in eval mode.

    `attention`: the attention path: `model.decode.policy.CACHED_ATTENTION`, `model.packed.attention.PACKED_ATTENTION`,
    or a name known to transformers. The first two are registered by importing their modules, which must come first.
    `dtype`: dtype to which the weights are converted. `device` ``"auto"``: the GPU if there is one.

    Raises:
        ModelFolderError: transformers cannot load the folder; weights are missing or not finite; or the attention path
            does not support the model (`stretto.model.attention_support`).
        RecipeError: torch sees no such device.
    """
    if found := folder_fault(Path(path)):
        raise ModelFolderError([Problem(str(path), found, "a Hugging Face model folder is needed")])
    loader: Any = AutoModelForCausalLM  # its annotation does not know output_loading_info
    with quiet_transformers():
        try:
            config = AutoConfig.from_pretrained(path, local_files_only=True)
            model, report = loader.from_pretrained(
                path,
                # The attention path is set in the config, so a shared config would switch other models too.
                config=copy.deepcopy(config),
                attn_implementation=attention,
                dtype=getattr(torch, dtype) if isinstance(dtype, str) else dtype,
                local_files_only=True,
                output_loading_info=True,
            )
        except Exception as error:  # a config can make a model's module fail in any way
            found = " ".join(f"{type(error).__name__}: {error}".split())
            raise ModelFolderError([Problem(str(path), f"cannot be loaded: {found}")]) from error
    if missing := sorted(report["missing_keys"]):
        found = f"lacks the weight {missing[0]}" + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
        raise ModelFolderError([Problem(str(path), found, "copy or download the folder again")])
    if broken := [name for name, weight in model.named_parameters() if not bool(weight.isfinite().all())]:
        found = f"{broken[0]} holds numbers that are not finite" + (f", and {len(broken) - 1} more" * (len(broken) > 1))
        raise ModelFolderError([Problem(str(path), found, "copy or download the folder again")])
    policy: PreTrainedModel = model.to(_device(device)).eval()
    if attention.startswith(OURS):
        check_attention(policy)
    return policy


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise RecipeError([Problem("device", f"{name!r}, and torch sees no GPU here", '"auto" or "cpu"')])
    return name


def save_policy(
    model: PreTrainedModel,
    tokenizer_folder: Path | str,
    path: Path | str,
    parameters: Iterable[tuple[str, Tensor]] | None = None,
    add: Callable[[Path], None] | None = None,
    dtype: str | None = None,
) -> None:
    """Write `model` with the tokenizer of `tokenizer_folder` as a Hugging Face folder at `path`, replacing an older
    one. The folder is written beside `path` and then renamed.

    `parameters`: (name, tensor) pairs written instead of the model's own parameters, for a model that is sharded over
    several processes; one layer of them is in memory at a time. Saved buffers are written beside them, not rounded.
    `add`: called with the folder before it is renamed, to write more files. `dtype`: parameters are rounded to it;
    None: not rounded.

    Raises:
        ModelFolderError: `path` holds files that are no part of a model.
        OSError: the folder cannot be written.
    """
    check_replaceable(Path(path), [file.name for file in Path(tokenizer_folder).iterdir()])
    with whole_folder(Path(path)) as folder:
        keep_out = shutil.ignore_patterns(*_WEIGHTS)
        for file in Path(tokenizer_folder).iterdir():
            if file.is_file() and file.name not in keep_out(str(tokenizer_folder), [file.name]):
                shutil.copyfile(file, folder / file.name)
        rounded = torch.float32 if dtype is None else getattr(torch, dtype)
        if parameters is None and dtype is not None:
            parameters = model.named_parameters()
        try:
            with quiet_transformers():
                if parameters is None:
                    model.save_pretrained(folder)
                else:
                    _write_configs(model, folder)
                    written = ((name, one.detach().to("cpu", rounded)) for name, one in parameters)
                    exact = ((name, one.to("cpu")) for name, one in saved_buffers(model))
                    write_weights(model, chain(written, exact), folder)
                if dtype is not None:
                    _say_dtype(folder / "config.json", dtype)
        except SafetensorError as error:  # safetensors reports system errors this way
            raise OSError(errno.EIO, f"the policy cannot be written: {error}", str(path)) from error
        if add is not None:
            add(folder)


def _write_configs(model: PreTrainedModel, folder: Path) -> None:
    """Write the config.json and generation_config.json that transformers would write with the weights."""
    model.save_pretrained(folder, state_dict={})
    for file in folder.glob("*.safetensors"):
        file.unlink()


def saved_dtype(wanted: str, start: Path) -> str | None:
    """The dtype to which a saved float32 policy is rounded; None: no rounding. `wanted`: a dtype, or ``"model"`` for
    the dtype of the folder `start`, from which training began."""
    own = weights_dtype(start) if wanted == "model" else wanted
    return own if own in ("bfloat16", "float16") else None


def _say_dtype(config: Path, dtype: str) -> None:
    """Replace the dtype in a written config by `dtype`. transformers writes the dtype of the model in memory, and
    servers load weights in the config's dtype."""
    tree = json.loads(config.read_text(encoding="utf-8"))
    sections = [tree, *(section for section in tree.values() if isinstance(section, dict))]
    for section in sections:
        section |= {key: dtype for key in ("dtype", "torch_dtype") if key in section}
    config.write_text(json.dumps(tree | {"dtype": dtype}, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def check_replaceable(path: Path, known: Iterable[str] = ()) -> None:
    """Refuse to replace a folder that contains other files than those of a model; a missing path is accepted. `known`:
    further file names that may be replaced.

    Raises:
        ModelFolderError: names such a file; or `path` is no folder.
    """
    if not path.exists():
        if path.is_symlink():
            raise ModelFolderError([Problem(str(path), "is a link to nothing", "give a new folder, or an empty one")])
        return
    if not path.is_dir():
        raise ModelFolderError([Problem(str(path), "is there, and no folder", "give a new folder, or an empty one")])
    names, known = sorted(entry.name for entry in path.iterdir()), set(known)
    if others := [name for name in names if name not in known and not any(fnmatch(name, one) for one in _PARTS)]:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        found = f"holds {others[0]}{more}, no part of a model, which would be lost"
        raise ModelFolderError([Problem(str(path), found, "give a new folder, or an empty one")])


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Context manager: yields a new temporary folder beside `path`. It replaces `path` if the block ends without an
    error, and is removed otherwise. An OSError without a file name gets `path` as its file name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    replaced = path.with_name(f".{path.name}.{os.getpid()}.replaced")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        with naming(path):
            yield partial
        if path.exists():
            path.rename(replaced)
        try:
            partial.rename(path)
        except OSError:
            if replaced.exists():
                replaced.rename(path)
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Context manager: suppress the progress bars and warnings of transformers."""
    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
