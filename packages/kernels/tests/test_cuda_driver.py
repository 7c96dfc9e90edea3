"""Compiling and caching without a GPU; loading, launching and tensor maps with one."""

import ctypes
import shutil

import pytest
import torch

from dagengine_kernels import KernelError
from dagengine_kernels.fused.cuda import driver

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

SOURCE = """#include "more.cuh"
struct alignas(64) Params { char map[128]; float* x; int n; };
extern "C" __global__ void add(const __grid_constant__ Params p) {
    extern __shared__ float own[];
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    own[threadIdx.x] = MORE;
    if (i < p.n) p.x[i] += own[threadIdx.x] + p.map[127];
}
"""


class Params(ctypes.Structure):
    _fields_ = (
        ("map", ctypes.c_ubyte * 128),
        ("x", ctypes.c_void_p),
        ("n", ctypes.c_int),
        ("pad", ctypes.c_int * 13),
    )


@pytest.fixture
def sources(tmp_path, monkeypatch):
    (tmp_path / "own.cu").write_text(SOURCE)
    (tmp_path / "more.cuh").write_text("#pragma once\n#define MORE VALUE\n")
    monkeypatch.setattr(driver, "SOURCES", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def needs_a_compiler():
    try:
        return driver.compiler()
    except KernelError as e:
        pytest.skip(f"no compiler here: {e}")


def test_a_source_carries_its_headers(sources):
    text = driver.read_source("own")
    assert "#define MORE VALUE" in text
    assert '#line 2 "own.cu"' in text
    assert "#include" not in text
    assert "pragma once" not in text
    with pytest.raises(KernelError) as refused:
        driver.read_source("nowhere")
    assert refused.value.field == "nowhere"


def test_what_is_compiled_is_kept_and_found_again(sources, monkeypatch):
    needs_a_compiler()
    first = driver.cubin("own", {"VALUE": 3}, "sm_90a")
    assert first[:4] == b"\x7fELF"
    files = list(driver.cache_folder().glob("own-*.cubin"))
    assert [f.read_bytes() for f in files] == [first]
    monkeypatch.setattr(
        type(driver.compiler()), "compile", lambda *_: pytest.fail("compiled what the cache holds")
    )
    assert driver.cubin("own", {"VALUE": 3}, "sm_90a") == first


def test_other_macros_and_changed_headers_are_compiled_anew(sources):
    needs_a_compiler()
    driver.cubin("own", {"VALUE": 3}, "sm_90a")
    driver.cubin("own", {"VALUE": 4}, "sm_90a")
    (sources / "more.cuh").write_text("#define MORE (VALUE + 1)\n")
    driver.cubin("own", {"VALUE": 3}, "sm_90a")
    assert len(list(driver.cache_folder().glob("own-*.cubin"))) == 3


def test_a_compile_error_shows_the_log_at_its_line(sources):
    needs_a_compiler()
    with pytest.raises(KernelError, match=r"own\.cu\(6\).*nonsense") as refused:
        driver.cubin("own", {"VALUE": "nonsense"}, "sm_90a")
    assert refused.value.code == "backend_not_loadable"


def test_without_a_compiler_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(driver, "find_nvrtc", lambda: None)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(KernelError, match="install nvidia-cuda-nvrtc"):
        driver.compiler.__wrapped__()


def test_architectures():
    assert driver.architecture((9, 0)) == "sm_90a"
    assert driver.architecture((8, 9)) == "sm_89"
    with pytest.raises(KernelError):
        driver.architecture((7, 5))


def test_tensor_maps_of_unknown_types_are_refused():
    with pytest.raises(KernelError) as refused:
        driver.tensor_map(0, torch.complex64, [8], [], [8], False)
    assert refused.value.field == "dtype"


@pytest.mark.gpu
@on_gpu
def test_a_kernel_is_launched_with_its_struct(sources):
    kernel = driver.kernel("own", "add", {"VALUE": 3})
    assert kernel is driver.kernel("own", "add", {"VALUE": 3})
    assert kernel.params_bytes in (0, ctypes.sizeof(Params))
    assert kernel.registers > 0
    assert kernel.local_bytes == 0
    assert kernel.blocks_per_sm(128, 100_000) == 2
    x = torch.zeros(1000, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream
    params = Params(map=(ctypes.c_ubyte * 128)(*bytes(127), 2), x=x.data_ptr(), n=900)
    for given in (params, bytes(params)):
        kernel.launch((8, 1, 1), (128, 1, 1), 512, stream, given)
        kernel.launch((8, 1, 1), (128, 1, 1), 200_000, stream, given, pdl=True, cluster=(2, 1, 1))
    prepared = kernel.prepare((8, 1, 1), (128, 1, 1), 200_000, cluster=(2, 1, 1))
    for _ in range(2):
        prepared(stream, bytes(params))
    torch.cuda.synchronize()
    assert (x[:900] == 30).all()
    assert (x[900:] == 0).all()
    with pytest.raises(KernelError) as refused:
        kernel.launch((8, 1, 1), (128, 1, 1), 0, stream, bytes(params)[:-4])
    assert refused.value.field == "launch"
    with pytest.raises(KernelError):
        kernel.launch((8, 1, 1), (128, 1, 1), 10**6, stream, params)
    with pytest.raises(KernelError):
        driver.kernel("own", "missing", {"VALUE": 3})


@pytest.mark.gpu
@on_gpu
def test_the_current_stream_is_the_one_that_torch_launches_on():
    aside = torch.cuda.Stream()
    for stream in (torch.cuda.default_stream(), aside):
        with torch.cuda.stream(stream):
            assert driver.current_stream(torch.cuda.current_device()) == stream.cuda_stream


@pytest.mark.gpu
@on_gpu
def test_tensor_maps_are_made_for_pages():
    pages = torch.zeros(4, 2, 8, 64, 128, dtype=torch.bfloat16, device="cuda")
    strides = [256, 64 * 256, 8 * 64 * 256]
    made = driver.tensor_map(pages.data_ptr(), pages.dtype, [128, 64, 8, 8], strides, [64, 64, 1, 1], True)
    assert len(made) == 128
    assert any(made)
    with pytest.raises(KernelError):
        driver.tensor_map(pages.data_ptr(), pages.dtype, [128, 64, 8, 8], strides, [128, 64, 1, 1], True)
