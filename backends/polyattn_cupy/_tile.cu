// The operations on a tile of scores between two matrix products. NVRTC compiles them at first use for three types:
// T of scores and sums, W of inputs and weights, B of the bias.
// A tile has rows (batch * kv_heads, groups * n_q), each one query of one head; a block processes one row.

#if HALF
#include <cuda_fp16.h>
#endif

using T = SCORE;
using W = WEIGHT;
using B = BIAS;

#define INF T(1e300 * 1e300)  // NVRTC has no INFINITY

// Filled from Python: every member has eight bytes. A null pointer is an absent argument; strides count elements.
struct Tile {
    long long kv_heads, groups, n_q, n_k;      // lengths of this tile's axes
    long long batch, query, key;               // start of this tile
    long long all_q, all_k;                    // the queries and keys of the whole problem
    long long offset, left, right, length;     // static positions
    const long long *offsets, *lengths;        // (B): replace the static ones
    const long long *q_segments, *k_segments;  // (B, all_q), (B, all_k)
    const bool* mask;
    long long mask_batch, mask_head, mask_query, mask_key;
    const B* bias;
    long long bias_batch, bias_head, bias_query, bias_key;
    double scale, softcap;                     // softcap 0: none
    long long plain;                           // no segments, mask, bias or softcap
};

// A row attends to the keys in [first, last) of its segment where the mask is true and the bias is not -inf.
struct Row {
    int first, last;
    long long segment;
    const long long* segments;
    const bool* mask;
    const B* bias;
    T one, other;  // powers of two: the products of this row are divided by both
};

__device__ int within(const Tile& t, long long key) {
    return key < t.key ? 0 : key - t.key > t.n_k ? t.n_k : key - t.key;
}

__device__ Row row_of(const Tile& t, long long index, const T* units = nullptr) {
    long long matrix = index / (t.groups * t.n_q), group = index / t.n_q % t.groups, query = t.query + index % t.n_q;
    long long batch = t.batch + matrix / t.kv_heads, head = matrix % t.kv_heads * t.groups + group;
    long long position = (t.offsets ? t.offsets[batch] : t.offset) + query;
    long long length = t.lengths ? t.lengths[batch] : t.length, stop = position + t.right + 1;
    Row row = {within(t, position - t.left), within(t, stop < length ? stop : length), 0, 0, 0, 0, 1, 1};
    if (units) row.one = units[2 * index], row.other = units[2 * index + 1];
    if (t.q_segments) {
        row.segment = t.q_segments[batch * t.all_q + query];
        row.segments = t.k_segments + batch * t.all_k + t.key;
    }
    if (t.mask)
        row.mask = t.mask + batch * t.mask_batch + head * t.mask_head + query * t.mask_query + t.key * t.mask_key;
    if (t.bias)
        row.bias = t.bias + batch * t.bias_batch + head * t.bias_head + query * t.bias_query + t.key * t.bias_key;
    return row;
}

template <bool plain> __device__ bool allowed(const Tile& t, const Row& row, int key) {
    if (key < row.first || key >= row.last) return false;
    return plain || ((!row.segments || row.segments[key] == row.segment) && (!row.mask || row.mask[key * t.mask_key])
        && (!row.bias || T(row.bias[key * t.bias_key]) != -INF));
}

// Scores, the largest score and the bias are divided by the units of their row, unless a softcap bounds them.
template <bool plain> __device__ T in_full(const Tile& t, const Row& row, T x) {
    return plain || !t.softcap ? x * row.one * row.other : x;
}

template <bool plain> __device__ T capped(const Tile& t, const Row& row, T product) {
    T score = product * T(t.scale);
    return plain || !t.softcap ? score : tanh(score * row.one * row.other / T(t.softcap)) * T(t.softcap);
}

template <bool plain> __device__ T biased(const Tile& t, const Row& row, int key, T score) {
    if (plain || !row.bias) return score;
    T bias = T(row.bias[key * t.bias_key]);
    return score + (t.softcap ? bias : bias / row.one / row.other);
}

struct Larger {
    __device__ T operator()(T a, T b) const { return a > b || a != a ? a : b; }  // NaN is the largest
};

struct Sum {
    __device__ T operator()(T a, T b) const { return a + b; }
};

// Reduce x over the threads of a block of full warps; every thread gets the result.
template <class Join> __device__ T over_block(T x, Join join) {
    __shared__ T warps[32];
    for (int distance = 16; distance; distance /= 2) x = join(x, __shfl_xor_sync(0xffffffff, x, distance));
    __syncthreads();  // all threads have read the results of the previous call
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
    __syncthreads();
    x = warps[0];
    for (int warp = 1; warp < blockDim.x / 32; warp++) x = join(x, warps[warp]);
    return x;
}

