// The thread pool. One loop runs on it at a time; a thread that finds it in use runs its loop alone.
//
// The state of the pool is one number that changes by compare and exchange: the loop's number, how many workers it
// still takes, how many have joined. The calling thread closes the loop when no task is left, and waits only for the
// workers that have joined: it never depends on a thread that has not woken up yet.

#include "threads.h"

#include <string.h>

#include "system.h"

namespace {

constexpr int MOST_WORKERS = 1023;
constexpr int SPINS = 1500;  // some ten microseconds
constexpr size_t LINE = 64;

// ---- memory ---------------------------------------------------------------------------------------------------------

constexpr int SLOTS = 64;
constexpr size_t KEPT = size_t(16) << 20;  // a larger workspace is returned to the system

/// Memory of a thread; the size stands before it.
void *slots[SLOTS];

size_t *size_before(void *memory) { return reinterpret_cast<size_t *>(static_cast<char *>(memory) - LINE); }

void release(void *memory) {
    if (memory) free_memory(static_cast<char *>(memory) - LINE);
}

/// Memory of at least this size, from an earlier loop or new; null if there is none.
void *take_workspace(size_t size) {
    for (void *&slot : slots) {
        void *memory = __atomic_exchange_n(&slot, nullptr, __ATOMIC_ACQ_REL);
        if (memory && *size_before(memory) >= size) return memory;
        release(memory);
    }
    size_t rounded = (size + 0xFFFF) & ~size_t(0xFFFF);
    if (rounded < size) return nullptr;
    char *start = static_cast<char *>(aligned_memory(LINE, rounded + LINE));
    if (!start) return nullptr;
    *reinterpret_cast<size_t *>(start) = rounded;
    return start + LINE;
}

/// Keep memory for the next loop, or free it.
void give_workspace(void *memory) {
    if (memory && *size_before(memory) <= KEPT) {
        for (void *&slot : slots) {
            void *none = nullptr;
            if (__atomic_compare_exchange_n(&slot, &none, memory, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) return;
        }
    }
    release(memory);
}

// ---- loops ----------------------------------------------------------------------------------------------------------

struct Loop {
    int64_t tasks;
    TaskBody body;
    const void *context;
    size_t workspace;
    int64_t next;  // the first task that nobody has taken
};

/// Run tasks until none is left.
void drain(Loop *loop, void *memory) {
    if (memory) memset(memory, 0, LINE);
    for (;;) {
        int64_t task = __atomic_fetch_add(&loop->next, 1, __ATOMIC_RELAXED);
        if (task >= loop->tasks) return;
        loop->body(loop->context, task, memory);
    }
}

/// Fields of the state: open places in the low 16 bits, then workers that have joined, then the loop's number.
struct State {
    static constexpr uint64_t JOINED = uint64_t(1) << 16, NUMBER = uint64_t(1) << 32;

    static uint64_t places(uint64_t state) { return state & 0xFFFF; }
    static uint64_t joined(uint64_t state) { return state >> 16 & 0xFFFF; }
    static uint64_t closed(uint64_t state) { return state & ~uint64_t(0xFFFF); }
    static uint64_t number(uint64_t state) { return state / NUMBER; }
};

struct Pool {
    uint64_t state = 0;
    uint64_t finished = 0;  // workers that have left the loop
    int workers = 0;
    int sleeping = 0;
    int in_use = 0;
    bool watches_fork = false;
    Loop loop = {};
    Monitor monitor;
};

Pool pool;

/// A child process has none of the threads, and nobody holds its lock.
void after_fork() {
    bool watches = pool.watches_fork;
    pool = Pool();
    pool.watches_fork = watches;
}

uint64_t state_now() { return __atomic_load_n(&pool.state, __ATOMIC_SEQ_CST); }

/// Wait until a loop other than the one of number `last` has a place.
void wait_for_place(uint64_t last) {
    auto may_join = [last](uint64_t state) { return State::places(state) > 0 && State::number(state) != last; };
    for (int spin = 0; spin < SPINS; spin++) {
        if (may_join(state_now())) return;
        pause_core();
    }
    lock(&pool.monitor);
    __atomic_add_fetch(&pool.sleeping, 1, __ATOMIC_SEQ_CST);
    while (!may_join(state_now())) wait(&pool.monitor);
    __atomic_sub_fetch(&pool.sleeping, 1, __ATOMIC_SEQ_CST);
    unlock(&pool.monitor);
}

/// The life of a worker: join loops that have a place, one after the other.
void work() {
    uint64_t last = 0;
    for (;;) {
        wait_for_place(last);
        uint64_t state = state_now();
        bool joined = false;
        while (State::places(state) > 0 && State::number(state) != last && !joined)
            joined = __atomic_compare_exchange_n(&pool.state, &state, state - 1 + State::JOINED, false,
                                                 __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
        if (!joined) continue;
        last = State::number(state);
        void *memory = pool.loop.workspace ? take_workspace(pool.loop.workspace) : nullptr;
        if (memory || !pool.loop.workspace) drain(&pool.loop, memory);
        give_workspace(memory);
        __atomic_add_fetch(&pool.finished, 1, __ATOMIC_SEQ_CST);
    }
}

/// Start workers until there are `count`; return how many there are.
int start_workers(int count) {
    if (!pool.watches_fork) pool.watches_fork = on_fork(after_fork);
    while (pool.watches_fork && pool.workers < count && start_thread<work>()) pool.workers++;
    return pool.workers < count ? pool.workers : count;
}

/// Run the pool's loop on this thread and up to `others` workers.
void run_with(int others, void *memory) {
    __atomic_store_n(&pool.finished, 0, __ATOMIC_RELAXED);
    uint64_t number = State::number(state_now()) + 1;  // of 32 bits, which is enough to tell two loops apart
    __atomic_store_n(&pool.state, number * State::NUMBER + static_cast<uint64_t>(others), __ATOMIC_SEQ_CST);
    int asleep = __atomic_load_n(&pool.sleeping, __ATOMIC_SEQ_CST);
    if (asleep) {
        lock(&pool.monitor);
        for (int i = 0; i < asleep && i < others; i++) wake_one(&pool.monitor);
        unlock(&pool.monitor);
    }
    drain(&pool.loop, memory);
    uint64_t state = state_now();
    while (!__atomic_compare_exchange_n(&pool.state, &state, State::closed(state), false, __ATOMIC_SEQ_CST,
                                        __ATOMIC_SEQ_CST)) {
    }
    for (int spin = 0; __atomic_load_n(&pool.finished, __ATOMIC_SEQ_CST) != State::joined(state); spin++) {
        if (spin < SPINS) pause_core();
        else yield_core();
    }
}

}  // namespace

Status parallel_for(int64_t tasks, int threads, size_t workspace, TaskBody body, const void *context) {
    if (tasks <= 0) return OK;
    void *memory = workspace ? take_workspace(workspace) : nullptr;
    if (workspace && !memory) return static_cast<Status>(workspace);
    Loop loop = {tasks, body, context, workspace, 0};
    int others = static_cast<int>(tasks < threads ? tasks : threads) - 1;
    if (others > MOST_WORKERS) others = MOST_WORKERS;
    if (others > 0 && !__atomic_exchange_n(&pool.in_use, 1, __ATOMIC_ACQUIRE)) {
        others = start_workers(others);
        pool.loop = loop;
        run_with(others, memory);
        __atomic_store_n(&pool.in_use, 0, __ATOMIC_RELEASE);
    } else {
        drain(&loop, memory);
    }
    give_workspace(memory);
    return OK;
}
