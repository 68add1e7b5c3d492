"""Base model in memory, which the clients' LoRA models share."""

from __future__ import annotations

import logging
from collections import Counter
from functools import partial
from pathlib import Path

from transformers import PreTrainedModel

from stretto.core.errors import RefusedRequest
from stretto.core.machine import available_memory
from stretto.engine.config import EngineConfig
from stretto.engine.native.engine import NativeEngine
from stretto.model.decode.policy import CACHED_ATTENTION
from stretto.model.device import spare
from stretto.model.families import check_family_of
from stretto.model.hf.folder import load_policy, save_policy
from stretto.model.hf.grammar import Grammars
from stretto.model.hf.inspection import inspect_model_folder
from stretto.model.hf.layers import linear_layers
from stretto.model.packed.attention import PACKED_ATTENTION
from stretto.model.packed.logprobs import check_policy
from stretto.trainer.config import LoraConfig
from stretto_tinker.compute.files import (
    ALPHA,
    POLICY,
    Shape,
    read_adapters,
    read_policy,
    read_shape,
    write_adapters,
    write_shape,
)
from stretto_tinker.compute.learner import Learner
from stretto_tinker.compute.sampler import Sampler
from stretto_tinker.wire.bodies import Lora
from stretto_verbs.models import SharedModel

log = logging.getLogger(__name__)

_MOST_RANK = 1_024
_NOTHING = ("none",)  # names of no layer; no name would mean all layers
#: Float32 numbers of a trained weight: itself, two moments, the accumulated gradient, and that of the present request.
_COPIES, _FLOAT = 5, 4
#: Float32 numbers of a sampler's weight: the engine's, and a copy in a kernel's layout.
_SAMPLED_COPIES = 2


