// Enough of CUDA C++ to run device code on the host, a block after the other. The threads of a block are fibres that
// take turns from barrier to barrier, so that what they share is seen as on a device.

#include <ucontext.h>

#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static

using std::exp, std::tanh, std::isfinite;

struct Index {
    unsigned x;
} blockIdx, blockDim, threadIdx;

struct Fibre {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(1 << 16);
    bool done;
};

std::vector<Fibre> fibres(1024);
ucontext_t host;
void (*body)();

void start() {
    body();
    fibres[threadIdx.x].done = true;
}

void __syncthreads() {
    unsigned thread = threadIdx.x;
    swapcontext(&fibres[thread].context, &host);
}

template <class X> X __shfl_xor_sync(unsigned, X x, int lanes) {
    static X of_thread[1024];
    of_thread[threadIdx.x] = x;
    __syncthreads();
    X other = of_thread[threadIdx.x ^ lanes];
    __syncthreads();
    return other;
}

// Run a block's threads; false where some of them ended and others wait at a barrier.
bool run_block(unsigned threads) {
    for (unsigned i = 0; i < threads; i++) {
        Fibre& fibre = fibres[i];
        fibre.done = false;
        getcontext(&fibre.context);
        fibre.context.uc_stack.ss_sp = fibre.stack.data();
        fibre.context.uc_stack.ss_size = fibre.stack.size();
        fibre.context.uc_link = &host;
        makecontext(&fibre.context, start, 0);
    }
    for (unsigned ended = 0; ended < threads;) {
        for (unsigned i = 0; i < threads; i++) {
            threadIdx.x = i;
            swapcontext(&host, &fibres[i].context);
            ended += fibres[i].done;
        }
        if (ended != 0 && ended != threads) return false;
    }
    return true;
}

// Call a kernel as cuLaunchKernel does: with the addresses of its arguments.
template <class... A, std::size_t... I>
bool call(void (*kernel)(A...), unsigned blocks, unsigned threads, void** arguments, std::index_sequence<I...>) {
    static void (*now)(A...);
    static void** given;
    now = kernel;
    given = arguments;
    body = [] { now(*static_cast<A*>(given[I])...); };
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
        if (!run_block(threads)) return false;
    return true;
}

template <class... A> bool launch(void (*kernel)(A...), unsigned blocks, unsigned threads, void** arguments) {
    return call(kernel, blocks, threads, arguments, std::index_sequence_for<A...>());
}

// IEEE binary16: rounded to nearest, ties to even.
struct __half {
    unsigned short bits;
    __half() = default;
    __half(double x) {
        unsigned short sign = std::signbit(x) ? 0x8000 : 0;
        double size = std::fabs(float(x));
        if (std::isnan(x))
            bits = 0x7e00;
        else if (size >= 65520)
            bits = 0x7c00;
        else if (size < 0x1p-14)
            bits = std::nearbyint(size * 0x1p24);
        else
            bits = ((std::ilogb(size) + 14) << 10) + int(std::nearbyint(std::ldexp(size, 10 - std::ilogb(size))));
        bits |= sign;
    }
    operator float() const {
        int exponent = bits >> 10 & 31, rest = bits & 1023;
        float size = exponent ? std::ldexp(rest + 1024.0f, exponent - 25) : std::ldexp(float(rest), -24);
        if (exponent == 31) size = rest ? NAN : INFINITY;
        return bits & 0x8000 ? -size : size;
    }
};
