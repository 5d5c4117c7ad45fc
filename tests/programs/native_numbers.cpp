// Results of the native kernels for fixed inputs, one array a line: name, tolerance, status, numbers.
// native_numbers.py compares the output of a build for arm64 with that of one for x86-64.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "attention.h"

extern "C" {
Status polyattn_attention_forward(const Attention *);
Status polyattn_attention_backward(const AttentionBackward *);
Status polyattn_activation(int32_t dtype, int32_t activation, int32_t threads, int64_t rows, int64_t n, const void *x,
                           int64_t x_row, const void *up, int64_t up_row, void *y);
Status polyattn_norm(int32_t dtype, int32_t centred, int32_t threads, int64_t rows, int64_t n, double eps,
                     const void *x, int64_t x_row, const void *weight, const void *bias, void *y, void *xhat,
                     void *root);
Status polyattn_softmax(int32_t dtype, int32_t logarithm, int32_t threads, int64_t rows, int64_t n, const void *x,
                        int64_t x_row, void *y);
}

namespace {

typedef _Float16 Half;

struct Bfloat {
    uint16_t bits;
};

/// A dtype: its code, its name, and how far results may be apart.
template <class T> struct Kind;
template <> struct Kind<float> {
    static constexpr DType code = FLOAT32;
    static constexpr const char *name = "float32";
    static constexpr double tolerance = 2e-6;
};
template <> struct Kind<double> {
    static constexpr DType code = FLOAT64;
    static constexpr const char *name = "float64";
    static constexpr double tolerance = 1e-13;
};
template <> struct Kind<Half> {
    static constexpr DType code = FLOAT16;
    static constexpr const char *name = "float16";
    static constexpr double tolerance = 2e-3;
};
template <> struct Kind<Bfloat> {
    static constexpr DType code = BFLOAT16;
    static constexpr const char *name = "bfloat16";
    static constexpr double tolerance = 2e-2;
};

template <class T> T from_double(double x) { return static_cast<T>(x); }
template <> Bfloat from_double<Bfloat>(double x) {
    const float y = static_cast<float>(x);
    uint32_t bits;
    memcpy(&bits, &y, 4);
    return {static_cast<uint16_t>(bits >> 16)};
}

template <class T> double to_double(T x) { return static_cast<double>(x); }
template <> double to_double(Bfloat x) {
    const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

/// An array of n numbers in [-1, 1), the same on every machine; zeros without a seed.
template <class T> T *numbers(int64_t n, uint64_t seed = 0) {
    T *x = static_cast<T *>(calloc(static_cast<size_t>(n), sizeof(T)));
    for (int64_t i = 0; seed != 0 && i < n; i++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        x[i] = from_double<T>(static_cast<double>(seed >> 53) / 1024 - 1);
    }
    return x;
}

/// Print every so many numbers of an array, and the sum of their absolute values.
template <class T> void print(const char *what, const char *dtype, double tolerance, Status status, const T *x,
                              int64_t n) {
    printf("%s.%s %g %lld", what, dtype, tolerance, static_cast<long long>(status));
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += fabs(to_double(x[i]));
    for (int64_t i = 0; i < n; i += n / 16 + 1) printf(" %.17g", to_double(x[i]));
    printf(" %.17g\n", sum / static_cast<double>(n));
}

constexpr int64_t ITEMS = 2, HEADS = 4, KV_HEADS = 2, N_Q = 101, N_K = 131, D_K = 40, D_V = 24;

/// A contiguous array (ITEMS, heads, n, d).
Array array(void *data, int64_t heads, int64_t n, int64_t d) { return {data, {0, 0, 0, heads * n * d}, n * d, d, 1}; }

/// Causal attention with a window, a softcap and two query heads for each key head, and its backward.
template <class T, class Wide> void attention() {
    const int64_t size_q = ITEMS * HEADS * N_Q * D_K, size_k = ITEMS * KV_HEADS * N_K * D_K;
    const int64_t size_v = ITEMS * KV_HEADS * N_K * D_V, size_out = ITEMS * HEADS * N_Q * D_V;
    T *q = numbers<T>(size_q, 1), *k = numbers<T>(size_k, 2), *v = numbers<T>(size_v, 3), *out = numbers<T>(size_out);
    Wide *largest = numbers<Wide>(ITEMS * HEADS * N_Q), *log_total = numbers<Wide>(ITEMS * HEADS * N_Q);
    AttentionBackward call = {};
    Attention &a = call.forward;
    a.dtype = Kind<T>::code;
    a.wide_dtype = a.bias_dtype = Kind<Wide>::code;
    a.threads = 2;
    for (int64_t &length : a.batch) length = 1;
    a.batch[BATCH_AXES - 1] = ITEMS;
    a.heads = HEADS, a.kv_heads = KV_HEADS, a.n_q = N_Q, a.n_k = N_K, a.d_k = D_K, a.d_v = D_V;
    a.q = array(q, HEADS, N_Q, D_K), a.k = array(k, KV_HEADS, N_K, D_K), a.v = array(v, KV_HEADS, N_K, D_V);
    a.out = array(out, HEADS, N_Q, D_V);
    a.largest = largest, a.log_total = log_total;
    a.scale = 1.5, a.softcap = 20, a.left = 90, a.right = 0, a.keep_scale = 1;
    a.q_offset.value = N_K - N_Q, a.key_lengths.value = a.prefix.value = UNLIMITED;
    Status status = polyattn_attention_forward(&a);
    print("forward", Kind<T>::name, Kind<T>::tolerance, status, out, size_out);
    print("log_total", Kind<T>::name, Kind<Wide>::tolerance, status, log_total, ITEMS * HEADS * N_Q);

    T *dq = numbers<T>(size_q), *dk = numbers<T>(size_k), *dv = numbers<T>(size_v);
    call.dout = array(numbers<T>(size_out, 4), HEADS, N_Q, D_V);
    call.dq = array(dq, HEADS, N_Q, D_K), call.dk = array(dk, KV_HEADS, N_K, D_K);
    call.dv = array(dv, KV_HEADS, N_K, D_V);
    status = polyattn_attention_backward(&call);
    print("dq", Kind<T>::name, 2 * Kind<T>::tolerance, status, dq, size_q);
    print("dk", Kind<T>::name, 2 * Kind<T>::tolerance, status, dk, size_k);
    print("dv", Kind<T>::name, 2 * Kind<T>::tolerance, status, dv, size_v);
}

/// Activations, a norm and softmax of rows.
template <class T, class Wide> void rows() {
    constexpr int64_t ROWS = 33, N = 77;
    constexpr int GELU = 0, SILU = 2;  // and 1, GELU by tanh
    T *x = numbers<T>(ROWS * N, 5), *weight = numbers<T>(N, 6), *y = numbers<T>(ROWS * N);
    Wide *root = numbers<Wide>(ROWS), *xhat = numbers<Wide>(ROWS * N);
    for (int64_t i = 0; i < ROWS * N; i++) x[i] = from_double<T>(to_double(x[i]) * 5);
    const DType code = Kind<T>::code;
    const char *names[] = {"gelu", "gelu_tanh", "silu"};
    for (int which = GELU; which <= SILU; which++) {
        Status status = polyattn_activation(code, which, 2, ROWS, N, x, N, nullptr, 0, y);
        print(names[which], Kind<T>::name, Kind<T>::tolerance, status, y, ROWS * N);
    }
    Status status = polyattn_norm(code, 1, 2, ROWS, N, 1e-5, x, N, weight, nullptr, y, xhat, root);
    print("layer_norm", Kind<T>::name, Kind<T>::tolerance, status, y, ROWS * N);
    status = polyattn_softmax(code, 0, 2, ROWS, N, x, N, y);
    print("softmax", Kind<T>::name, Kind<T>::tolerance, status, y, ROWS * N);
}

}  // namespace

int main() {
    attention<float, float>();
    attention<double, double>();
    attention<Half, float>();
    attention<Bfloat, float>();
    rows<float, float>();
    rows<double, double>();
    rows<Half, float>();
    rows<Bfloat, float>();
    return 0;
}
