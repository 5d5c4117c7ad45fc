// Passes over one row of a tile of scores: the softmax with a running largest score, in units of log 2.
#pragma once

#include "softcap.h"

namespace forward {

/// The running sums of a row of attention: scores so far have the largest value `largest`, and sum to `total`.
template <class T> struct Running {
    T largest;  // -inf before the first score; in units of log 2
    T total;    // sum of 2^(score - largest)
};

/// The largest of `vectors` vectors of scores; NaN may be lost.
template <class T> POLYATTN_INLINE T largest_in(const T *scores, int64_t vectors) {
    Vector<T> most = load(scores), other = most;
    int64_t v = 1;
    for (; v + 2 <= vectors; v += 2) {
        most = larger(load(scores + v * LANES<T>), most);
        other = larger(load(scores + (v + 1) * LANES<T>), other);
    }
    if (v < vectors) most = larger(load(scores + v * LANES<T>), most);
    return most_of<T>(larger(most, other));
}

/// Replace scores by 2^(unit * score - largest) and return their sum.
template <class T> POLYATTN_INLINE T exponentials_in(T *scores, int64_t vectors, T unit, T largest) {
    Vector<T> base = broadcast(largest), sum{}, other{};
    int64_t v = 0;
    for (; v + 2 <= vectors; v += 2) {
        Vector<T> a = exp2_below(load(scores + v * LANES<T>) * unit - base);
        Vector<T> b = exp2_below(load(scores + (v + 1) * LANES<T>) * unit - base);
        store(scores + v * LANES<T>, a);
        store(scores + (v + 1) * LANES<T>, b);
        sum += a;
        other += b;
    }
    if (v < vectors) {
        Vector<T> a = exp2_below(load(scores + v * LANES<T>) * unit - base);
        store(scores + v * LANES<T>, a);
        sum += a;
    }
    return sum_of<T>(sum + other);
}

/// Replace the scores of a row, in units of 1 / unit > 0, by weights relative to the new largest score; return the
/// factor of the sums so far.
template <class T> POLYATTN_INLINE T advance(Running<T> *row, T *scores, int64_t vectors, T unit) {
    const T none = -T(__builtin_inf());
    T largest = largest_in(scores, vectors) * unit;
    largest = largest > row->largest ? largest : row->largest;
    T base = largest == none ? T(0) : largest;
    T sum = exponentials_in(scores, vectors, unit, base);
    T factor = largest == row->largest ? T(1) : exp2_of(row->largest - base);
    row->total = row->total * factor + sum;
    row->largest = largest;
    return factor;
}

/// scores[x] *= factor, for whole vectors.
template <class T> POLYATTN_INLINE void scale_row(T *scores, int64_t vectors, T factor) {
    for (int64_t v = 0; v < vectors; v++) store(scores + v * LANES<T>, load(scores + v * LANES<T>) * factor);
}

/// scores[x] = limit * tanh(scores[x]), for whole vectors.
template <class T> POLYATTN_INLINE void cap_row(T *scores, int64_t vectors, T limit) {
    for (int64_t v = 0; v < vectors; v++) store(scores + v * LANES<T>, limit * tanh_of<T>(load(scores + v * LANES<T>)));
}

/// Add addends to scores; -inf where the addend is -inf, whatever the score.
template <class T> POLYATTN_INLINE void add_row(T *scores, const T *addends, int64_t vectors) {
    const Vector<T> excluded = broadcast(-T(__builtin_inf()));
    for (int64_t v = 0; v < vectors; v++) {
        Vector<T> addend = load(addends + v * LANES<T>);
        Vector<T> sum = load(scores + v * LANES<T>) + addend;
        store(scores + v * LANES<T>, addend == excluded ? excluded : sum);
    }
}

/// scores[x] = -inf outside [first, stop), for x < vectors * LANES.
template <class T> POLYATTN_INLINE void exclude_outside(T *scores, int64_t first, int64_t stop, int64_t vectors) {
    const T excluded = -T(__builtin_inf());
    int64_t length = vectors * LANES<T>;
    for (int64_t x = 0; x < first && x < length; x++) scores[x] = excluded;
    for (int64_t x = stop > 0 ? stop : 0; x < length; x++) scores[x] = excluded;
}

}  // namespace forward
