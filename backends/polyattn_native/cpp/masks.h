// Which pairs of a query and a key are allowed, and their bias and dropout: by position, by row, never as n x n arrays.
#pragma once

#include "attention.h"
#include "convert.h"
#include "softcap.h"

/// Keys or queries [first, stop).
struct Range {
    int64_t first, stop;
};

inline int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t greater(int64_t a, int64_t b) { return a > b ? a : b; }

/// All that excludes, biases and drops pairs of one query head at one batch entry. T is the type of the scores.
template <class T> struct Pairs {
    int64_t n_q, n_k;
    int64_t left, right, offset, length, prefix;  // as in Attention, with the values of the batch entry

    const uint8_t *mask;
    int64_t mask_row, mask_key;
    const int64_t *q_segments, *k_segments;
    int64_t q_segment_step, k_segment_step;
    const uint8_t *blocks;
    int64_t blocks_row, blocks_key, block_q, block_k;

    const char *bias;
    int32_t bias_dtype;
    int64_t bias_row, bias_key;
    T slope;  // 0 without ALiBi
    const T *distances;

    uint32_t seed[2], drop_below;
    uint32_t random_row;  // of query 0 of this head, among all rows of the problem
    T keep_scale;

    /// Whether rows need addends_of: more excludes or biases pairs than positions.
    bool has_addends() const { return mask || q_segments || blocks || bias || slope != 0 || distances; }
};

/// The pairs of query head `head` at batch entry `item`.
template <class T> inline Pairs<T> pairs_of(const Attention &a, int64_t item, int64_t head) {
    Pairs<T> p;
    p.n_q = a.n_q, p.n_k = a.n_k;
    p.left = a.left, p.right = a.right;
    p.offset = value_of(a, a.q_offset, item);
    p.length = lesser(value_of(a, a.key_lengths, item), a.n_k);
    p.prefix = value_of(a, a.prefix, item);
    p.mask = a.mask.data ? head_of<uint8_t>(a, a.mask, item, head) : nullptr;
    p.mask_row = a.mask.row, p.mask_key = a.mask.feature;
    p.q_segments = a.q_segments.data ? head_of<int64_t>(a, a.q_segments, item, 0) : nullptr;
    p.k_segments = a.k_segments.data ? head_of<int64_t>(a, a.k_segments, item, 0) : nullptr;
    p.q_segment_step = a.q_segments.row, p.k_segment_step = a.k_segments.row;
    p.blocks = a.blocks.data ? head_of<uint8_t>(a, a.blocks, item, head) : nullptr;
    p.blocks_row = a.blocks.row, p.blocks_key = a.blocks.feature, p.block_q = a.block_q, p.block_k = a.block_k;
    int64_t at_head = batch_offset(a.batch, a.bias.batch, item) + head * a.bias.head;
    p.bias = a.bias.data ? static_cast<char *>(a.bias.data) + at_head * bytes_of(a.bias_dtype) : nullptr;
    p.bias_dtype = a.bias_dtype, p.bias_row = a.bias.row, p.bias_key = a.bias.feature;
    p.slope = a.slopes ? static_cast<const T *>(a.slopes)[head] : T(0);
    p.distances = a.distances.data ? head_of<T>(a, a.distances, item, head) + a.n_q - 1 : nullptr;
    p.seed[0] = a.seed[0], p.seed[1] = a.seed[1], p.drop_below = static_cast<uint32_t>(a.drop_below);
    p.random_row = static_cast<uint32_t>((item * a.heads + head) * a.n_q);
    p.keep_scale = static_cast<T>(a.keep_scale);
    return p;
}

/// The keys that query i may see by position; others are excluded, also those of the range may be by masks.
template <class T> inline Range keys_of(const Pairs<T> &p, int64_t i) {
    int64_t position = i + p.offset;
    int64_t stop = lesser(p.length, lesser(position + p.right + 1, greater(p.prefix, position + 1)));
    int64_t first = lesser(greater(position - p.left, 0), p.n_k);
    return {first, greater(first, stop)};
}

/// The queries that may see key j by position: the reverse of keys_of.
template <class T> inline Range queries_of(const Pairs<T> &p, int64_t j) {
    if (j >= p.length) return {0, 0};
    int64_t least = j < p.prefix ? j - p.right : greater(j - p.right, j);  // positions
    int64_t first = lesser(greater(least - p.offset, 0), p.n_q);
    int64_t stop = lesser(j + p.left + 1 - p.offset, p.n_q);
    return {first, greater(first, stop)};
}

/// Whether a block mask excludes all pairs of queries [i, i_stop) and keys [j, j_stop).
template <class T> inline bool blocks_exclude(const Pairs<T> &p, int64_t i, int64_t i_stop, int64_t j, int64_t j_stop) {
    if (!p.blocks) return false;
    for (int64_t row = i / p.block_q; row * p.block_q < i_stop; row++)
        for (int64_t key = j / p.block_k; key * p.block_k < j_stop; key++)
            if (p.blocks[row * p.blocks_row + key * p.blocks_key]) return false;
    return true;
}

template <class T> constexpr T MOST_OF = T(3.40282346638528859812e38);
template <> inline constexpr double MOST_OF<double> = 1.79769313486231570815e308;

/// out[x] = bias[x * step], x < n; a finite number stays finite.
template <class T, class Element> inline void read_bias(const Element *bias, int64_t step, int64_t n, T *out) {
    if constexpr (sizeof(Wide<Element>) == sizeof(T)) return read_row(bias, step, n, out);
    for (int64_t x = 0; x < n; x++) {
        double value = widened(bias[x * step]);
        bool beyond = value < -MOST_OF<T> && value >= -MOST_OF<double>;
        out[x] = static_cast<T>(beyond ? double(-MOST_OF<T>) : value);
    }
}

