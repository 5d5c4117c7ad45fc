// What the two algorithms of the forward share: the numbers of a call, the start and the end of a row.
#pragma once

#include "masks.h"
#include "pairs.h"
#include "score_rows.h"
#include "threads.h"

namespace forward {

constexpr int FEW = 4;  // up to so many rows of a key head, keys are read as they are, without packing

/// The numbers of a call that do not depend on the task. All rows of the query heads of one key head are one list.
template <class Element> struct Call {
    typedef Wide<Element> T;

    const Attention *a;
    int64_t groups, rows, chunk = 0;  // query heads of a key head; their rows; rows of a task
    int64_t splits = 1;               // of the keys of a chunk, over which tasks are split too
    T *partial = nullptr;             // with splits, of each row the sums of each split: see partial_at
    int64_t q_step, padded;           // d_k and d_v, rounded up to whole vectors
    bool values_in_place;             // the values are read without a packed copy
    bool has_addends;
    bool pairs;  // the matrix products are those of pairs of bfloat16, which are not scaled before
    T factor;    // of the products: the scores are then in units of log 2, or of the softcap
    T of_q;      // of the queries, where they are multiplied before the product: the factor or 1
    T unit;      // in the exponential, where scores need no other operation: the factor or 1
    T softcap;   // in units of log 2; 0: none
    T log2e;     // of a bias
    mutable int32_t doubts = 0;

    explicit Call(const Attention &attention) : a(&attention) {
        const double log2_of_e = 1.44269504088896340736;
        groups = a->heads / a->kv_heads;
        rows = groups * a->n_q;
        q_step = (a->d_k + LANES<T> - 1) / LANES<T> * LANES<T>;
        padded = (a->d_v + LANES<T> - 1) / LANES<T> * LANES<T>;
        values_in_place = sizeof(Element) == sizeof(T) && a->v.feature == 1 && a->d_v % LANES<T> == 0;
        has_addends = pairs_of<T>(*a, 0, 0).has_addends() || a->slopes;
        factor = static_cast<T>(a->softcap != 0 ? a->scale / a->softcap : a->scale * log2_of_e);
        softcap = static_cast<T>(a->softcap * log2_of_e);
        pairs = PAIRS<Element> && rows > FEW;
        // Least rounding: in the exponential, where the product is rounded once, together with the difference.
        unit = factor > 0 && !has_addends && softcap == 0 ? factor : T(1);
        of_q = pairs || unit == factor ? T(1) : factor;
        log2e = static_cast<T>(log2_of_e);
    }

    /// The sums of one split of row `row` of a key head of the whole batch: largest, total, then out (padded).
    T *partial_at(int64_t kv_head, int64_t row, int64_t split) const {
        return partial + ((kv_head * rows + row) * splits + split) * (padded + LANES<T>);
    }

    void doubt() const { __atomic_store_n(&doubts, 1, __ATOMIC_RELAXED); }
    bool in_doubt() const { return __atomic_load_n(&doubts, __ATOMIC_RELAXED) != 0; }
};

/// The rows of one head of q, k or v.
template <class Element> inline Rows<Element> rows_of(const Attention &a, const Array &x, int64_t item, int64_t head) {
    return {head_of<Element>(a, x, item, head), x.row, x.feature};
}

/// The sums of a row before its first key: those of the sink, or none.
template <class T> inline Running<T> sink_of(const Attention &a, int64_t head) {
    if (!a.sinks) return {-T(__builtin_inf()), 0};
    T sink = static_cast<const T *>(a.sinks)[head];
    return {sink * T(1.44269504088896340736), sink == -T(__builtin_inf()) ? T(0) : T(1)};
}

/// Bounds of the range of T, far enough inside it for sums of two values and products with log2 e; and the number whose
/// last place is 32, so that its rounding error is an exponent in the range.
template <class T> struct Limits {
    static constexpr T LARGE = T(1e30), SMALL = T(1e-25), COARSE = T(1 << 28);
};
template <> struct Limits<double> {
    static constexpr double LARGE = 1e300, SMALL = 1e-250, COARSE = double(int64_t(1) << 57);
};

/// Whether no score can overflow or lose digits to underflow, and all packed queries and keys are finite.
template <class T, class C> inline bool scores_fit(const C &call, T q_most, T k_most) {
    T size = call.factor < 0 ? -call.factor : call.factor;
    T bound = q_most * k_most * static_cast<T>(call.a->d_k) * (size > 1 ? size : T(1));
    bool lossless =
        call.of_q == 1 || call.factor == 0 || q_most == 0 || q_most > Limits<T>::SMALL || k_most < 1 / Limits<T>::SMALL;
    return bound < Limits<T>::LARGE && q_most < Limits<T>::LARGE && k_most < Limits<T>::LARGE && lossless;
}

/// The two statistics of a row, of which the first is rounded, and the second makes up for it.
template <class T> inline void write_statistics(const Attention &a, int64_t index, Running<T> row) {
    const double log_of_2 = 0.693147180559945309417;
    T *largest = static_cast<T *>(a.largest) + index, *log_total = static_cast<T *>(a.log_total) + index;
    if (row.total == 0) {
        *largest = 0, *log_total = -T(__builtin_inf());
        return;
    }
    double exact = row.largest * log_of_2;
    *largest = static_cast<T>(exact);
    *log_total = static_cast<T>(log_of(static_cast<double>(row.total)) + (exact - static_cast<double>(*largest)));
}

/// Write out and the statistics of one row from its sums, which are overwritten; returns whether all are finite.
template <class Element>
inline bool finish_row(const Call<Element> &call, int64_t item, int64_t head, int64_t query, Running<Wide<Element>> row,
                       Wide<Element> *sums) {
    typedef Wide<Element> T;
    const Attention &a = *call.a;
    T inverse = row.total == 0 ? T(0) : 1 / row.total;
    Vector<T> zeros{};
    for (int64_t x = 0; x < call.padded; x += LANES<T>) {
        Vector<T> result = load(sums + x) * inverse;
        zeros += result - result;  // NaN unless finite; compilers without signed zeros take result * 0 for 0
        store(sums + x, result);
    }
    write_row(sums, a.d_v, head_of<Element>(a, a.out, item, head) + query * a.out.row, a.out.feature);
    write_statistics(a, (item * a.heads + head) * a.n_q + query, row);
    // With a unit, the largest score is rounded, but its difference from itself is not: the error is an exponent.
    const T bound = call.unit == 1 ? Limits<T>::LARGE : Limits<T>::COARSE;
    bool near = row.largest < bound && (row.largest > -bound || row.largest == -T(__builtin_inf()));
    return sum_of<T>(zeros) == 0 && row.total < Limits<T>::LARGE && near;
}

}  // namespace forward
