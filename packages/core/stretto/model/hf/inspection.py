"""Inspect a Hugging Face model folder without loading weights, by its config and the headers of its safetensors files;
all mistakes are reported at once.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from stretto.core.errors import UNREADABLE, ModelFolderError, Problem, folder_fault, nearest
from stretto.core.frames import Count

_LENGTH = struct.Struct("<Q")
_LARGEST_HEADER = 100 << 20  # the format's own limit
_LONGEST_NAME = 255  # bytes of a file's name


@dataclass(frozen=True)
class _TensorHeader:
    """One tensor of a safetensors file. `dtype`: as safetensors names it ("F32", "BF16"); `end`: offset of its end in
    the data, in bytes."""

    dtype: str
    shape: tuple[int, ...]
    end: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


_POINTER = b"version https://git-lfs"
POINTS = "is a pointer of git-lfs, and what it points to was not fetched: run `git lfs pull` in the folder"


def is_pointer(file: Path) -> bool:
    """Whether the file is a git-lfs pointer instead of the real content."""
    with file.open("rb") as stream:
        return stream.read(len(_POINTER)) == _POINTER


class BrokenHeader(ValueError):
    """The file is not a complete safetensors file; the text is the reason."""


def read_headers(file: Path) -> dict[str, _TensorHeader]:
    """Read the header of a safetensors file; returns its tensors by name.

    Raises:
        BrokenHeader: the header cannot be read, or does not match the file size; or the file is a git-lfs pointer.
        OSError: there is no such file, or it cannot be read.
    """
    size = file.stat().st_size
    if is_pointer(file):
        raise BrokenHeader(POINTS)
    with file.open("rb") as stream:
        start = stream.read(_LENGTH.size)
        if len(start) < _LENGTH.size:
            raise BrokenHeader(f"is {size} bytes, too short for a safetensors file")
        (length,) = _LENGTH.unpack(start)
        if length > min(size - _LENGTH.size, _LARGEST_HEADER):
            raise BrokenHeader(f"announces a header of {length:,} bytes in a file of {size:,}")
        tensors = _parse(stream.read(length))
    expected = _LENGTH.size + length + max((tensor.end for tensor in tensors.values()), default=0)
    if size != expected:
        raise BrokenHeader(f"is {size:,} bytes, its header says {expected:,}")
    return tensors


class _Entry(msgspec.Struct, frozen=True):
    """A tensor in the header of a safetensors file."""

    dtype: str
    shape: tuple[Count, ...]
    data_offsets: tuple[Count, Count]


def _parse(header: bytes) -> dict[str, _TensorHeader]:
    try:
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(entry, type=_Entry) for name, entry in raw.items()}
    except UNREADABLE as error:
        raise BrokenHeader(f"has a header that cannot be read ({type(error).__name__}: {error})") from None
    return {name: _TensorHeader(one.dtype, one.shape, one.data_offsets[1]) for name, one in entries.items()}


_ADAPTER = "adapter_model.safetensors"
_INDEX = "model.safetensors.index.json"
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.pt")
_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
#: Names of folders of models: ~/models/policy is no name of the hub.
_NO_OWNERS = ("checkpoints", "model", "models", "policy", "weights")
#: Names that GPT-2's config has for those of Llama's.
_GPT2 = {
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
}
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class ModelFolder:
    """Facts about a model folder, read from its files by `inspect_model_folder`. `parameters`: tied matrices count
    once; `bytes`: size of the weight files; `dtype`: the most common one, or "quantised".

    Example: ``ModelFolder(path=..., architecture="Qwen3ForCausalLM", parameters=158_784, bytes=636_008, vocab_size=30,
    context_length=256, layers=3, kv_heads=2, head_dim=32, hidden_size=64, eos_token_ids=(1,), dtype="float32")``
    """

    path: Path
    architecture: str
    parameters: int  # number of weights; tied matrices count once
    bytes: int  # size of all weight files
    vocab_size: int  # rows of the embedding
    context_length: int
    layers: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str  # the most common one of the weights, or "quantised" (`weights_dtype`)


def inspect_model_folder(path: Path | str, key: str = "") -> ModelFolder:
    """Check a model folder and read its facts, without loading weights. `key`: the recipe key that names it, for
    messages; "": none does. Raises ModelFolderError, which lists every problem: no folder, a broken or missing config,
    missing, truncated or pickled weights, a tokenizer that is missing or larger than the embedding, no end-of-sequence
    token."""
    folder = Path(path)
    place = f"{key}: {folder}" if key else str(folder)
    check_is_model_folder(folder, place)
    problems: list[Problem] = []
    shape = shape_of(folder, problems)
    tensors, size = _weights(folder, problems)
    ends: tuple[int, ...] = ()
    if shape is not None:
        ends = _check_vocabulary(folder, shape["vocab_size"], tensors, problems)
    if problems or shape is None:
        raise ModelFolderError(problems)
    return ModelFolder(
        path=folder,
        parameters=sum(tensor.elements for tensor in tensors.values()),
        bytes=size,
        eos_token_ids=ends,
        dtype=_dtype_of(tensors.values()),
        **shape,
    )


def check_is_model_folder(folder: Path, place: str) -> None:
    """Check that a folder is there and is no run folder; raises ModelFolderError at `place` with the folder that was
    perhaps meant."""
    if found := folder_fault(folder):
        remedy = f"a Hugging Face model folder is needed{_meant_by(folder)}"
        raise ModelFolderError([Problem(place, found, remedy)])
    policies = {int(path.name[1:]): path for path in (folder / "policy").glob("v*") if path.name[1:].isdecimal()}
    if policies and not (folder / "config.json").exists():
        raise ModelFolderError([Problem(place, "is a run folder", f"its newest policy is {policies[max(policies)]}")])


def _meant_by(folder: Path) -> str:
    """Return advice to append for a path that is no model folder: the most similar model folder beside it; or to
    download the model, if the path looks like a hub name (owner/name, or a name in the working directory); else ""."""
    parts = folder.parts[-2:]
    if os.path.isdir(folder.parent):
        near = nearest(folder.name, sorted(beside.parent.name for beside in folder.parent.glob("*/config.json")))
        if near.startswith("did"):
            return f"; {near}"
        parts = parts[-1:] if folder.absolute().parent == Path.cwd() else ()
    named = parts and parts[0] not in _NO_OWNERS and all(_HUB_NAME.fullmatch(part) for part in parts)
    if os.path.exists(folder) or not named:
        return ""
    name = "/".join(parts)
    return f"; if {name} is meant as a hub name: `hf download {name} --local-dir {parts[-1]}`, and give that folder"


def weights_dtype(folder: Path) -> str:
    """Return the most common dtype of the weights of a model folder that `inspect_model_folder` has accepted, such as
    "bfloat16"; "quantised" if it is none of float64, float32, float16 and bfloat16."""
    return _dtype_of(read_weights(folder).values())


def _dtype_of(tensors: Iterable[_TensorHeader]) -> str:
    dtypes = Counter(dict.fromkeys(_DTYPES, 0))
    for tensor in tensors:
        dtypes[tensor.dtype] += tensor.elements
    return _DTYPES.get(dtypes.most_common(1)[0][0], "quantised")


def eos_token_ids(folder: Path, id_of: Callable[[str], int | None] | None = None) -> tuple[int, ...]:
    """Return the ids of the end-of-sequence tokens: those of the generation config, else of the config, and then the
    tokenizer's, at which vLLM stops too: some fine-tunes name the end of a turn there alone. Empty if none names one.
    They are not checked against the vocabulary, but the tokenizer's counts only if the model has such a token. `id_of`:
    id of a token; None: tokenizer.json is read for it."""
    config = _read_json(folder / "config.json", [])
    given = (one.get("eos_token_id") for one in (_read_json(folder / "generation_config.json", []), config))
    found: Any = next((one for one in given if one is not None), [])
    named = tuple(found) if isinstance(found, list) else (found,)
    token = _read_json(folder / "tokenizer_config.json", []).get("eos_token")
    text = token.get("content") if isinstance(token, Mapping) else token
    own = None
    if isinstance(text, str):
        own = (id_of or _vocabulary(_read_json(folder / "tokenizer.json", [])).get)(text)
    size = config.get("vocab_size")
    return named if own is None or own in named or (type(size) is int and own >= size) else (*named, own)


def _read_json(file: Path, problems: list[Problem]) -> dict[str, Any]:
    """Read the object in a JSON file; if it cannot be read, append a problem to `problems` and return {}."""
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        problems.append(Problem(str(file), "no such file", "a Hugging Face model folder has one"))
    except (OSError, ValueError, RecursionError) as error:
        found = POINTS if file.is_file() and is_pointer(file) else f"cannot be read as JSON: {error}"
        problems.append(Problem(str(file), found))
    else:
        if isinstance(tree, dict):
            return tree
        problems.append(Problem(str(file), "holds no JSON object"))
    return {}


def shape_of(folder: Path, problems: list[Problem]) -> dict[str, Any] | None:
    """Read from config.json, or its part `text_config`, the fields of `ModelFolder` that describe the shape. The number
    of KV heads and the head size may be left out there: then as many as attention heads, and hidden size / heads. If
    some are missing or invalid, append problems to `problems` and return None."""
    before, file = len(problems), folder / "config.json"
    whole = _read_json(file, problems)
    config = whole.get("text_config", whole)
    if not isinstance(config, dict):
        problems.append(Problem(f"{file}: text_config", f"{config!r}", "an object is needed"))

    unnamed: list[str] = []

    def number(*keys: str) -> int:
        names = (*keys, *(_GPT2[key] for key in keys if key in _GPT2))
        name = next((name for name in names if config.get(name) is not None), None)
        if name is None:
            unnamed.append(keys[-1])
            return 1
        value = config[name]
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        problems.append(Problem(f"{file}: {name}", f"{value!r}", "a positive whole number is needed"))
        return 1

    if len(problems) > before:
        return None
    heads, architectures = number("num_attention_heads"), whole.get("architectures")
    named = architectures[0] if isinstance(architectures, list) and architectures else whole.get("model_type")
    if not isinstance(named, str):
        problems.append(Problem(str(file), "names no architecture", 'such as "architectures": ["Qwen3ForCausalLM"]'))
    shape = {
        "architecture": named,
        "vocab_size": number("vocab_size"),
        "context_length": number("max_position_embeddings"),
        "layers": number("num_hidden_layers"),
        "kv_heads": number("num_key_value_heads", "num_attention_heads"),
        "head_dim": number("hidden_size") // heads if config.get("head_dim") is None else number("head_dim"),
        "hidden_size": number("hidden_size"),
    }
    if not unnamed and not shape["head_dim"]:
        problems.append(Problem(f"{file}: num_attention_heads", f"{heads}", "hidden_size at most"))
    if len(names := list(dict.fromkeys(unnamed))) > 1:
        found = f"{whole.get('model_type')!r} has no {', '.join(names)}"
        remedy = "only models of Llama's or GPT-2's form, which have them, are supported"
        problems.append(Problem(str(file), found, remedy))
    elif names:
        problems.append(Problem(f"{file}: {names[0]}", "None", "a positive whole number is needed"))
    return shape if len(problems) == before else None


def read_config(folder: Path) -> dict[str, Any]:
    """Return the contents of config.json of a model folder; {} if it cannot be read."""
    return _read_json(folder / "config.json", [])


def has_weights(folder: Path) -> bool:
    """Whether a folder has a file named as weights or as an adapter (safetensors, .bin, .pt), or an index of
    safetensors files. Other formats are not seen, and contents are not read."""
    return any(True for pattern in _WEIGHTS for _ in folder.glob(pattern))


def read_weights(folder: Path) -> dict[str, _TensorHeader]:
    """Return the tensor headers, by name, of a folder that `inspect_model_folder` has accepted."""
    return _weights(folder, [])[0]


def weight_files(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor, by tensor name: from the index if there is one, else from the files' headers;
    empty for a folder without safetensors files. A folder that `inspect_model_folder` has not accepted may raise
    BrokenHeader."""
    index = _read_json(folder / _INDEX, []).get("weight_map")
    if isinstance(index, dict):
        return {name: folder / file for name, file in index.items()}
    return {name: file for file in _unlisted(folder) for name in read_headers(file)}


