"""Check by behaviour that the packed and the cached path compute what a family of models computes.

A model may accept what a path passes to it and not use it: positions of its own, a mask of its own, several attention
calls in a layer. Its log-probabilities are then wrong without an error, and equally wrong in trainer and engine. So a
tiny model of the family, with random parameters, is run by both paths and by its own forward:

    own       each text alone
    packed    the texts in one row
    cached    the texts in one step, then token by token over the KV cache

Families in `MEASURED` are measured by the tests instead. Other configs that pass are noted in the user's cache, so that
they are measured once; a refusal is measured again each time, since its cause may be of the moment.
"""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from stretto import __version__
from stretto.core.errors import ModelFolderError, Problem
from stretto.core.machine import cache_folder
from stretto.model.attention_support import check_attention
from stretto.model.decode.policy import CACHED_ATTENTION, Context, DecodePolicy
from stretto.model.hf.folder import quiet_transformers
from stretto.model.packed.attention import PACKED_ATTENTION
from stretto.model.packed.logprobs import pack_tokens
from stretto_kernels.choices import locked, read_choices, write_choices

log = logging.getLogger(__name__)

FILE = "families.json"  #: in the user's cache: by key of a config, its family

#: Families whose two paths the tests measure (`tests/model/test_families.py`), so that no start does.
MEASURED = frozenset(
    {
        *("llama", "mistral", "ministral", "ministral3", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
        *("gemma", "gemma2", "gemma3_text", "vaultgemma", "cohere", "cohere2", "glm", "glm4", "granite", "olmo"),
        *("olmo2", "olmo3", "olmoe", "phi", "phi3", "smollm3", "starcoder2", "exaone4", "ernie4_5", "helium"),
        *("seed_oss", "arcee", "apertus", "hunyuan_v1_dense", "nanochat", "dots1", "phimoe"),
        *("gpt2", "gpt_neox", "opt", "biogpt", "persimmon"),
    }
)

_SMALL: Mapping[str, int] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "d_model": 32,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "num_layers": 2,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "encoder_layers": 1,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "ffn_dim": 48,
    "word_embed_proj_dim": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
}
_OTHERS: Mapping[str, int | None] = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
_LARGEST = 4_000_000  # parameters of a tiny model
_LENGTHS, _STARTED = (9, 17, 5), 3  # tokens of the texts; tokens of each that are cached before decoding
_NOISE, _ROUNDING = 0.1, 1e-3  # of parameters; nats in float32
_REMEDY = "use a remote engine for this model (engine.kind), which this trainer cannot train"


def check_family(config: PreTrainedConfig) -> None:
    """Check that the attention paths of trainers (packed) and engines (cached) compute what models with this config
    compute. Families that the tests check (`MEASURED`) pass at once. Another config is checked once, in about a CPU
    second, and remembered in the cache folder if it passes; a family that cannot be made tiny is not checked, and a
    warning is logged. Raises ModelFolderError if a path computes something else; the message names the family and what
    differs."""
    text = config.get_text_config()
    if text.model_type in MEASURED:
        return
    file, key = cache_folder() / FILE, _key(text)
    if key in read_choices(file, str):
        return
    if found := measured(text):
        raise ModelFolderError([Problem(f"config.json ({text.model_type})", found, _REMEDY)])
    with locked(file) as writable:
        if writable and found is not None:
            write_choices(file, {**read_choices(file, str), key: text.model_type})


def check_family_of(folder: Path | str) -> None:
    """Check that the attention paths of trainers and engines compute what a folder's model computes (`check_family`). A
    config that cannot be read is not checked: the loader names what is wrong. Raises ModelFolderError if a path
    computes something else than the family."""
    with quiet_transformers():
        try:
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, KeyError, TypeError):
            return
    check_family(config)


def _key(config: PreTrainedConfig) -> str:
    """Return a digest of the config and the versions of stretto and transformers."""
    told = (config.to_json_string(use_diff=False), transformers.__version__, __version__)
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:32]


