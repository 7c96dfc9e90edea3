"""The compile gate: every variant of Triton's kernels becomes a cubin for sm_90, without spills and without a GPU.

Kernels are compiled in a process of their own, since where tests run the interpreter they cannot be in this one:

    python test_triton_compile.py NAME      prints {"kernel": [registers, spilled bytes, shared bytes], ..}
"""

import json
import os
import re
import subprocess
import sys
import tempfile

TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}

# height, head dim, page size, dtype, and what differs from a whole head of paired halves.
VARIANTS = {
    "64-rows": (64, 128, 64, "bfloat16", {}),
    "128-rows": (128, 128, 64, "bfloat16", {}),
    "16-rows": (16, 128, 64, "bfloat16", {}),
    "head-dim-64": (128, 64, 64, "float16", {}),
    "page-16": (64, 128, 16, "bfloat16", {}),
    "page-16-128-rows": (128, 128, 16, "float16", {}),
    "no-rotary": (64, 128, 64, "bfloat16", {"HALF": 0}),
    "partial-interleaved": (64, 64, 64, "bfloat16", {"HALF": 16, "INTERLEAVED": True}),
    "window-softcap": (64, 128, 64, "bfloat16", {"WINDOW": 4096, "SOFTCAP": True}),
    "keys": (64, 128, 64, "bfloat16", {"TURN_KEYS": True}),
    "keys-interleaved": (16, 128, 64, "bfloat16", {"TURN_KEYS": True, "INTERLEAVED": True}),
    "float32": (16, 64, 16, "float32", {}),
}
MAY_SPILL = (
    "128-rows",
    "page-16-128-rows",
    "head-dim-64",
    "float32",
    "partial-interleaved",
    "keys",
    "keys-interleaved",
)


def compiled(kernel, types, constants, launch):
    """(registers, spilled bytes, shared bytes) of a kernel; `types` are those of the other arguments."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.compiler import ASTSource

    names = [p.name for p in kernel.params]
    signature = {name: types.get(name, "constexpr") for name in names}
    constants = {name: constants.get(name) for name in names if signature[name] == "constexpr"}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if isinstance(signature[name], str) and signature[name].startswith("*")
    }
    source = ASTSource(kernel, signature, constants, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch)
    assert made.asm["cubin"]
    with tempfile.NamedTemporaryFile(suffix=".ptx") as file:
        file.write(made.asm["ptx"].encode())
        file.flush()
        command = [get_ptxas(90).path, "-arch=sm_90a", "-v", file.name, "-o", os.devnull]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = max(map(int, re.findall(r"Used (\d+) registers", told)))
    return registers, sum(map(int, re.findall(r"(\d+) bytes spill stores", told))), made.metadata.shared


def compile_variant(name):
    from dagengine_kernels.fused.triton.attend import attend
    from dagengine_kernels.fused.triton.executor import LAUNCHES

    height, head_dim, page_size, dtype, options = VARIANTS[name]
    dtype, tile = TYPES[dtype], max(64, page_size)
    types = {
        **dict.fromkeys(("q", "kv", "out"), f"*{dtype}"),
        **dict.fromkeys(("cos", "sin", "lse2", "o_part", "lse2_part", "sinks"), "*fp32"),
        **dict.fromkeys(("positions", "works", "pieces", "tile_rows", "entries", "deltas"), "*i32"),
        **dict.fromkeys(("q_factor", "cap2", "scaling"), "fp32"),
        "last_position": "i32",
    }
    constants = {
        "HKV": 8,
        "GROUP": 4,
        "M": height,
        "BLOCK_M": height,
        "D": head_dim,
        "BLOCK_D": head_dim,
        "PAGE": page_size,
        "BOXES": tile // page_size,
        "N": tile,
        "HALF": head_dim // 2,
        "INTERLEAVED": False,
        "WINDOW": 0,
        "SOFTCAP": False,
        "TURN_KEYS": False,
        "UPCAST": False,
        **options,
    }
    if page_size == tile:
        types["pages"] = f"tensordesc<{dtype}[{page_size}, {head_dim}]>"
    if constants["HALF"] == 0:
        del types["cos"], types["sin"]
    launch = {"num_warps": LAUNCHES[height].num_warps, "num_stages": LAUNCHES[height].num_stages}
    return {"attend": compiled(attend, types, constants, launch)}


def compile_others():
    from dagengine_kernels.fused.triton.append import TOKENS, append_kernel
    from dagengine_kernels.fused.triton.executor import MERGE_PARTS
    from dagengine_kernels.fused.triton.merge import merge

    merged = compiled(
        merge,
        {
            **dict.fromkeys(("o_part", "lse2_part", "lse2", "sinks"), "*fp32"),
            **dict.fromkeys(("rows", "indptr", "parts"), "*i32"),
            "out": "*bf16",
        },
        {"HKV": 8, "GROUP": 4, "D": 128, "BLOCK_D": 128, "PARTS": MERGE_PARTS},
        {"num_warps": 4},
    )
    appended = compiled(
        append_kernel,
        {
            **dict.fromkeys(("k", "v", "kv_layer"), "*bf16"),
            **dict.fromkeys(("cos", "sin", "weight"), "*fp32"),
            **dict.fromkeys(("positions", "slots"), "*i64"),
            **dict.fromkeys(("tokens", "k_token", "k_head", "v_token", "v_head"), "i32"),
            "eps": "fp32",
        },
        {"HKV": 8, "D": 128, "C": 64, "PAGE": 64, "HALF": 64, "INTERLEAVED": False, "TOKENS": TOKENS},
        {"num_warps": 4},
    )
    return {"merge": merged, "append": appended}


if __name__ == "__main__":
    print(json.dumps(compile_others() if sys.argv[1] == "others" else compile_variant(sys.argv[1])))
else:
    import pytest

    pytest.importorskip("triton")

    def gate(name):
        """What this file prints for a variant, in a process without the interpreter."""
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        command = [sys.executable, "-W", "ignore", __file__, name]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout)

    def test_merge_and_append_compile_without_spills():
        for name, (_, spilled, shared) in gate("others").items():
            assert spilled == 0, name
            assert shared <= 99 * 1024

    @pytest.mark.slow
    @pytest.mark.parametrize("name", VARIANTS)
    def test_attention_compiles_without_spills(name):
        ((_, spilled, shared),) = gate(name).values()
        assert spilled == 0 or name in MAY_SPILL
        assert shared <= 227 * 1024
