"""`stretto.SharedModel`: one model in memory for several trainers and engines, each with its own LoRA adapters; and
the weights of one version of a policy, which `Trainer.weights` returns and `Engine.update` takes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from stretto.core.errors import DataError, Problem, RecipeError, StoreError, TornPublication
from stretto.doors.mistakes import shown
from stretto.model.families import check_family_of
from stretto.model.hf.folder import load_policy
from stretto.model.hf.inspection import weight_files
from stretto.model.hf.layers import linear_layers
from stretto.model.hf.tokenizer import Tokenizer, load_tokenizer
from stretto.model.kernels import TRAINING, OneDnnLinear, use_onednn
from stretto.model.packed.attention import PACKED_ATTENTION
from stretto.trainer.adapters import adapt
from stretto.trainer.config import LoraConfig
from stretto.weights.mailbox import LORA_A, LORA_B
from stretto_verbs.arguments import FOLDER, ArgumentKind, check, checked

_MARKED = 64  # numbers of a weight that are hashed
_BASE = "base.json"  # file of a checkpoint of adapters

#: Setting of LoRA adapters: their rank, or all settings; None: no adapters.
Lora = int | LoraConfig | dict[str, Any] | None


class SharedModel:
    """The weights of a model folder in memory. They never change; trainers with this model train adapters only.

    Example::

        # Two policies that are trained apart, and one base model in memory.
        shared = stretto.SharedModel("model")
        first, second = (stretto.Trainer(shared, lora=8) for _ in range(2))
        engine = stretto.Engine.load(shared, lora=8)
        engine.update(first.weights())
    """

    def __init__(self, folder: str | Path, *, device: str = "auto") -> None:
        """Load the weights in float32. `device`: as in a recipe's section ``[trainer]``.

        Raises:
            ModelFolderError: the folder cannot be loaded.
            RecipeError: torch sees no such device.
        """
        check("SharedModel", folder=(folder, FOLDER))
        self.folder = Path(folder).expanduser()
        self._model = trainable(self.folder, device)
        self._model.requires_grad_(False)
        self.dtype, self.device = str(self._model.dtype).removeprefix("torch."), self._model.device.type
        use_onednn(self._model, TRAINING)
        self.tokenizer: Tokenizer = load_tokenizer(self.folder)

    def view(self, lora: LoraConfig | None, attention: str = PACKED_ATTENTION, **adapters: Any) -> PreTrainedModel:
        """Return a model that shares these weights and has its own modules and adapters.

        Args:
            lora: settings of the adapters; None: no adapters.
            attention: name of the attention path (`model.hf.folder.load_policy`).
            **adapters: further arguments of `trainer.adapters.adapt`.
        """
        kernels = [module.kernel for module in self._model.modules() if isinstance(module, OneDnnLinear)]
        shared = [*self._model.parameters(), *self._model.buffers(), *kernels]
        model = copy.deepcopy(self._model, {id(one): one for one in shared})
        model.set_attn_implementation(attention)
        if lora is not None:
            adapt(model, lora, **adapters)
        return model


MODEL = ArgumentKind(
    "the folder of a model, or a stretto.SharedModel", lambda one: FOLDER.fits(one) or isinstance(one, SharedModel)
)


def check_targets(model: PreTrainedModel, lora: LoraConfig, place: str) -> None:
    """Check that the settings name at least one linear layer of the model. `place`: name of the argument, for messages.
    Raises RecipeError if they name none; lists the names of the model's layers."""
    names = linear_layers(model)
    if not any(lora.targets(name) for name in names):
        allowed = ", ".join(sorted({name.rpartition(".")[2] for name in names}))
        told = f"{shown(lora.target_modules)} names no layer of this model"
        raise RecipeError([Problem(f"{place}: target_modules", told, f"allowed: {allowed}")])


def lora_of(given: Lora, place: str) -> LoraConfig | None:
    """Convert a rank, a dict or a LoraConfig to a LoraConfig; None stays None. A rank alone gets alpha = 2 rank.
    `place`: name of the argument, for messages. Raises RecipeError if a setting is invalid."""
    if given is None or isinstance(given, LoraConfig):
        return given
    if isinstance(given, bool) or not isinstance(given, int | dict):
        raise RecipeError([Problem(place, shown(given), "give a rank, such as 16, or rank, alpha, target_modules")])
    settings = {"rank": given, "alpha": 2 * given} if isinstance(given, int) else given
    return checked(settings, place, LoraConfig)


