// What the thread pool needs of the operating system: threads, a lock with a condition, aligned memory, a pause.
#pragma once

#include <stddef.h>

#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#include <malloc.h>
#include <stdlib.h>
#include <windows.h>
#else
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#endif

constexpr size_t STACK_BYTES = size_t(1) << 20;

/// Let the other hardware thread of the core run for a moment.
inline void pause_core() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/// A variable of the environment as a number; 0 if there is none, or it is something else.
inline int environment_number(const char *name) {
#ifdef _WIN32
    char text[16];
    DWORD length = GetEnvironmentVariableA(name, text, sizeof(text));
    if (length == 0 || length >= sizeof(text)) return 0;
#else
    const char *text = getenv(name);
    if (!text) return 0;
#endif
    return atoi(text);
}

#ifdef _WIN32

struct Monitor {
    SRWLOCK lock = SRWLOCK_INIT;
    CONDITION_VARIABLE condition = CONDITION_VARIABLE_INIT;
};

inline void lock(Monitor *m) { AcquireSRWLockExclusive(&m->lock); }
inline void unlock(Monitor *m) { ReleaseSRWLockExclusive(&m->lock); }
inline void wait(Monitor *m) { SleepConditionVariableSRW(&m->condition, &m->lock, INFINITE, 0); }
inline void wake_one(Monitor *m) { WakeConditionVariable(&m->condition); }
inline void yield_core() { SwitchToThread(); }
inline void *aligned_memory(size_t alignment, size_t size) { return _aligned_malloc(size, alignment); }
inline void free_memory(void *p) { _aligned_free(p); }
inline bool on_fork(void (*)()) { return true; }

template <void (*RUN)()> DWORD WINAPI run_thread(LPVOID) {
    RUN();
    return 0;
}

/// Start a thread that runs RUN and is never joined; return whether it runs.
template <void (*RUN)()> inline bool start_thread() {
    HANDLE thread = CreateThread(nullptr, STACK_BYTES, run_thread<RUN>, nullptr, 0, nullptr);
    if (thread) CloseHandle(thread);
    return thread != nullptr;
}

#else

struct Monitor {
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t condition = PTHREAD_COND_INITIALIZER;
};

inline void lock(Monitor *m) { pthread_mutex_lock(&m->lock); }
inline void unlock(Monitor *m) { pthread_mutex_unlock(&m->lock); }
inline void wait(Monitor *m) { pthread_cond_wait(&m->condition, &m->lock); }
inline void wake_one(Monitor *m) { pthread_cond_signal(&m->condition); }
inline void yield_core() { sched_yield(); }
inline void free_memory(void *p) { free(p); }

inline void *aligned_memory(size_t alignment, size_t size) {
    void *p = nullptr;
    return posix_memalign(&p, alignment, size) == 0 ? p : nullptr;
}

/// Call a function in every child process; return whether that is settled.
inline bool on_fork(void (*in_child)()) { return pthread_atfork(nullptr, nullptr, in_child) == 0; }

template <void (*RUN)()> void *run_thread(void *) {
    RUN();
    return nullptr;
}

/// Start a thread that runs RUN, is never joined and receives no signals; return whether it runs.
template <void (*RUN)()> inline bool start_thread() {
    sigset_t all, before;
    sigfillset(&all);
    pthread_attr_t attributes;
    if (pthread_attr_init(&attributes) != 0) return false;
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    bool runs = pthread_create(&thread, &attributes, run_thread<RUN>, nullptr) == 0;
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    pthread_attr_destroy(&attributes);
    return runs;
}

#endif
