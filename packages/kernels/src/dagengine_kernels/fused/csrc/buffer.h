// Vectors whose new elements are left unset: what is written in full need not be cleared first.
#pragma once

#include <memory>
#include <new>
#include <utility>
#include <vector>

namespace dagengine::planner {

template <typename T>
struct Unset : std::allocator<T> {
    template <typename Other>
    struct rebind {
        using other = Unset<Other>;
    };

    template <typename Made>
    void construct(Made* at) {
        ::new (static_cast<void*>(at)) Made;
    }
    template <typename Made, typename... Arguments>
    void construct(Made* at, Arguments&&... arguments) {
        ::new (static_cast<void*>(at)) Made(std::forward<Arguments>(arguments)...);
    }
};

template <typename T>
using Buffer = std::vector<T, Unset<T>>;

}  // namespace dagengine::planner