// weights = exp(score - largest) * factor_of_weights, exactly 0 where excluded; total (rows) and out (rows, d) are
// rescaled to the new largest score. weights and products may share memory.
template <bool plain> __forceinline__ __device__ void exponentials_of_row(
    const T* products, W* weights, T* total, T* largest, T* out, int d, T factor_of_weights, const Tile& t,
    const Row& row
) {
    T before = *largest, top = before, sum = 0;
    for (int key = row.first + threadIdx.x; key < row.last; key += blockDim.x)
        if (allowed<plain>(t, row, key))
            top = Larger()(top, biased<plain>(t, row, key, capped<plain>(t, row, products[key])));
    top = over_block(top, Larger());
    for (int key = threadIdx.x; key < t.n_k; key += blockDim.x) {
        T weight = 0;
        if (allowed<plain>(t, row, key))  // NaN, as defined, where all scores so far are -inf
            weight = exp(in_full<plain>(t, row, biased<plain>(t, row, key, capped<plain>(t, row, products[key])) - top));
        weights[key] = W(weight * factor_of_weights);
        sum += weight;
    }
    sum = over_block(sum, Sum());
    // Scores of -inf alone made total and out NaN; once there is a larger score, their weights are 0.
    bool forget = before == -INF && top != -INF;
    T factor = top == before ? T(1) : exp(in_full<plain>(t, row, before - top));
    for (int c = threadIdx.x; c < d && factor != T(1); c += blockDim.x) out[c] = forget ? T(0) : out[c] * factor;
    if (threadIdx.x == 0) {
        *total = (forget ? T(0) : *total * factor) + sum;
        *largest = top;
    }
}

extern "C" __global__ void exponentials(
    const T* products, W* weights, T* total, T* largest, T* out, const T* units, long long d, double factor, Tile t
) {
    long long index = blockIdx.x, at = index * t.n_k;
    Row row = row_of(t, index, units);
    products += at, weights += at, total += index, largest += index, out += index * d;
    if (t.plain)
        exponentials_of_row<true>(products, weights, total, largest, out, d, T(factor), t, row);
    else
        exponentials_of_row<false>(products, weights, total, largest, out, d, T(factor), t, row);
}

// weights = exp(score - largest - log_total); dscores = weights * (dweights + shift) * slope of the softcap.
// With a bias, raw is dscores without the slope. weights and products may share memory, as may dscores and dweights.
template <bool plain> __forceinline__ __device__ void gradients_of_row(
    const T* products, const T* dweights, W* weights, W* dscores, T* raw, T largest, T log_total, T shift,
    const Tile& t, const Row& row
) {
    for (int key = threadIdx.x; key < t.n_k; key += blockDim.x) {
        T weight = 0, dscore = 0, slope = 1, dweight = dweights[key];
        if (allowed<plain>(t, row, key)) {
            T score = capped<plain>(t, row, products[key]), tangent = plain || !t.softcap ? T(0) : score / T(t.softcap);
            slope = 1 - tangent * tangent;
            weight = exp(in_full<plain>(t, row, biased<plain>(t, row, key, score) - largest) - log_total);
            dscore = weight * (dweight + shift);
        }
        if (!plain && t.bias) raw[key] = dscore;
        weights[key] = W(weight);
        dscores[key] = W(dscore * slope);
    }
}

extern "C" __global__ void gradients(
    const T* products, const T* dweights, W* weights, W* dscores, T* raw, const T* largest, const T* log_total,
    const T* shift, const T* units, Tile t
) {
    long long index = blockIdx.x, at = index * t.n_k;
    Row row = row_of(t, index, units);
    T top = largest[index], log = log_total[index], back = shift[index];
    products += at, dweights += at, weights += at, dscores += at, raw += at;
    if (t.plain)
        gradients_of_row<true>(products, dweights, weights, dscores, raw, top, log, back, t, row);
    else
        gradients_of_row<false>(products, dweights, weights, dscores, raw, top, log, back, t, row);
}

// Add the entries of x that are not finite to a product of tile and x that omitted them, for allowed pairs only.
// out (N, queries or keys, d) += tile (N, queries, keys) or its transpose @ x. odd marks the rows of x with such an
// entry; some is whether any row has one. Steps are the strides between matrices.
extern "C" __global__ void put_back(
    const W* tile, const W* x, const bool* odd, const bool* some, T* out, long long x_step, long long odd_step,
    long long out_step, long long d, long long transposed, Tile t
) {
    if (!*some) return;
    long long rows = t.groups * t.n_q, into = transposed ? t.n_k : rows, over = transposed ? rows : t.n_k;
    long long matrix = blockIdx.x / into, to = blockIdx.x % into;
    for (long long from = 0; from < over; from++) {
        if (!odd[matrix * odd_step + from]) continue;
        long long index = matrix * rows + (transposed ? from : to), key = transposed ? to : from;
        if (!allowed<false>(t, row_of(t, index), key)) continue;
        for (long long c = threadIdx.x; c < d; c += blockDim.x) {
            T value = T(x[matrix * x_step + from * d + c]);
            if (!isfinite(value)) out[matrix * out_step + to * d + c] += T(tile[index * t.n_k + key]) * value;
        }
    }
}
