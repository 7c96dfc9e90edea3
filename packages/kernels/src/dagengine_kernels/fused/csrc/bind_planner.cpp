// The planner as a submodule: numpy arrays in, numpy arrays out without copies, the GIL released in between.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>

#include "planner.h"

namespace py = pybind11;

namespace dagengine::planner {

namespace {

template <typename T>
using In = py::array_t<T, py::array::c_style>;

// A vector of structs of `columns` ints as an array [n, columns], columns 0: of ints, [n]; `owner` keeps the vector.
template <typename Values>
py::array give(const Values& values, const py::capsule& owner, py::ssize_t columns = 0) {
    auto* data = reinterpret_cast<const int32_t*>(values.data());
    const auto ints = static_cast<py::ssize_t>(values.size() * sizeof(values[0]) / sizeof(int32_t));
    if (!columns) return py::array_t<int32_t>({ints}, data, owner);
    return py::array_t<int32_t>({ints / columns, columns}, data, owner);
}

// One owner for all arrays of a plan: what makes each its own takes longer than some of them do to plan.
py::tuple give_plan(Plan&& made) {
    auto* const plan = new Plan(std::move(made));
    const py::capsule owner(plan, [](void* pointer) { delete static_cast<Plan*>(pointer); });
    py::list classes;
    for (const Class& one : plan->classes)
        classes.append(py::make_tuple(one.height, give(one.tile_rows, owner, one.slots), give(one.works, owner, 5),
                                      give(one.work_indptr, owner)));
    return py::make_tuple(give(plan->entries, owner, 4), give(plan->runs, owner, 2), give(plan->deltas, owner), classes,
                          give(plan->merge_rows, owner), give(plan->merge_indptr, owner),
                          give(plan->merge_parts, owner), plan->num_parts, give(plan->tails, owner, 3),
                          plan->tokens_read, plan->tokens_unique);
}

Parameters read_parameters(const py::tuple& given) {
    Parameters parameters;
    parameters.group = given[0].cast<int64_t>();
    parameters.heads = given[1].cast<int64_t>();
    for (py::handle height : given[2]) parameters.heights.push_back(height.cast<int64_t>());
    for (py::handle workers : given[3]) parameters.workers.push_back(workers.cast<int64_t>());
    parameters.boxes = given[4].cast<int64_t>();
    parameters.window = given[5].is_none() ? 0 : given[5].cast<int64_t>();
    parameters.min_chunk = given[6].cast<int64_t>();
    parameters.work_cost = given[7].cast<int64_t>();
    parameters.run_cost = given[8].cast<int64_t>();
    parameters.wide_cost = given[9].cast<double>();
    parameters.owners = given[10].cast<bool>();
    parameters.invariant_chunk = given[11].is_none() ? 0 : given[11].cast<int64_t>();
    return parameters;
}

using Pages = std::optional<std::pair<In<int32_t>, In<int32_t>>>;

Reserve read_reserve(const Pages& pages, int64_t sequences) {
    if (!pages) return {};
    const auto& [indptr, listed] = *pages;
    if (indptr.size() != sequences + 1 || indptr.at(sequences) > listed.size())
        throw py::value_error("reserve does not fit the batch");
    return {indptr.data(), listed.data()};
}

py::tuple plan_batch(const Batch& batch, const py::tuple& parameters, const Pages& pages) {
    const Parameters asked = read_parameters(parameters);
    const Reserve reserve = read_reserve(pages, batch.sequences);
    bool good = false;
    Plan made;
    {
        py::gil_scoped_release release;
        good = valid(batch);
        if (good) made = plan(batch, asked, reserve);
    }
    if (!good) throw py::value_error("the batch is not valid");
    return give_plan(std::move(made));
}

void check_indptr(const In<int32_t>& indptr, const char* name) {
    if (indptr.ndim() != 1 || indptr.size() < 1) throw py::value_error(name);
}

}  // namespace

}  // namespace dagengine::planner

void bind_planner(py::module_& module) {
    using namespace dagengine::planner;
    module.doc() = "The planner: fused/planner.py says what the arguments are.";
    module.def(
        "plan_spans",
        [](const In<int32_t>& q_indptr, const In<int64_t>& q_positions, const In<int32_t>& list_indptr,
           const In<int32_t>& list_pages, const In<int32_t>& span_indptr, const In<int32_t>& spans, int64_t page_size,
           const py::tuple& parameters, const Pages& reserve) {
            check_indptr(q_indptr, "q_indptr");
            check_indptr(list_indptr, "list_indptr");
            check_indptr(span_indptr, "span_indptr");
            if (span_indptr.size() != q_indptr.size()) throw py::value_error("span_indptr");
            if (spans.ndim() != 2 || spans.shape(1) != 5) throw py::value_error("spans");
            const Batch batch{q_indptr.data(),    q_indptr.size() - 1,    q_positions.data(),
                              q_positions.size(), list_indptr.data(),     list_indptr.size() - 1,
                              list_pages.data(),  list_pages.size(),      span_indptr.data(),
                              reinterpret_cast<const Span*>(spans.data()), spans.shape(0), page_size};
            return plan_batch(batch, parameters, reserve);
        },
        py::arg("q_indptr").noconvert(), py::arg("q_positions").noconvert(), py::arg("list_indptr").noconvert(),
        py::arg("list_pages").noconvert(), py::arg("span_indptr").noconvert(), py::arg("spans").noconvert(),
        py::arg("page_size"), py::arg("parameters"), py::arg("reserve"));

    module.def(
        "plan_table",
        [](const In<int32_t>& q_indptr, const In<int64_t>& q_positions, const In<int32_t>& extent_indptr,
           const In<int32_t>& extents, int64_t page_size, int64_t num_pages, const py::tuple& parameters,
           const Pages& reserve) {
            check_indptr(q_indptr, "q_indptr");
            check_indptr(extent_indptr, "extent_indptr");
            if (extent_indptr.size() != q_indptr.size()) throw py::value_error("extent_indptr");
            if (extents.ndim() != 2 || extents.shape(1) != 5) throw py::value_error("extents");
            const int64_t sequences = q_indptr.size() - 1;
            for (int64_t b = 0; b < sequences; ++b)
                if (extent_indptr.at(b) < 0 || extent_indptr.at(b) > extent_indptr.at(b + 1))
                    throw py::value_error("extent_indptr");
            if (extent_indptr.at(sequences) != extents.shape(0)) throw py::value_error("extent_indptr");
            Spans spans;
            bool good = false;
            {
                py::gil_scoped_release release;
                good = find_spans(extent_indptr.data(), sequences, reinterpret_cast<const Extent*>(extents.data()),
                                  page_size, num_pages, spans);
            }
            if (!good) throw py::value_error("extents");
            const Batch batch{q_indptr.data(),
                              sequences,
                              q_positions.data(),
                              q_positions.size(),
                              spans.list_indptr.data(),
                              static_cast<int64_t>(spans.list_indptr.size()) - 1,
                              spans.list_pages.data(),
                              static_cast<int64_t>(spans.list_pages.size()),
                              spans.span_indptr.data(),
                              spans.spans.data(),
                              static_cast<int64_t>(spans.spans.size()),
                              page_size};
            return plan_batch(batch, parameters, reserve);
        },
        py::arg("q_indptr").noconvert(), py::arg("q_positions").noconvert(), py::arg("extent_indptr").noconvert(),
        py::arg("extents").noconvert(), py::arg("page_size"), py::arg("num_pages"), py::arg("parameters"),
        py::arg("reserve"));
}