def measured(config: PreTrainedConfig) -> str | None:
    """Return what the packed and the cached attention path compute differently than the module's own forward, in words,
    measured on a tiny model with this config; "": nothing. None: it is not measured, since the family cannot be made
    tiny or is refused when it is loaded."""
    with quiet_transformers(), torch.random.fork_rng(devices=()):
        torch.manual_seed(3)
        made = _tiny(config)
        if made is None:
            return None
        random = np.random.default_rng(5)
        texts = [random.integers(2, _SMALL["vocab_size"], length) for length in _LENGTHS]
        own = [made(torch.from_numpy(text[None]), use_cache=False).logits[0].log_softmax(-1) for text in texts]
        ways: Mapping[str, tuple[str, Callable[[PreTrainedModel, Sequence[Any]], Iterator[tuple[int, int, Tensor]]]]]
        ways = {
            "packed texts": (PACKED_ATTENTION, _packed),
            "texts in one step": (CACHED_ATTENTION, _together),
            "tokens over the KV cache": (CACHED_ATTENTION, _decoded),
        }
        for name, (attention, way) in ways.items():
            model = copy.deepcopy(made)
            try:
                model.set_attn_implementation(attention)
                check_attention(model)
                gap = max(float((line - own[at][place]).abs().max()) for at, place, line in way(model, texts))
            except ModelFolderError:
                return None  # the loader refuses it too, in its own words
            except Exception as error:  # a module that a path was not made for can fail in any way
                told = " ".join(f"{type(error).__name__}: {error}".split())
                return f"{name} fail on a tiny model of the family: {told}"
            if not gap <= _ROUNDING:
                return f"{name} differ from the model's own forward by {gap:.1g} nats on a tiny model of the family"
    return ""


def _tiny(config: PreTrainedConfig) -> PreTrainedModel | None:
    """Make a model of the family with few layers, small widths and random parameters: with the config's other settings
    if these allow it, else with the family's defaults. None, and a warning in the log, if neither can be made."""
    why, depth = f"more than {_LARGEST:,} parameters", config.num_hidden_layers
    for settings in (config.to_dict(), type(config)().to_dict()):
        small = {key: value for key, value in _SMALL.items() if key in settings} | dict(_OTHERS)
        layers = range(min(depth, 2))
        by_layer = {key: one for key, one in settings.items() if isinstance(one, list) and len(one) == depth}
        lists = {key: [one[i] for i in layers] for key, one in by_layer.items()}
        windows = {"sliding_window": 7} if settings.get("sliding_window") else {}
        try:
            made = type(config)(**{**settings, **lists, **small, **windows, "dtype": "float32"})
            with torch.device("meta"):
                size = sum(one.numel() for one in AutoModelForCausalLM.from_config(made).parameters())
            if size <= _LARGEST:
                return _perturbed(AutoModelForCausalLM.from_config(made, attn_implementation="eager"))
        except Exception as error:  # a config that is half another's can make a module fail in any way
            why = f"{type(error).__name__}: {error}"
    log.warning("the paths of %s are not compared with its own forward: no tiny model (%s)", config.model_type, why)
    return None


def _perturbed(model: PreTrainedModel) -> PreTrainedModel:
    """Add noise to all parameters, in place, and return the model, in evaluation mode and without gradients: a
    parameter that begins at 0 hides what it scales."""
    model.eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.add_(_NOISE * torch.randn_like(parameter))
    return model


def _packed(model: PreTrainedModel, texts: Sequence[Any]) -> Iterator[tuple[int, int, Tensor]]:
    packed = pack_tokens(texts)
    packing = packed.packing
    logits = model(packed.input_ids, position_ids=packing.position_ids, use_cache=False, packing=packing).logits[0]
    return _by_place(texts, logits)


def _together(model: PreTrainedModel, texts: Sequence[Any]) -> Iterator[tuple[int, int, Tensor]]:
    return _by_place(texts, DecodePolicy(model).forward_of_texts(texts))


def _by_place(texts: Sequence[Any], logits: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """Yield (number of the text, position of the token, log-probabilities of the next token), from the logits after all
    tokens of the texts, one text after the other."""
    places = ((at, place) for at, text in enumerate(texts) for place in range(len(text)))
    own = logits[: sum(map(len, texts))]  # a packed row may end with filler tokens
    for (at, place), line in zip(places, own, strict=True):
        yield at, place, line.log_softmax(-1)


def _decoded(model: PreTrainedModel, texts: Sequence[Any]) -> Iterator[tuple[int, int, Tensor]]:
    """Yield (number of the text, position, log-probabilities of the next token), from steps over the KV cache, token by
    token. The first `_STARTED` - 1 tokens of each text are context, and yield nothing."""
    policy = DecodePolicy(model)
    contexts = [Context(text[: _STARTED - 1], (at,)) for at, text in enumerate(texts)]
    for length in range(_STARTED, max(map(len, texts)) + 1):
        newest = np.array([text[length - 1] if length <= len(text) else 2 for text in texts])
        order, logits = policy.forward(newest, np.full(len(texts), length), contexts)
        contexts = []
        for at, line in zip(order.tolist(), logits, strict=True):
            if length <= len(texts[at]):
                yield at, length - 1, line.log_softmax(-1)
