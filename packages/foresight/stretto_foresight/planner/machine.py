"""Speed record of the devices of a machine.

A record comes from a data sheet (`profiles/*.toml`, each number with its source), or from `stretto plan --calibrate`,
which measures the machine on which it runs.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from stretto.core.errors import UNREADABLE, Problem, RecipeError, nearest
from stretto.core.records import Record

_PROFILES = "profiles"
_REMEDY = "measure a machine with `stretto plan --calibrate --out machine.json` and give that file"

Rate = Annotated[float, Meta(gt=0)]
Amount = Annotated[float, Meta(ge=0)]


class MachineProfile(Record, frozen=True, forbid_unknown_fields=True):
    """Speeds of one device and its connections, and times of the work around them. Rates are achieved rates, not data
    sheet maxima. `*_flops` are in FLOPs per second, `*_bandwidth` in bytes per second of one device, `*_seconds` in
    seconds. Costs that are not given are zero. `memory_gib`: of one device. `sources`: where each number comes from.

    Generation: a decode step takes `step_seconds`, plus `layer_seconds` per layer, `row_seconds` per completion and
    `row_width_seconds` per completion, layer and unit of width; plus the FLOPs at the rate `decode_flops` or the
    weights at `weight_bandwidth`, whichever is longer; plus the KV cache at `cache_bandwidth`. A prefill takes
    `prefill_seconds`, `prefill_token_seconds` per token, and its FLOPs at the rate `prefill_flops`.

    Training: `train_seconds` per step, `micro_batch_seconds` per micro-batch and layer, `token_width_seconds` per
    token, layer and unit of width, `pair_width_seconds` per squared sequence length, layer and unit of width,
    `sequence_seconds` per completion, `parameter_seconds` per parameter (optimizer step and publication), and the FLOPs
    at the rate `train_flops`.

    Between them: a version can be loaded after `transfer_seconds`, and its load takes `load_seconds`, plus
    `*_parameter_seconds` per parameter. Per completion: `judge_seconds`, `serve_seconds` of an engine between its
    steps, `conduct_seconds` of the conductor beside other roles, `batch_seconds` of the conductor between two training
    steps. `start_seconds`: from the command to the first prompt. `link_bandwidth`: between devices of a node (0: one
    process has all of them), `link_seconds`: of one collective, `network_bandwidth`: between nodes (0: as within one),
    `node_devices`: devices of a node. `cores`: CPU cores that all roles share (0: each role has its own device);
    `beside`: slowdown by another role at work on a core of its own.
    """

    name: str
    memory_gib: Rate  # of one device
    decode_flops: Rate
    prefill_flops: Rate
    train_flops: Rate
    weight_bandwidth: Rate
    cache_bandwidth: Rate
    step_seconds: Amount = 0.0
    layer_seconds: Amount = 0.0
    row_seconds: Amount = 0.0
    row_width_seconds: Amount = 0.0
    prefill_seconds: Amount = 0.0  # of each prefill, besides its FLOPs
    prefill_token_seconds: Amount = 0.0
    train_seconds: Amount = 0.0
    micro_batch_seconds: Amount = 0.0
    token_width_seconds: Amount = 0.0
    pair_width_seconds: Amount = 0.0  # of attention, besides its FLOPs
    sequence_seconds: Amount = 0.0  # of training, per completion
    parameter_seconds: Amount = 0.0  # of an optimizer step and of a publication, per parameter
    transfer_seconds: Amount = 0.0  # from a publication until it can be loaded
    transfer_parameter_seconds: Amount = 0.0
    load_seconds: Amount = 0.0
    load_parameter_seconds: Amount = 0.0
    start_seconds: Amount = 0.0  # from the command to the first prompt
    judge_seconds: Amount = 0.0  # of one completion
    serve_seconds: Amount = 0.0  # of an engine between its steps, per completion
    conduct_seconds: Amount = 0.0  # of the conductor, per completion, while other roles work
    batch_seconds: Amount = 0.0  # of the conductor between two training steps, per completion of the batch
    link_bandwidth: Amount = 0.0  # between the devices of a node; 0: one process has all of them
    link_seconds: Amount = 0.0  # of one collective
    network_bandwidth: Amount = 0.0  # of one device, between nodes; 0: as within a node
    node_devices: Annotated[int, Meta(ge=1)] = 8
    cores: Amount = 0.0  # CPU cores that all roles share; 0: each role has its own device
    beside: Amount = 0.0  # slowdown by another role that works at the same time on a core of its own
    sources: Mapping[str, str] = {}  # where each number comes from


def known_machines() -> list[str]:
    """Return the names of the built-in profiles, sorted."""
    folder = resources.files(__package__) / _PROFILES
    return sorted(path.name.removesuffix(".toml") for path in folder.iterdir() if path.name.endswith(".toml"))


def machine_of(name: str) -> MachineProfile:
    """Load a built-in profile by name (``h100``, in upper or lower case), or the file at this path, which `stretto plan
    --calibrate` wrote. Raises RecipeError if there is no such profile or file (the message has the nearest name), or
    the file is invalid."""
    if name.lower() in known_machines():
        text = (resources.files(__package__) / _PROFILES / f"{name.lower()}.toml").read_text(encoding="utf-8")
        return msgspec.convert(tomllib.loads(text), MachineProfile)
    if not os.path.isfile(name):  # false also for a name that no file can have
        found = "no such file, and no machine of this name has a profile"
        raise RecipeError(
            [Problem(f"machine {name!r}", found, f"{nearest(name.lower(), known_machines())}; or {_REMEDY}")]
        )
    try:
        return msgspec.json.decode(Path(name).read_bytes(), type=MachineProfile)
    except UNREADABLE as error:
        raise RecipeError([Problem(name, f"is not a machine: {error}", _REMEDY)]) from None
