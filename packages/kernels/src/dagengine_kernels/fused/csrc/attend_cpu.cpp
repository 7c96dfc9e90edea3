// One launch of the CPU attention: who walks which work, the merge of what was cut, and the binding to Python.
//
// Workers are taken by whichever thread is free; a worker's result does not depend on who took it, and parts are merged
// in the plan's order, so the bits are the same for every number of threads.
#include "attend_cpu.h"
#include "threads.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

namespace py = pybind11;

namespace dagengine::cpu {
namespace {

using Ints = py::array_t<int32_t, py::array::c_style | py::array::forcecast>;
using Longs = py::array_t<int64_t, py::array::c_style | py::array::forcecast>;

// Tokens times (1 + rows / 8) of a launch from which on a second thread pays.
constexpr double WORTH_A_THREAD = 1024;
// Floats of partial results from which on the merge is worth the threads.
constexpr int64_t WORTH_A_MERGE = 1 << 16;

std::vector<const Isa*> isas() {
    std::vector<const Isa*> found;
#if defined(__x86_64__) || defined(__i386__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        found.push_back(isa_avx512());
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
        found.push_back(isa_avx2());
#endif
    found.push_back(isa_portable());
    std::vector<const Isa*> usable;
    for (const Isa* isa : found)
        if (isa) usable.push_back(isa);
    return usable;
}

const Isa* isa_named(const std::string& name) {
    for (const Isa* isa : isas())
        if (name == isa->name) return isa;
    throw py::value_error("this machine cannot run " + name);
}

// Memory that grows and is used again by the next launch; one launch at a time.
class Workspace {
public:
    char* at_least(size_t bytes) {
        if (bytes > size_) {
            memory_.reset();
            size_ = 0;
            void* got = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
            if (!got) throw std::bad_alloc();
            memory_.reset(static_cast<char*>(got));
            size_ = bytes;
        }
        return memory_.get();
    }

private:
    struct Free {
        void operator()(char* p) const { std::free(p); }
    };
    std::unique_ptr<char, Free> memory_;
    size_t size_ = 0;
};

class CpuPlan {
public:
    CpuPlan(
        const std::string& isa, const py::object& arrays, Longs q_positions, int head_dim, int group, int num_kv_heads,
        double scale, double softcap, int64_t window, uintptr_t cos, uintptr_t sin, int64_t rotary_length, int half,
        bool interleaved, bool invariant
    )
        : isa_(isa_named(isa)),
          entries_(arrays.attr("entries").cast<Ints>()),
          runs_(arrays.attr("runs").cast<Ints>()),
          deltas_(arrays.attr("deltas").cast<Ints>()),
          merge_rows_(arrays.attr("merge_rows").cast<Ints>()),
          merge_indptr_(arrays.attr("merge_indptr").cast<Ints>()),
          merge_parts_(arrays.attr("merge_parts").cast<Ints>()),
          q_positions_(std::move(q_positions)),
          num_parts_(arrays.attr("num_parts").cast<int64_t>()) {
        Call& c = call_;
        c = Call{};
        c.entries = entries_.data();
        c.runs = runs_.data();
        c.deltas = deltas_.data();
        c.q_positions = q_positions_.data();
        c.boxes = arrays.attr("boxes").cast<int>();
        c.page_size = arrays.attr("page_size").cast<int>();
        c.head_dim = head_dim;
        c.group = group;
        c.num_kv_heads = num_kv_heads;
        c.window = window;
        c.scale = float(scale);
        c.softcap = float(softcap);
        c.cos = reinterpret_cast<const float*>(cos);
        c.sin = reinterpret_cast<const float*>(sin);
        c.rotary_length = rotary_length;
        c.half = half;
        c.interleaved = interleaved;
        c.invariant = invariant;
        for (const py::handle& each : arrays.attr("classes")) {
            auto tile_rows = each.attr("tile_rows").cast<Ints>();
            auto works = each.attr("works").cast<Ints>();
            auto indptr = each.attr("work_indptr").cast<Ints>();
            int slots = int(tile_rows.shape(1));
            c.max_slots = std::max(c.max_slots, slots);
            classes_.push_back({tile_rows.data(), works.data(), indptr.data(), slots, int(indptr.shape(0)) - 1});
            workers_ += classes_.back().workers;
            for (py::ssize_t w = 0; w < works.shape(0); w++) {
                const int32_t* rows = tile_rows.data() + int64_t(works.at(w, 0)) * slots;
                int used = 0;
                while (used < slots && rows[used] >= 0) used++;
                double tokens = double(works.at(w, 3) - works.at(w, 2)) * c.boxes * c.page_size;
                cost_ += tokens * (1 + used * group / 8.0);
            }
            held_.push_back({std::move(tile_rows), std::move(works), std::move(indptr)});
        }
        scratch_ = (isa_->scratch_bytes(c) + 63) / 64 * 64;
        part_floats_ = (num_parts_ * group * (head_dim + 1) + 15) / 16 * 16;
    }

    int threads(int allowed) const {
        return std::max(1, std::min({allowed, workers_, int(std::min(cost_ / WORTH_A_THREAD, 1e6))}));
    }

    size_t temp_bytes(int allowed) const { return size_t(part_floats_) * 4 + scratch_ * size_t(threads(allowed)); }

