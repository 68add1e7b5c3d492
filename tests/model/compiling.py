"""The kernels of `stretto_kernels.gpu` as assembly for an H100, which compiling does not need.

Words are type, soft cap and width of a head: ``python -m tests.model.compiling bf16,0.0,128 fp16,30.0,96`` prints a
list as JSON, with the assembly by kernel for each.
"""

import json
import sys
from typing import Any

from stretto_kernels.gpu import attention as ragged_gpu
from stretto_kernels.gpu import draw, fused

triton: Any = vars(ragged_gpu)["triton"]  # None where it is not installed

_INTEGERS = dict.fromkeys(("slots_R4", "items_N3", "writes_W3", "bounds"), "*i64") | {"cutoffs_R": "*i32"}
_SUMS = dict.fromkeys(
    ("sums_NHD", "tops_NH", "masses_NH", "tops_RP", "sums_RP", "logits_RV", "reached_RP2D", "chosen_RC"), "*fp32"
)
_SETTINGS = dict.fromkeys(("settings_R5", "drawn_R2"), "*fp64")
_FLOATS = dict.fromkeys(("scaling", "eps", "query_eps", "key_eps"), "fp32")


def assembly(kernel: Any, kind: str, constants: dict[str, Any]) -> str:
    """Arguments that are neither constants nor of a known kind are whole numbers; all but counts are aligned."""
    axes = {name for name in kernel.arg_names if name.rpartition("_")[2].isupper()}
    kinds = dict.fromkeys(kernel.arg_names, "i32") | dict.fromkeys(axes, f"*{kind}")
    kinds |= _INTEGERS | _SUMS | _SETTINGS | _FLOATS | dict.fromkeys(constants, "constexpr")
    names = {name: place for place, name in enumerate(kernel.arg_names)}
    source = triton.compiler.ASTSource(
        kernel,
        {name: kinds[name] for name in names},
        constexprs={(names[name],): value for name, value in constants.items()},
        attrs={
            (place,): [["tt.divisibility", 16]]
            for name, place in names.items()
            if kinds[name] not in ("constexpr", "fp32") and name not in ("count", "parts")
        },
    )
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    made: str = triton.compile(source, target=target, options={"num_stages": 2}).asm["ptx"]
    return made


def kernels(kind: str, softcap: str, width: str) -> dict[str, str]:
    """All of them, by name."""
    shape: dict[str, Any] = {"WIDTH": int(width), "BLOCK_D": 1 << (int(width) - 1).bit_length()}
    reading = {"GROUP": 2, "SOFTCAP": float(softcap), "BLOCK_G": 16, "BLOCK_L": 64, "WIDE": False}
    half: dict[str, Any] = {"HALF": int(width) // 2, "BLOCK": shape["BLOCK_D"] // 2}
    wide: dict[str, Any] = {"WIDTH": 1024, "BLOCK": 1024}
    parts: dict[str, Any] = {"PARTS": 128, "BLOCK": 2048}
    near: dict[str, Any] = parts | {"DISTANCES": 16}
    enter = half | {"HEADS": 16, "KV_HEADS": 8, "QUERY_NORM": True, "KEY_NORM": True}
    return {
        "read": assembly(ragged_gpu._read, kind, shape | reading),
        "write": assembly(ragged_gpu._write, kind, shape | {"BLOCK_W": 16}),
        "combine": assembly(ragged_gpu._combine, kind, shape | {"HEADS": 16, "PARTS": 16}),
        "tops": assembly(draw._tops, kind, {"BLOCK": 2048}),
        "reach": assembly(draw._reach, kind, near),
        "gather": assembly(draw._gather, kind, near | {"ROOM": 16_384}),
        "cut": assembly(draw._cut, kind, near | {"ROOM": 16_384, "WAYS": 8}),
        "sums": assembly(draw._sums, kind, parts | {"FILTERS": True}),
        "find": assembly(draw._find, kind, parts | {"FILTERS": True}),
        "norm": assembly(fused._norm, kind, wide | {"ADDS": True}),
        "rotate": assembly(fused._rotate, kind, half | {"NORM": True}),
        "enter": assembly(fused._enter, kind, enter),
        "gate": assembly(fused._gate, kind, wide),
    }


if __name__ == "__main__":
    print(json.dumps([kernels(*words.split(",")) for words in sys.argv[1:]]))
