// New tokens into pages on the CPU: norm and rotate K, store K and V. Knows pointers and integers only.
#include "attend_cpu.h"

#include <pybind11/pybind11.h>

#include <cmath>
#include <cstring>
#include <vector>

namespace py = pybind11;

namespace dagengine::cpu {
namespace {

constexpr int WIDEST = 1024;

// Rows of K or V: [tokens, heads, dim], the last axis contiguous, the others this many elements apart.
struct Rows {
    const void* base;
    int64_t row, head;
    Dtype dtype;
};

struct Append {
    const int64_t* slots;
    int tokens, heads, dim, page_size;
    const float *cos, *sin;  // [tokens, half], null: no rotation
    int half;
    bool interleaved;
    const float* norm;  // [dim], null: none
    float eps;
};

void turn(const Append& a, int token, float* x) {
    const float *cos = a.cos + int64_t(token) * a.half, *sin = a.sin + int64_t(token) * a.half;
    const int apart = a.interleaved ? 1 : a.half, step = a.interleaved ? 2 : 1;
    for (int i = 0; i < a.half; i++) {
        const float first = x[i * step], second = x[i * step + apart];
        x[i * step] = first * cos[i] - second * sin[i];
        x[i * step + apart] = second * cos[i] + first * sin[i];
    }
}

void append(const Append& a, Rows k, Rows v, void* pages, Dtype dtype) {
    float x[WIDEST];
    for (int token = 0; token < a.tokens; token++) {
        const int64_t page = a.slots[token] / a.page_size, row = a.slots[token] % a.page_size;
        for (int head = 0; head < a.heads; head++) {
            const int64_t to = ((page * 2 * a.heads + head) * a.page_size + row) * a.dim;
            load_row(k.base, token * k.row + head * k.head, k.dtype, x, a.dim, 1.0f);
            if (a.norm) {
                float squares = 0.0f;
                for (int i = 0; i < a.dim; i++) squares += x[i] * x[i];
                const float scale = 1.0f / std::sqrt(squares / float(a.dim) + a.eps);
                for (int i = 0; i < a.dim; i++) x[i] = x[i] * scale * a.norm[i];
            }
            if (a.cos) turn(a, token, x);
            store_row(pages, to, dtype, x, a.dim, 1.0f);
            load_row(v.base, token * v.row + head * v.head, v.dtype, x, a.dim, 1.0f);
            store_row(pages, to + int64_t(a.heads) * a.page_size * a.dim, dtype, x, a.dim, 1.0f);
        }
    }
}

}  // namespace
}  // namespace dagengine::cpu

void bind_append(py::module_& module) {
    using namespace dagengine::cpu;
    module.attr("WIDEST") = WIDEST;
    module.def("append", [](uintptr_t slots, int tokens, int heads, int dim, int page_size, uintptr_t cos, uintptr_t sin,
                            int half, bool interleaved, uintptr_t norm, float eps, uintptr_t k, int64_t k_row,
                            int64_t k_head, int k_dtype, uintptr_t v, int64_t v_row, int64_t v_head, int v_dtype,
                            uintptr_t pages, int dtype) {
        append({reinterpret_cast<const int64_t*>(slots), tokens, heads, dim, page_size,
                reinterpret_cast<const float*>(cos), reinterpret_cast<const float*>(sin), half, interleaved,
                reinterpret_cast<const float*>(norm), eps},
               {reinterpret_cast<const void*>(k), k_row, k_head, Dtype(k_dtype)},
               {reinterpret_cast<const void*>(v), v_row, v_head, Dtype(v_dtype)}, reinterpret_cast<void*>(pages),
               Dtype(dtype));
    }, py::call_guard<py::gil_scoped_release>());
}
