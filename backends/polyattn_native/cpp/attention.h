// The arguments of attention and of its backward: the structures that Python fills, and their parts for one head.
#pragma once

#include "abi.h"

/// In place of a reach that has no limit, and of a key length that is not given.
constexpr int64_t UNLIMITED = int64_t(1) << 40;

/// An attention problem. H = heads, G = kv_heads; query head h uses key head h / (H / G).
struct Attention {
    int32_t dtype;              // of q, k, v and out
    int32_t threads;            // at most so many, 1 or more
    int64_t batch[BATCH_AXES];  // lengths of the batch axes, 1 where there is none
    int64_t heads, kv_heads, n_q, n_k, d_k, d_v;

    Array q, k, v;    // (batch..., H, n_q, d_k), (batch..., G, n_k, d_k), (batch..., G, n_k, d_v)
    Array out;        // (batch..., H, n_q, d_v)
    void *largest;    // (batch..., H, n_q) contiguous, float64 for float64 inputs, else float32; see RowStatistics
    void *log_total;  // the same

    double scale;
    double softcap;  // 0: none

    // A query at position i + q_offset sees the keys of positions [i + q_offset - left, i + q_offset + right].
    int64_t left, right;   // UNLIMITED: all
    Integers q_offset;     // (batch...)
    Integers key_lengths;  // (batch...), UNLIMITED if not given
    Integers prefix;       // (batch...): keys before it are seen by all queries, others up to the query's position;
                           // UNLIMITED without a prefix mask

    Array mask;                // uint8 (batch..., H, n_q, n_k), 0 where a pair is excluded
    Array q_segments;          // int64 (batch..., n_q), by row; a pair is allowed where they are equal; null: none
    Array k_segments;          // int64 (batch..., n_k), by row
    Array blocks;              // uint8 (batch..., H, blocks of queries, blocks of keys), 0 where a block is excluded
    int64_t block_q, block_k;  // the queries and keys of a block

    int32_t bias_dtype;
    int32_t wide_dtype;  // of largest, log_total, slopes, distances and sinks: FLOAT64 for float64, else FLOAT32
    Array bias;          // (batch..., H, n_q, n_k); -inf excludes a pair
    const void *slopes;  // ALiBi, (H,): the bias is -slope * |position of the key - position of the query|
    Array distances;     // (batch..., H, n_q + n_k - 1): the bias of key j and query i is at j - i + n_q - 1, by row
    const void *sinks;   // (H,): one more score of each row, without a value; null: none

    int32_t drop_below;  // a weight is kept if its 16 random bits are at least this; 0: no dropout
    uint32_t seed[2];    // low and high half
    int32_t reserved;
    double keep_scale;  // of the weights that are kept: 1 / (1 - dropout)
};

/// The backward of attention. All gradients are written, none is added to; arrays may have any strides except that no
/// two elements of a gradient share an address, apart from the broadcast axes of dbias.
struct AttentionBackward {
    Attention forward;  // its out, largest and log_total are inputs here
    Array dout;         // (batch..., H, n_q, d_v) in the dtype of q
    Array dlse;         // (batch..., H, n_q), in the wide dtype, by row; null: none
    Array dq, dk, dv;   // (batch..., H, n_q, d_k), (batch..., G, n_k, d_k), (batch..., G, n_k, d_v), dtype of q
    Array dbias;        // (batch..., H, n_q, n_k) in the wide dtype, stride 0 on broadcast axes, zeroed; null: none
    Array ddistances;   // (batch..., H, n_q + n_k - 1) in the wide dtype, contiguous per head, zeroed; null: none
    double *dsinks;     // (batch..., H) contiguous: the gradient of the sink of each entry and head; null: none
};

/// The number of batch entries.
inline int64_t items_of(const Attention &a) {
    int64_t items = 1;
    for (int axis = 0; axis < BATCH_AXES; axis++) items *= a.batch[axis];
    return items;
}

/// The distance in elements from the first batch entry to entry `item`, counted in row-major order.
inline int64_t batch_offset(const int64_t *lengths, const int64_t *strides, int64_t item) {
    int64_t offset = 0;
    for (int axis = BATCH_AXES - 1; axis >= 0; axis--) {
        if (lengths[axis] == 1) continue;  // a division costs more than all else here
        offset += item % lengths[axis] * strides[axis];
        item /= lengths[axis];
    }
    return offset;
}

/// The first element of one head of one batch entry.
template <class T> inline T *head_of(const Attention &a, const Array &x, int64_t item, int64_t head) {
    return static_cast<T *>(x.data) + batch_offset(a.batch, x.batch, item) + head * x.head;
}

/// The value of one batch entry.
inline int64_t value_of(const Attention &a, const Integers &x, int64_t item) {
    return x.data ? x.data[batch_offset(a.batch, x.batch, item)] : x.value;
}
