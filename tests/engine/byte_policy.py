"""A tiny Llama that writes any bytes, and what an engine makes of a request by itself."""

from pathlib import Path

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from stretto.core.records import Completion, GenerateRequest
from stretto.engine.native.engine import NativeEngine
from stretto.model.hf.folder import quiet_transformers
from tests.tiny_policy import sized

NAME = "bytes"
CONTEXT = 256
VOCABULARY = 261
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'odd' %}{{ raise_exception('nothing odd') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
)


def build_byte_policy(folder: Path) -> Path:
    """A tiny Llama over bytes: pieces of characters, whole words never."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: at for at, token in enumerate(["<pad>", "<s>", "</s>", *alphabet, "th", "the"])}
    backend = Backend(models.BPE(vocabulary, [("t", "h"), ("th", "e")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = CHAT_TEMPLATE
    shape = sized(len(vocabulary), width=32, inner=48, layers=2, heads=(2, 1), max_position_embeddings=CONTEXT)
    config = LlamaConfig(**shape, initializer_range=0.3, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    with torch.random.fork_rng(devices=()), quiet_transformers():
        torch.manual_seed(5)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def generated(engine: NativeEngine, request: GenerateRequest) -> list[Completion]:
    """What the engine makes of a request by itself."""
    engine.add(request)
    ended: list[Completion] = []
    while not engine.idle:
        ended += engine.step()
    return sorted(ended, key=lambda completion: completion.member)