@dataclass(frozen=True)
class PolicyWeights:
    """One version of a policy: copies of its parameters by name, or of its adapters. Further training does not change
    them. `tokenizer`: its mark (`mark_of`), "" if not known. `base`: of adapters, the marks of their base
    (`base_marks`).

    Example::

        weights = stretto.Trainer("model").weights()
        stretto.Engine.load("model").update(weights)
        print(weights.version, weights.bytes)
    """

    version: int
    tensors: Mapping[str, Tensor] = field(repr=False)
    tokenizer: str = ""  # hash of the tokenizer's vocabulary (`completion.mark_of`); "": not known
    base: Mapping[str, int] = field(default_factory=dict, repr=False)

    @property
    def bytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def trainable(folder: Path, device: str) -> PreTrainedModel:
    """Load a policy in float32 for training. Raises ModelFolderError if the folder cannot be loaded, or attention over
    packed rows does not compute the same as the model's own; RecipeError if torch sees no such device."""
    check_family_of(folder)
    return load_policy(folder, attention=PACKED_ATTENTION, dtype=torch.float32, device=device)


def base_marks(folder: Path) -> dict[str, int]:
    """Compute a mark of each weight with one or two axes in a model folder, by name: a hash of its first numbers. A
    copy of the folder in bfloat16 has the same marks. Empty for a folder in float16, which rounds otherwise.

    Adapters are the difference to a base: beside another one, such as the model before its fine-tuning, they are
    another policy, though shapes and tokenizer are the same.
    """
    marks = dict[str, int]()
    for file in sorted(set(weight_files(folder).values())):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # no mapping
                weight = opened.get_slice(name)
                if weight.get_dtype() == "F16":
                    return {}
                if len(shape := weight.get_shape()) in (1, 2):
                    marks[name] = _mark(weight[:1] if len(shape) == 2 else weight[:_MARKED])
    return marks


def _mark(numbers: Tensor) -> int:
    """Compute a hash of at most the first 64 `numbers` of a weight, rounded to bfloat16, by which a copy of the weight
    in bfloat16 is recognised, and none in float16 (`base_marks`)."""
    raw = numbers.flatten()[:_MARKED].to(torch.bfloat16).view(torch.int16).numpy().tobytes()
    return int.from_bytes(blake2b(raw, digest_size=8).digest())


def differs(ours: Mapping[str, int], theirs: Mapping[str, int]) -> str:
    """Return the name of a weight with other marks in two folders; "" if there is none. Weights that only one has do
    not count."""
    return next((name for name, mark in ours.items() if theirs.get(name, mark) != mark), "")


def check_base(weights: PolicyWeights, folder: Path | None) -> Path | None:
    """Check that an engine may load weights: adapters must have been trained beside its base weights.

    `folder`: model folder that the engine's base weights are from; None: not known, and not compared. Returns the
    folder of the engine's base weights once it has loaded `weights`: `folder` for adapters, None for a whole policy.

    Raises:
        DataError: the adapters were trained beside other weights.
    """
    if not any(name.endswith(LORA_A) for name in weights.tensors):
        return None
    if folder is not None and weights.base and (name := differs(weights.base, base_marks(folder))):
        told = f"these adapters were trained beside other weights than those of {folder}, by {name}"
        raise DataError([Problem("update", told, "load engine and trainer from the same model folder")])
    return folder


def with_base(write: Callable[[Path], None], base: Mapping[str, int]) -> Callable[[Path], None]:
    """Return a function that calls `write` with the folder of a checkpoint and adds a file with `base`, the marks of
    its base weights (`base_marks`); no file if there are none."""

    def both(folder: Path) -> None:
        write(folder)
        if base:
            (folder / _BASE).write_bytes(msgspec.json.encode(base))

    return both


def check_base_of(checkpoint: Path, base: Mapping[str, int]) -> None:
    """Check that the adapters of a checkpoint were trained beside the same weights as those of a trainer, with the
    marks `base`. A checkpoint without marks is accepted. Raises StoreError if they were trained beside others."""
    try:
        theirs = msgspec.json.decode((checkpoint / _BASE).read_bytes(), type=dict[str, int])
    except FileNotFoundError:
        return
    if name := differs(base, theirs):
        raise StoreError(f"checkpoint {checkpoint} is of adapters to another model, by {name}")


def merged(base: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the parameters of a whole policy.

    If `tensors` are adapters, that is `base` with W + B A for each weight W that has adapters A and B (B is already
    scaled), on the device of `base`. Otherwise it is `tensors` itself.

    Raises:
        TornPublication: `base` has no such W: the adapters belong to another model.
    """
    layers = [name.removesuffix(LORA_A) for name in tensors if name.endswith(LORA_A)]
    if not layers:
        return tensors
    if missing := [layer for layer in layers if f"{layer}.weight" not in base]:
        raise TornPublication(f"these adapters are not of this model: it has no layer {missing[0]}")
    products = {f"{one}.weight": tensors[one + LORA_B] @ tensors[one + LORA_A] for one in layers}
    return {**base, **{name: base[name] + product.to(base[name].device) for name, product in products.items()}}