class LocalBackend:
    """One base model, a Hugging Face folder, loaded once into this process; models and engines are made from it.

    Attributes:
        folder: of the base model.
        name: name of the base model for clients.
        architecture: name of its class.
        parameters: number of its weights.
        cache_bytes: bytes of KV cache for all engines together.
        models_bytes: bytes of memory for all models in training together.
        samplers_bytes: bytes of memory for the weights of all samplers together, half of `models_bytes`.
        vocabulary: number of tokens.
        context: most tokens of a sequence.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        config: EngineConfig,
        micro_batch_tokens: int,
        models_bytes: int | None = None,
    ) -> None:
        """Load the base model from `folder`.

        Args:
            name: name of the model for clients.
            config: settings of the engines; its KV cache is for all of them together.
            micro_batch_tokens: most tokens of a micro-batch in training.
            models_bytes: most memory of all models in training together; None: half of what is free beside the KV
                cache, and at least half as much as the KV cache.

        Raises:
            ModelFolderError: the folder cannot be loaded, or its model cannot be trained here.
        """
        about = inspect_model_folder(folder)
        check_family_of(folder)
        self.folder, self.name = folder.resolve(), name
        self.architecture, self.context, self.vocabulary = about.architecture, about.context_length, about.vocab_size
        self.parameters, self.cache_bytes = about.parameters, config.cache_bytes
        self._config, self._tokens = config, micro_batch_tokens
        self._shared = SharedModel(folder, device=config.device)
        plain = self._shared.view(None)
        check_policy(plain)
        self._attends, self._sizes = dict[str, bool](), Counter[str]()
        for layer, module in linear_layers(plain).items():
            last = layer.rsplit(".", 1)[-1]
            self._attends[last] = "attn" in layer
            self._sizes[last] += module.in_features + module.out_features
        for part, attends in (("attention", True), ("MLP", False)):
            if attends not in self._attends.values():  # experts, or layers of another kind
                log.warning("no adapter trains the %s of %s, which has no linear layers", part, name)
        self._head: int = sum(plain.get_output_embeddings().weight.shape)
        free = spare(plain.device, 0)
        beside = (available_memory() if free is None else free) - self.cache_bytes
        self.models_bytes = max(beside, self.cache_bytes) // 2 if models_bytes is None else models_bytes
        self.samplers_bytes = self.models_bytes // 2

    def check(self, shape: Shape) -> None:
        """Check that a model of this shape can be made, and that it fits into `models_bytes` alone.

        Raises:
            RefusedRequest: the rank is out of range, nothing would be trained, or the model is too large.
        """
        lora = shape.lora
        if lora is not None and not 1 <= lora.rank <= _MOST_RANK:
            raise RefusedRequest("lora_config.rank", str(lora.rank), f"1 to {_MOST_RANK:,}")
        if lora is not None and not lora.train_unembed and self._targets(lora) == _NOTHING:
            known = [f"train_{part}" for part in ("attn", "mlp") if (part == "attn") in self._attends.values()]
            raise RefusedRequest("lora_config", "nothing is trained", f"one of {', '.join((*known, 'train_unembed'))}")
        if (needed := self.memory_of(shape)) > self.models_bytes:
            told = f"such a model needs {needed / 2**20:,.1f} MiB of memory for its training"
            allowed = f"at most {self.models_bytes / 2**20:,.1f} MiB (--models-gib of the server)"
            raise RefusedRequest("lora_config" if lora is None else "lora_config.rank", told, allowed)

    def memory_of(self, shape: Shape) -> int:
        """Bytes of memory that a model of this shape needs while it is trained, beside the base model."""
        if (lora := shape.lora) is None:
            return self.parameters * _COPIES * _FLOAT
        width: int = sum(self._sizes[last] for last in self._targets(lora)) + self._head * lora.train_unembed
        return lora.rank * width * _COPIES * _FLOAT

    def memory_of_sampler(self, folder: Path) -> int:
        """Bytes of memory that a sampler with the weights in `folder` needs beside the base model and the KV cache.

        Raises:
            StoreError: files are missing or damaged, or have another base model.
        """
        return self.memory_of(self.shape_of(folder)) // _COPIES * _SAMPLED_COPIES

    def create(self, shape: Shape) -> Learner:
        """Make a model to train, with new adapters or the weights of the base model; its shape must have passed
        `check`. With LoRA it shares the base weights; otherwise the folder is loaded again."""

        def write(model: PreTrainedModel, folder: Path) -> None:
            if shape.lora is None:
                save_policy(model, self.folder, folder / POLICY)  # with the tokenizer of the base model
            else:
                write_adapters(folder, model, shape.lora.rank, self.folder)
            write_shape(folder, shape, self.folder)

        def read(model: PreTrainedModel, folder: Path) -> None:
            (read_policy if shape.lora is None else read_adapters)(folder, model)

        if shape.lora is None:
            model = load_policy(self.folder, attention=PACKED_ATTENTION, device=self._config.device)
        else:
            model = self._view(shape, PACKED_ATTENTION)
        return Learner(model, self._tokens, write, read)

    def _view(self, shape: Shape, attention: str) -> PreTrainedModel:
        """Make a model that shares the base weights and has new adapters of this shape, with the attention path
        `attention`."""
        assert shape.lora is not None
        config = LoraConfig(rank=shape.lora.rank, alpha=ALPHA, target_modules=self._targets(shape.lora))
        return self._shared.view(config, attention, seed=shape.seed, head=shape.lora.train_unembed)

    def _targets(self, lora: Lora) -> tuple[str, ...]:
        """Last name parts of the linear layers that get adapters, as ``q_proj``; ("none",) if none does. The output
        layer is not among them."""
        chosen = [last for last, attends in self._attends.items() if (lora.train_attn if attends else lora.train_mlp)]
        return tuple(sorted(chosen)) or _NOTHING

    def shape_of(self, folder: Path) -> Shape:
        """Read the shape of a model that `Learner.save` wrote into `folder`.

        Raises:
            StoreError: it has another base model, or the file is missing or damaged.
        """
        return read_shape(folder, self.folder)

    def sampled(self, folder: Path | None) -> Sampler:
        """Make a sampler with the weights that `Learner.save` wrote into `folder`, or of the base model (None).

        Raises:
            StoreError: files are missing or damaged, or of another base model.
        """
        tokenizer, shape = self._shared.tokenizer, None if folder is None else self.shape_of(folder)
        model = self._sampled_model(shape, folder)
        grammars = partial(Grammars, lambda: tokenizer)
        engine = NativeEngine(model, self._config, detokenizer=lambda: tokenizer, grammars=grammars)

        def take(folder: Path) -> bool:
            if shape is None or shape.lora is None or self.shape_of(folder).lora != shape.lora:
                return False
            read_adapters(folder, model)
            return True

        slots, cache = self._config.slots, self.cache_bytes
        return Sampler(engine, model, take, tokenizer, self.context, slots=slots, cache=cache)

    def _sampled_model(self, shape: Shape | None, folder: Path | None) -> PreTrainedModel:
        """Make a model for an engine: with weights of this shape from `folder`, or the base model if either is None.
        Raises StoreError if the weights are missing or damaged."""
        if shape is None or folder is None:
            return self._shared.view(None, CACHED_ATTENTION)
        if shape.lora is None:
            return load_policy(folder / POLICY, attention=CACHED_ATTENTION, device=self._config.device)
        model = self._view(shape, CACHED_ATTENTION)
        read_adapters(folder, model)
        return model.requires_grad_(False)
