"""Protobuf messages of the Tinker SDK, defined by tables of fields.

The descriptors are in a pool of their own, so that they do not clash with those of the SDK in the same process. Maps
are defined by their wire format (repeated pairs of key and value), enums as integers.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

from stretto.core.errors import RefusedRequest

_PACKAGE = "stretto_tinker"
_KINDS = {"double": 1, "float": 2, "int64": 3, "int32": 5, "bool": 8, "string": 9, "message": 11, "bytes": 12}
_OPTIONAL, _REPEATED = 1, 3

#: Field number and type of each field, by message; ``*`` marks a repeated field.
_MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "Tensor": {"dense": (1, "bytes"), "sparse_csr": (2, "SparseCsr"), "dtype": (3, "int32"), "shape": (4, "*int64")},
    "SparseCsr": {"values": (1, "bytes"), "crow_indices": (2, "bytes"), "col_indices": (3, "bytes")},
    "TopkLogprobs": {"token_ids": (1, "bytes"), "logprobs": (2, "bytes"), "k": (3, "int32"), "length": (4, "int32")},
    "PromptAltTokens": {"tokens": (1, "Tensor"), "logprobs": (2, "Tensor")},
    "SampledSequence": {
        "stop_reason": (1, "int32"),
        "tokens": (2, "bytes"),
        "logprobs": (3, "bytes"),
        "topk_sampled_logprobs": (4, "TopkLogprobs"),
    },
    "SampleResponse": {
        "sequences": (1, "*SampledSequence"),
        "prompt_logprobs": (2, "bytes"),
        "topk_prompt_logprobs": (3, "TopkLogprobs"),
        "prompt_cache_hit_tokens": (4, "int32"),
        "target_prompt_logprobs": (5, "Tensor"),
        "prompt_alt_tokens": (6, "PromptAltTokens"),
    },
    "BatchedTensor": {
        "data": (1, "bytes"),
        "offsets": (2, "bytes"),
        "dtype": (3, "int32"),
        "trailing_shape": (4, "*int64"),
    },
    "NamedTensor": {"key": (1, "string"), "value": (2, "BatchedTensor")},
    "ArrayRecord": {"type_tag": (1, "string"), "fields": (2, "*NamedTensor"), "num_datums": (3, "int64")},
    "NamedNumber": {"key": (1, "string"), "value": (2, "double")},
    "ForwardBackwardOutput": {
        "loss_fn_output_type": (1, "string"),
        "loss_fn_outputs": (2, "*ArrayRecord"),
        "metrics": (3, "*NamedNumber"),
    },
    "LossConfigValue": {"number": (1, "double"), "text": (2, "string")},
    "NamedConfig": {"key": (1, "string"), "value": (2, "LossConfigValue")},
    "ForwardBackwardRequest": {
        "model_id": (1, "string"),
        "seq_id": (2, "int32"),
        "data": (3, "*Datum"),
        "loss_fn": (4, "string"),
        "loss_fn_config": (5, "*NamedNumber"),
        "forward_only": (6, "bool"),
        "loss_fn_config_v2": (7, "*NamedConfig"),
    },
    "NamedInput": {"key": (1, "string"), "value": (2, "Tensor")},
    "Datum": {"model_input": (1, "*Chunk"), "loss_fn_inputs": (2, "*NamedInput")},
    "Chunk": {"encoded_text": (1, "EncodedTextChunk"), "image": (2, "OtherChunk"), "dmel": (3, "OtherChunk")},
    "EncodedTextChunk": {"tokens": (1, "bytes")},
    "OtherChunk": {},
}


def _pool() -> descriptor_pool.DescriptorPool:
    file = descriptor_pb2.FileDescriptorProto(name=f"{_PACKAGE}.proto", package=_PACKAGE)
    for name, fields in _MESSAGES.items():
        described = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            plain = kind.removeprefix("*")
            added = described.field.add(
                name=field, number=number, label=_REPEATED if kind.startswith("*") else _OPTIONAL
            )
            added.type = _KINDS.get(plain, _KINDS["message"])
            if plain in _MESSAGES:
                added.type_name = f".{_PACKAGE}.{plain}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool


_POOL = _pool()


def new(name: str) -> Any:
    """Make an empty protobuf message of the type `name` (of `_MESSAGES`)."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{_PACKAGE}.{name}"))()


def parse(name: str, raw: bytes) -> Any:
    """Decode a protobuf message of the type `name` (of `_MESSAGES`); returns the message.

    Raises:
        RefusedRequest: the bytes are not such a message.
    """
    found = new(name)
    try:
        found.ParseFromString(raw)
    except message.DecodeError as error:
        raise RefusedRequest("body", f"no protobuf message {name}: {error}", "the SDK's encoding") from None
    return found