    void run(
        Workspace& workspace, uintptr_t q, int64_t q_row, int64_t q_head, int q_dtype, uintptr_t kv, int kv_dtype,
        uintptr_t sinks, uintptr_t out, uintptr_t lse2, int allowed
    ) const {
        Launch l{call_, this, nullptr, {0}, {0}, {0}};
        l.call.q = reinterpret_cast<const void*>(q);
        l.call.q_row = q_row;
        l.call.q_head = q_head;
        l.call.q_dtype = Dtype(q_dtype);
        l.call.kv = reinterpret_cast<const void*>(kv);
        l.call.kv_dtype = Dtype(kv_dtype);
        l.call.sinks = reinterpret_cast<const float*>(sinks);
        l.call.out = reinterpret_cast<void*>(out);
        l.call.lse2 = reinterpret_cast<float*>(lse2);
        int count = threads(allowed);
        char* memory = workspace.at_least(temp_bytes(allowed));
        l.call.o_part = reinterpret_cast<float*>(memory);
        l.call.lse2_part = l.call.o_part + num_parts_ * call_.group * call_.head_dim;
        l.scratch = memory + part_floats_ * 4;
        on_threads(count, walk, &l);
        if (merge_rows_.shape(0)) on_threads(part_floats_ < WORTH_A_MERGE ? 1 : count, merge, &l);
    }

private:
    struct Launch {
        Call call;
        const CpuPlan* plan;
        char* scratch;
        std::atomic<int> thread, worker;
        std::atomic<int64_t> row;
    };
    struct Held {
        Ints tile_rows, works, indptr;
    };

    static void walk(void* context) {
        Launch& l = *static_cast<Launch*>(context);
        const CpuPlan& plan = *l.plan;
        char* scratch = l.scratch + plan.scratch_ * size_t(l.thread.fetch_add(1));
        for (int w; (w = l.worker.fetch_add(1)) < plan.workers_;) {
            for (const Class& cls : plan.classes_) {
                if (w >= cls.workers) {
                    w -= cls.workers;
                    continue;
                }
                for (int i = cls.work_indptr[w]; i < cls.work_indptr[w + 1]; i++)
                    plan.isa_->work(l.call, cls, cls.works + int64_t(i) * 5, scratch);
                break;
            }
        }
    }

    static void merge(void* context) {
        Launch& l = *static_cast<Launch*>(context);
        constexpr int64_t AT_ONCE = 64;
        int64_t rows = l.plan->merge_rows_.shape(0);
        std::vector<float> sum(size_t(l.call.head_dim));
        for (int64_t j; (j = l.row.fetch_add(AT_ONCE)) < rows;)
            for (int64_t i = j; i < std::min(j + AT_ONCE, rows); i++) l.plan->merge_row(l.call, i, sum.data());
    }

    void merge_row(const Call& c, int64_t j, float* sum) const {
        int row = merge_rows_.data()[j] / c.num_kv_heads, head = merge_rows_.data()[j] % c.num_kv_heads;
        const int32_t* parts = merge_parts_.data();
        int begin = merge_indptr_.data()[j], end = merge_indptr_.data()[j + 1];
        for (int g = 0; g < c.group; g++) {
            float top = -INFINITY, total = 0;
            for (int i = begin; i < end; i++) top = std::max(top, c.lse2_part[int64_t(parts[i]) * c.group + g]);
            std::fill(sum, sum + c.head_dim, 0.0f);
            for (int i = begin; i < end; i++) {
                int64_t at = int64_t(parts[i]) * c.group + g;
                float lse2 = c.lse2_part[at];
                if (lse2 == -INFINITY) continue;
                float weight = std::exp2(lse2 - top);
                const float* part = c.o_part + at * c.head_dim;
                for (int d = 0; d < c.head_dim; d++) sum[d] += weight * part[d];
                total += weight;
            }
            float factor = total == 0 ? 0.0f : 1 / total;
            float lse2 = total == 0 ? -INFINITY : top + std::log2(total);
            int query_head = head * c.group + g;
            if (c.sinks) factor *= with_sink(c.sinks[query_head], &lse2);
            int64_t at = int64_t(row) * c.num_kv_heads * c.group + query_head;
            store_row(c.out, at * c.head_dim, c.q_dtype, sum, c.head_dim, factor);
            if (c.lse2) c.lse2[at] = lse2;
        }
    }

    const Isa* isa_;
    Ints entries_, runs_, deltas_, merge_rows_, merge_indptr_, merge_parts_;
    Longs q_positions_;
    int64_t num_parts_, part_floats_ = 0;
    std::vector<Held> held_;
    std::vector<Class> classes_;
    Call call_;
    int workers_ = 0;
    double cost_ = 0;
    size_t scratch_ = 0;
};

}  // namespace
}  // namespace dagengine::cpu

void bind_cpu(py::module_& m) {
    using namespace dagengine::cpu;
    m.doc() = "Attention over a fused plan on the CPU; cpu.py says what the arguments are.";
    m.def("isas", [] {
        std::vector<std::string> names;
        for (const Isa* isa : isas()) names.emplace_back(isa->name);
        return names;
    });
    py::class_<Workspace>(m, "Workspace").def(py::init<>());
    py::class_<CpuPlan>(m, "CpuPlan")
        .def(
            py::init<
                const std::string&, const py::object&, Longs, int, int, int, double, double, int64_t, uintptr_t,
                uintptr_t, int64_t, int, bool, bool>(),
            py::arg("isa"), py::arg("arrays"), py::arg("q_positions"), py::arg("head_dim"), py::arg("group"),
            py::arg("num_kv_heads"), py::arg("scale"), py::arg("softcap"), py::arg("window"), py::arg("cos"),
            py::arg("sin"), py::arg("rotary_length"), py::arg("half"), py::arg("interleaved"), py::arg("invariant")
        )
        .def("threads", &CpuPlan::threads, py::arg("allowed"))
        .def("temp_bytes", &CpuPlan::temp_bytes, py::arg("allowed"))
        .def("run", &CpuPlan::run, py::call_guard<py::gil_scoped_release>());
}