/// out[x] = unit * bias of keys j + x, x < n. The product of a finite bias stays finite.
template <class T, class Element> inline void bias_row(const Element *bias, int64_t step, int64_t n, T unit, T *out) {
    const T excluded = -T(__builtin_inf());
    read_bias(bias, step, n, out);
    for (int64_t x = 0; x < n; x++) {
        T product = out[x] * unit;
        product = product < -MOST_OF<T> ? -MOST_OF<T> : product;
        out[x] = out[x] == excluded ? excluded : product;
    }
}

/// out[x] = unit * bias of the pair (i, j + x), and -inf where a mask, not position, excludes it; x < n.
template <class T> inline void addends_of(const Pairs<T> &p, int64_t i, int64_t j, int64_t n, T unit, T *out) {
    const T excluded = -T(__builtin_inf());
    if (p.bias) {
        const char *bias = p.bias + (i * p.bias_row + j * p.bias_key) * bytes_of(p.bias_dtype);
        int64_t step = p.bias_key;
        if (p.bias_dtype == FLOAT32) bias_row(reinterpret_cast<const float *>(bias), step, n, unit, out);
        else if (p.bias_dtype == FLOAT64) bias_row(reinterpret_cast<const double *>(bias), step, n, unit, out);
        else if (p.bias_dtype == FLOAT16) bias_row(reinterpret_cast<const Half *>(bias), step, n, unit, out);
        else bias_row(reinterpret_cast<const Bfloat *>(bias), step, n, unit, out);
    } else if (p.distances) {
        for (int64_t x = 0; x < n; x++) out[x] = p.distances[j + x - i] * unit;
    } else if (p.slope != 0) {
        T slope = p.slope * unit, ahead = static_cast<T>(j - i - p.offset);
        for (int64_t x = 0; x < n; x++) {
            T distance = ahead + static_cast<T>(static_cast<int32_t>(x));
            out[x] = -slope * (distance < 0 ? -distance : distance);
        }
    } else {
        for (int64_t x = 0; x < n; x++) out[x] = 0;
    }
    if (p.mask) {
        const uint8_t *mask = p.mask + i * p.mask_row + j * p.mask_key;
        if (p.mask_key == 1)
            for (int64_t x = 0; x < n; x++) out[x] = mask[x] ? out[x] : excluded;
        else
            for (int64_t x = 0; x < n; x++) out[x] = mask[x * p.mask_key] ? out[x] : excluded;
    }
    if (p.q_segments) {
        int64_t segment = p.q_segments[i * p.q_segment_step];
        const int64_t *keys = p.k_segments + j * p.k_segment_step;
        for (int64_t x = 0; x < n; x++) out[x] = keys[x * p.k_segment_step] == segment ? out[x] : excluded;
    }
    if (p.blocks) {
        const uint8_t *row = p.blocks + i / p.block_q * p.blocks_row;
        for (int64_t x = 0; x < n;) {
            int64_t block = (j + x) / p.block_k, stop = lesser((block + 1) * p.block_k - j, n);
            bool there = row[block * p.blocks_key];
            for (; x < stop; x++) out[x] = there ? out[x] : excluded;
        }
    }
}

// ---- dropout --------------------------------------------------------------------------------------------------------

/// The two words of Threefry-2x32 with 13 rounds at counters (x0, x1[b]), b < N, in place of x1 and in x0_out.
template <int N> inline void threefry(const uint32_t *seed, uint32_t *x0, uint32_t *x1) {
    constexpr int ROTATIONS[8] = {13, 15, 26, 6, 17, 29, 16, 24};
    const uint32_t keys[3] = {seed[0], seed[1], seed[0] ^ seed[1] ^ 0x1BD11BDAu};
    for (int b = 0; b < N; b++) x0[b] += keys[0], x1[b] += keys[1];
    for (int round = 0; round < 13; round++) {
        int turn = ROTATIONS[round % 8];
        for (int b = 0; b < N; b++) {
            x0[b] += x1[b];
            x1[b] = (x1[b] << turn | x1[b] >> (32 - turn)) ^ x0[b];
        }
        if (round % 4 == 3) {
            uint32_t step = round / 4 + 1;
            for (int b = 0; b < N; b++) x0[b] += keys[step % 3], x1[b] += keys[(step + 1) % 3] + step;
        }
    }
}

/// out[x] = keep_scale where dropout keeps the weight of the pair (i, j + x), else 0; x < n.
template <class T> inline void keeps_of(const Pairs<T> &p, int64_t i, int64_t j, int64_t n, T *out) {
    constexpr int N = 32;  // counters at a time, of four keys each
    uint32_t x0[N], x1[N];
    const uint32_t least = p.drop_below;
    const T scale = p.keep_scale;
    for (int64_t counter = j / 4; counter * 4 < j + n; counter += N) {
        for (int b = 0; b < N; b++) {
            x0[b] = p.random_row + static_cast<uint32_t>(i);
            x1[b] = static_cast<uint32_t>(counter + b);
        }
        threefry<N>(p.seed, x0, x1);
        uint32_t words[2 * N];
        for (int b = 0; b < N; b++) words[2 * b] = x0[b], words[2 * b + 1] = x1[b];
        uint16_t lanes[4 * N];  // of four adjacent keys, the low half of a word before the high one
        memcpy(lanes, words, sizeof lanes);
        T kept[4 * N];
        for (int b = 0; b < 4 * N; b++) kept[b] = lanes[b] >= least ? scale : T(0);
        int64_t from = greater(j, counter * 4), to = lesser(j + n, (counter + N) * 4);
        for (int64_t key = from; key < to; key++) out[key - j] = kept[key - counter * 4];
    }
}
