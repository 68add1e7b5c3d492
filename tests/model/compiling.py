"""The kernels of `stretto.model.kernels` as assembly for an H100, which compiling does not need.

Words are type, soft cap and width of a head: ``python -m tests.model.compiling bf16,0.0,128 fp16,30.0,96`` prints a
list as JSON, with the assembly by kernel for each.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from stretto.model.kernels import draw
from stretto.model.kernels import triton_attention as ragged_gpu

triton: Any = vars(ragged_gpu)["triton"]  # None where it is not installed

_INTEGERS = dict.fromkeys(("slots_R4", "items_N3", "writes_W3", "bounds"), "*i64")
_SUMS = dict.fromkeys(("sums_NHD", "tops_NH", "masses_NH"), "*fp32")


def assembly(kernel: Any, kind: str, constants: dict[str, Any]) -> str:
    """Arguments that are neither constants nor of a known kind are whole numbers; all but counts are aligned."""
    kinds = dict.fromkeys(kernel.arg_names, "i32") | _INTEGERS | _SUMS | {"scaling": "fp32"}
    kinds |= dict.fromkeys(("query_RHD", "keys_TKD", "values_TKD", "out_RHD", "logits_RV"), f"*{kind}")
    kinds |= dict.fromkeys(("settings_R5", "drawn_R2"), "*fp64")
    kinds |= dict.fromkeys(constants, "constexpr")
    names = {name: place for place, name in enumerate(kernel.arg_names)}
    source = triton.compiler.ASTSource(
        kernel,
        {name: kinds[name] for name in names},
        constexprs={(names[name],): value for name, value in constants.items()},
        attrs={
            (place,): [["tt.divisibility", 16]]
            for name, place in names.items()
            if kinds[name] not in ("constexpr", "fp32") and name != "count"
        },
    )
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    made: str = triton.compile(source, target=target, options={"num_stages": 2}).asm["ptx"]
    return made


def kernels(kind: str, softcap: str, width: str) -> dict[str, str]:
    """All three, by name."""
    shape: dict[str, Any] = {"WIDTH": int(width), "BLOCK_D": 1 << (int(width) - 1).bit_length()}
    reading = {"GROUP": 2, "SOFTCAP": float(softcap), "BLOCK_G": 16, "BLOCK_L": 64, "WIDE": False}
    return {
        "read": assembly(ragged_gpu._read, kind, shape | reading),
        "write": assembly(ragged_gpu._write, kind, shape | {"BLOCK_W": 16}),
        "combine": assembly(ragged_gpu._combine, kind, shape | {"HEADS": 16, "PARTS": 16}),
        "draw": assembly(draw._draw_in_blocks, "fp32", {"FILTERS": True, "BITS": 33, "BLOCK": 2048}),
    }


if __name__ == "__main__":
    print(json.dumps([kernels(*words.split(",")) for words in sys.argv[1:]]))
