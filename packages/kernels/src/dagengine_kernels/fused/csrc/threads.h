// Threads that share one piece of work. Knows no work.
#pragma once

#include <dlfcn.h>

#include <thread>
#include <vector>

namespace dagengine::cpu {

// fn(context) on `count` threads, this one among them: by the OpenMP runtime that is in the process already (torch's),
// so that there is one team of threads and not two; by threads of our own where there is none.
inline void on_threads(int count, void (*fn)(void*), void* context) {
    using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
    static const Parallel parallel = reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
    if (count <= 1) {
        fn(context);
    } else if (parallel) {
        parallel(fn, context, unsigned(count), 0);
    } else {
        std::vector<std::thread> others;
        for (int i = 1; i < count; i++) others.emplace_back(fn, context);
        fn(context);
        for (std::thread& other : others) other.join();
    }
}

}  // namespace dagengine::cpu
