"""Hugging Face model folders: loading with one of stretto's attention paths, reading of single weights, and atomic
writing, layer by layer, so that no process holds all weights.
"""

from __future__ import annotations

import copy
import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.utils import logging

from stretto.core.errors import ModelFolderError, Problem, RecipeError, naming
from stretto.core.machine import exchange, sync
from stretto.model.attention_support import check_attention
from stretto.model.hf.inspection import (
    ModelFolder,
    check_is_model_folder,
    eos_token_ids,
    inspect_model_folder,
    weight_files,
    weights_dtype,
)
from stretto.model.hf.layers import saved_buffers

__all__ = [
    "FolderWeights",
    "ModelFolder",
    "eos_token_ids",
    "inspect_model_folder",
    "load_policy",
    "plain_weights",
    "save_policy",
    "saved_dtype",
    "weights_dtype",
    "whole_folder",
]

_FILE_BYTES = 1 << 30
_LAYER = re.compile(r".*?\.\d+(?=\.)")


def write_weights(model: PreTrainedModel, parameters: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Write `parameters` of `model`, (name, tensor) pairs, to `folder` under the names of a Hugging Face folder, in
    files of about 1 GiB, with an index if there are several. At most one file and one layer are in memory. Raises
    OSError or SafetensorError if the folder cannot be written."""
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
    listing = json.dumps(index, indent=2, sort_keys=True) + "\n"
    (folder / "model.safetensors.index.json").write_text(listing, encoding="utf-8")


def _files(model: PreTrainedModel, parameters: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of each file of about 1 GiB, by their names in a Hugging Face folder."""
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
#: Patterns of the files in the tokenizer's folder that are not copied beside saved weights: weights in any format (they
#: are another model's), the config, and that of an adapter, by which transformers would load one.
_WEIGHTS = (
    *("*.safetensors", "*.index.json", "pytorch_model*", "*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx*"),
    *("tf_model*", "*.h5", "*.msgpack", "*.ot", "config.json", "adapter_config.json"),
)


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
    check_is_model_folder(Path(path), str(path))
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
    """Return torch's name of the device; "auto" becomes "cuda" if there is a GPU, else "cpu". RecipeError for "cuda"
    without a GPU."""
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
    """Write `model`, with all files of `tokenizer_folder` but weights, as a Hugging Face folder at `path`, replacing an
    older one. The folder is written beside `path` and then renamed. generation_config.json is copied as it is: training
    does not change it, and transformers would refuse to write settings that it accepts when it reads them. Without that
    file, settings in the config.json of `tokenizer_folder` are written there.

    `parameters`: (name, tensor) pairs written instead of the model's own parameters, for a model that is sharded over
    several processes; one layer of them is in memory at a time. Saved buffers are written beside them, not rounded.
    `add`: called with the folder before it is renamed, to write more files. `dtype`: parameters are rounded to it;
    None: not rounded.

    Raises:
        ModelFolderError: `path` is no folder, or holds files that are no part of a model; or transformers cannot write
            the model. Then nothing is changed.
        OSError: the folder cannot be written; then the older one stays.
    """
    check_replaceable(Path(path), [file.name for file in Path(tokenizer_folder).iterdir()])
    with whole_folder(Path(path)) as folder:
        keep_out = shutil.ignore_patterns(*_WEIGHTS)
        for file in Path(tokenizer_folder).iterdir():
            if file.is_file() and file.name not in keep_out(str(tokenizer_folder), [file.name]):
                shutil.copyfile(file, folder / file.name)
        rounded = getattr(torch, dtype) if dtype is not None else torch.float32 if parameters is not None else None
        try:
            with quiet_transformers():
                _write_config(model, folder)
                _keep_settings(model, Path(tokenizer_folder) / "config.json", folder / "generation_config.json")
                own = model.named_parameters() if parameters is None else parameters
                written = ((name, one.detach().to("cpu", rounded)) for name, one in own)
                exact = ((name, one.to("cpu")) for name, one in saved_buffers(model))
                write_weights(model, chain(written, exact), folder)
                if dtype is not None:
                    _say_dtype(folder / "config.json", dtype)
        except SafetensorError as error:  # safetensors reports system errors this way
            raise OSError(errno.EIO, f"the policy cannot be written: {error}", str(path)) from error
        except (ValueError, TypeError, LookupError, AttributeError) as error:  # what transformers refuses to write
            found = " ".join(f"{type(error).__name__}: {error}".split())
            raise ModelFolderError([Problem(str(path), f"the policy cannot be saved: {found}")]) from error
        if add is not None:
            add(folder)


def _write_config(model: PreTrainedModel, folder: Path) -> None:
    """Write the config.json that transformers would write with the weights."""
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
    model.config.save_pretrained(folder)


def _keep_settings(model: PreTrainedModel, start: Path, file: Path) -> None:
    """Write the generation settings in the config of the start to `file`, unless it exists or the config of `model` has
    them all: transformers drops most of them there."""
    tree = json.loads(start.read_text(encoding="utf-8")) if start.exists() and not file.exists() else {}
    known = GenerationConfig().to_dict().keys() - {"transformers_version"}
    settings = {key: value for key, value in tree.items() if key in known and value is not None}
    if not all(hasattr(model.config, key) for key in settings):
        file.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def saved_dtype(wanted: str, start: Path) -> str | None:
    """Return the dtype to which a saved float32 policy is rounded, "bfloat16" or "float16"; None: no rounding.
    `wanted`: a dtype, or ``"model"`` for the dtype of the folder `start`, from which training began."""
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
    further file names that may be replaced. Raises ModelFolderError for the first such file, for a path that is no
    folder, and for one like "..", that no new folder could be renamed to."""
    found = ""
    if path.name in ("", ".."):
        found = "is no name of its own"
    elif not path.exists():
        found = "is a link to nothing" if path.is_symlink() else ""
    elif not path.is_dir():
        found = "is there, and no folder"
    else:
        names, known = sorted(entry.name for entry in path.iterdir()), set(known)
        if others := [name for name in names if name not in known and not any(fnmatch(name, one) for one in _PARTS)]:
            more = f" and {len(others) - 1} more" if len(others) > 1 else ""
            found = f"holds {others[0]}{more}, no part of a model, which would be lost"
    if found:
        raise ModelFolderError([Problem(str(path), found, "give a new folder, or an empty one")])


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Context manager: yields a new temporary folder beside `path`. If the block ends without an error, it is synced to
    disk and replaces `path`; else it is removed. An OSError without a file name gets `path` as its file name."""
    changed = [path.parent, *(folder.parent for folder in path.parents if not folder.exists())]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    replaced = path.with_name(f".{path.name}.{os.getpid()}.replaced")
    _remove(partial)
    partial.mkdir()
    try:
        with naming(path):
            yield partial
            with ThreadPoolExecutor() as pool:  # each may wait for the disk
                list(pool.map(sync, (*partial.rglob("*"), partial)))
        if not exchange(partial, path):  # in one step: whoever looks, and a kill, finds the older one or the new one
            if path.exists():
                path.rename(replaced)
            try:
                partial.rename(path)
            except OSError:
                if replaced.exists():
                    replaced.rename(path)
                raise
        for parent in changed:
            with suppress(PermissionError):  # a folder that one may write to, and not read
                sync(parent)
    finally:
        _remove(partial)
        _remove(replaced)


def _remove(path: Path) -> None:
    """Remove a folder, or a link to one, whose target stays; errors of a folder are ignored."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


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


_BASE = ".base_layer."  # of a linear layer under an adapter
_ADAPTERS = ".lora_"


def plain_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters that are not adapters, and the saved buffers, named as in the model without adapters."""
    for name, one in chain(model.named_parameters(), saved_buffers(model)):
        if _ADAPTERS not in name:
            yield name.replace(_BASE, "."), one


class FolderWeights:
    """Reads the weights in a model's folder by the names of the model's parameters.

    Example::

        FolderWeights(model).read("model.layers.0.mlp.up_proj.weight", (slice(0, 128), slice(None)))  # [128, W]
    """

    def __init__(self, model: PreTrainedModel, folder: Path | None = None) -> None:
        """Find the tensors of each parameter; none is read yet. `folder`: of a model with this config; None: the one
        that `model` was created from."""
        self.folder = Path(str(model.name_or_path)) if folder is None else folder
        self._model, self._files = model, weight_files(self.folder)
        mapping = get_model_conversion_mapping(model)
        self._renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
        self._converters = [one for one in mapping if isinstance(one, WeightConverter)]
        known = dict.fromkeys((name for name, _ in plain_weights(model)), True)
        self._sources: dict[str, list[tuple[str, str | None]]] = {}  # by parameter: its tensors and merge patterns
        for source in sorted(self._files, key=dot_natural_key):
            name, pattern = self._name_of(source, known)
            self._sources.setdefault(name, []).append((source, pattern))

    @property
    def names(self) -> set[str]:
        """Names of the parameters that the folder holds."""
        return set(self._sources)

    def read(self, name: str, part: tuple[slice, ...]) -> Tensor:
        """Read the slices `part` (one per axis; empty: the whole) of the parameter `name`, one of `names`, in the
        folder's dtype. A parameter that transformers merges from several tensors (experts) is merged first."""
        (source, pattern), *_ = self._sources[name]
        if pattern is None:
            return self._tensor(source, part)
        merging = copy.deepcopy(next(one for one in self._converters if pattern in one.source_patterns))
        for each, found in self._sources[name]:
            read: Any = partial(self._tensor, each, ())  # read when it is merged
            merging.add_tensor(name, each, str(found), read)
        merged = merging.convert(name, model=self._model, config=self._model.config)[name]
        whole: Tensor = merged[0] if isinstance(merged, list) else merged
        return whole[part].clone()

    def _tensor(self, source: str, part: tuple[slice, ...]) -> Tensor:
        with safe_open(self._files[source], framework="pt") as file:
            tensor: Tensor = file.get_slice(source)[part] if part else file.get_tensor(source)
            return tensor.clone()  # the file's own memory goes with it

    def _name_of(self, source: str, known: dict[str, Any]) -> tuple[str, str | None]:
        """Return the parameter that the tensor `source` of the folder belongs to by transformers' rules, and the
        pattern of the rule that merges it with others (None: it is not merged). `known`: names of all parameters."""
        prefix = self._model.base_model_prefix
        name, pattern = rename_source_key(source, self._renamings, self._converters, prefix, known)
        if name not in known and source in known:
            return source, None
        return name, pattern
