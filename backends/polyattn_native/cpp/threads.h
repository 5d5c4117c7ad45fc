// Parallel loops on threads of our own: a counter of tasks, waiting by a short spin and then asleep.
#pragma once

#include "abi.h"

/// The body of a loop: task is in [0, tasks), workspace is memory of the thread, aligned to 64 bytes.
typedef void (*TaskBody)(const void *context, int64_t task, void *workspace);

/// Run body for each task on at most `threads` threads, the calling one included; return OK or the bytes for which there is no memory.
///
/// Every thread has `workspace` bytes of its own, which its tasks find as the last one left them. Before its first task
/// the first 64 bytes are zero, the others are not initialised. Which thread runs which task is not determined: a
/// result that must be repeatable may depend on the task only. If the pool is in use by another thread of the program,
/// or none can be started, the calling thread runs all tasks. Without memory for the workspace, no task runs.
Status parallel_for(int64_t tasks, int threads, size_t workspace, TaskBody body, const void *context);

/// The number of threads that is worth its start for this many floating-point operations.
inline int threads_for(double operations, int threads) {
    constexpr double WORTHWHILE = 4e6;  // waking a thread costs some ten thousand cycles
    double most = operations / WORTHWHILE + 1;
    return most < threads ? static_cast<int>(most) : threads;
}

/// Memory that is cut into consecutive pieces, each aligned to 64 bytes. Without memory it only measures.
struct Arena {
    uintptr_t start;
    size_t used = 0;

    explicit Arena(void *memory) : start(reinterpret_cast<uintptr_t>(memory)) {}

    /// Room for `count` elements.
    template <class T> T *take(int64_t count) {
        T *piece = reinterpret_cast<T *>(start + used);
        used += (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
        return piece;
    }
};
