"""Variants into kernels: TileLang's compiler and what it is told. Knows nothing of plans."""

from __future__ import annotations

from functools import cache
from typing import Any

import tilelang
from tvm.target import Target

from dagengine_kernels.fused.tilelang.attend import attend_func
from dagengine_kernels.fused.tilelang.variant import Variant

PASS_CONFIGS: dict[str, Any] = {
    tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True,
    tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True,
    tilelang.PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True,
    tilelang.PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS: True,
    tilelang.PassConfigKey.TL_DISABLE_BUFFER_INIT_CHECK: True,
}

FLAGS = ("-O3", "--use_fast_math", "--expt-relaxed-constexpr", "--expt-extended-lambda", "-DNDEBUG")


@cache
def kernel(v: Variant) -> Any:
    """The kernel of a variant, compiled for sm_90a at the first call (seconds; TileLang keeps it on disk)."""
    target = Target({"kind": "cuda", "arch": "sm_90a"})
    with target:
        return tilelang.compile(
            attend_func(v),
            target=target,
            execution_backend="tvm_ffi",
            pass_configs=PASS_CONFIGS,
            compile_flags=list(FLAGS),
        )


def source(v: Variant) -> str:
    """The CUDA source of a variant; needs neither a GPU nor nvcc."""
    target = Target({"kind": "cuda", "arch": "sm_90a"})
    config = {getattr(key, "value", key): value for key, value in PASS_CONFIGS.items()}
    with target, tilelang.transform.PassContext(opt_level=3, config=config):
        return str(tilelang.lower(attend_func(v), target=target).kernel_source)