def _unlisted(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder without an index: model.safetensors alone if it is there, as
    transformers reads it; else all but an adapter."""
    if (whole := folder / "model.safetensors").exists():
        return [whole]
    return [file for file in sorted(folder.glob("*.safetensors")) if file.name != _ADAPTER]


def _weights(folder: Path, problems: list[Problem]) -> tuple[dict[str, _TensorHeader], int]:
    """Return the tensor headers, by name, of the folder's readable weight files, and the size of all weight files in
    bytes. Problems are appended to `problems`: a broken index, a missing or broken file, a tensor that no file holds,
    no weights."""
    index, before = folder / _INDEX, len(problems)
    tensors: dict[str, _TensorHeader] = {}
    if index.exists():
        listed = _read_json(index, problems).get("weight_map") or {}
        if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
            problems.append(Problem(f"{index}: weight_map", "is no table of file names", "copy the file again"))
            listed = {}
        if outside := [name for name in listed.values() if not _is_file_name(name)]:
            problems.append(Problem(str(index), f"lists {outside[0]!r:.80}", "weights lie in the model's own folder"))
        files = [folder / name for name in sorted(set(listed.values())) if _is_file_name(name)]
    else:
        listed, files = {}, _unlisted(folder)
    if not files:
        problems.append(_no_weights(folder))
    for file in files:
        try:
            tensors |= read_headers(file)
        except FileNotFoundError:
            problems.append(Problem(str(file), "no such file", f"{index.name} lists it"))
        except (OSError, BrokenHeader) as error:
            remedy = "" if str(error) == POINTS else "copy or download the file again"
            problems.append(Problem(str(file), str(error), remedy))
        else:
            continue
        listed = {name: place for name, place in listed.items() if place != file.name}
    if files and not tensors and len(problems) == before:
        problems.append(_no_weights(folder))
    if missing := sorted(set(listed) - set(tensors)):
        problems.append(Problem(str(index), f"lists {missing[0]} and {len(missing) - 1} more that no file holds"))
    return tensors, sum(file.stat().st_size for file in files if file.exists())


def _is_file_name(name: str) -> bool:
    """Whether a file directly in a folder can have this name: no path, at most 255 bytes."""
    try:
        return Path(name).name == name and 0 < len(os.fsencode(name)) <= _LONGEST_NAME and "\0" not in name
    except UnicodeEncodeError:  # half of a surrogate pair
        return False


def _no_weights(folder: Path) -> Problem:
    """Return the problem of a folder without safetensors files: it has an adapter, pickled weights, or nothing."""
    if (folder / _ADAPTER).exists():
        found = "it holds no weights of its own: an adapter needs the model it was made for"
        return Problem(str(folder), found, "merge the adapter into its model, and save that")
    pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt"))
    found = "its weights are pickled, and loading a pickle runs its code" if pickled else "it holds no weights"
    return Problem(str(folder), found, "save the model as safetensors")


def _check_vocabulary(
    folder: Path, vocab_size: int, tensors: Mapping[str, _TensorHeader], problems: list[Problem]
) -> tuple[int, ...]:
    """Check that embedding, tokenizer and end-of-sequence tokens, of which there must be one, agree on the vocabulary;
    append problems to `problems`. Returns the end-of-sequence tokens."""
    for name, tensor in tensors.items():
        if name.endswith("embed_tokens.weight") and tensor.shape[:1] != (vocab_size,):
            found = (
                f"{name} has {tensor.shape[0] if tensor.shape else 0} rows, config.json says vocab_size {vocab_size}"
            )
            problems.append(Problem(str(folder), found))
    before = len(problems)
    vocabulary = _vocabulary(_read_json(folder / "tokenizer.json", problems))
    largest = max(vocabulary.values(), default=0)
    if len(problems) == before and largest >= vocab_size:
        found = f"the tokenizer knows token {largest}, the embedding has {vocab_size} rows"
        problems.append(Problem(str(folder / "tokenizer.json"), found, "save the tokenizer of this model"))
    ends: tuple[Any, ...] = eos_token_ids(folder, vocabulary.get)
    wrong = [end for end in ends if isinstance(end, bool) or not (isinstance(end, int) and 0 <= end < vocab_size)]
    if (generation := folder / "generation_config.json").exists():
        _read_json(generation, problems)
    if not ends:
        problems.append(Problem(str(folder), "no end-of-sequence token", "set eos_token_id in generation_config.json"))
    if wrong:
        problems.append(Problem(f"{folder}: eos_token_id", f"{wrong[0]!r}", f"allowed: 0 to {vocab_size - 1}"))
    return ends


def _vocabulary(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Return token ids by token from the contents of a tokenizer.json, including added tokens; empty for contents of
    another form."""
    model = tokenizer.get("model")
    listed: Any = model.get("vocab", {}) if isinstance(model, Mapping) else {}
    try:
        vocabulary = dict(listed) if isinstance(listed, Mapping) else {entry[0]: at for at, entry in enumerate(listed)}
        vocabulary |= {token["content"]: token["id"] for token in tokenizer.get("added_tokens", ())}
    except (TypeError, KeyError, IndexError):
        return {}  # the caller loads the tokenizer, which reports the mistake
    return vocabulary if all(type(id) is int for id in vocabulary.values()) else {}
