// The row statistics of one head for the backward, and the gradients that are written row by row.
#pragma once

#include "backward_pack.h"

namespace gradients {

/// Two limits of the size of scores.
enum Size { LARGE, OVERFLOWING };

/// Up to LARGE, the rounding of two computations of a score changes a weight by less than 1e-6 of itself. From
/// OVERFLOWING on, a score or a difference of two might not be finite.
template <class T> constexpr T limit_of(Size size) {
    return size == LARGE ? T(32) : sizeof(T) == 4 ? T(1e30) : T(1e270);
}

/// Set high + low = log2 of the sum of exponentials of a row; 0 in an empty row.
inline void set_log2(float largest, float log_total, float *high, float *low) {
    double sum = (double(largest) + double(log_total)) * LOG2_E;
    *high = static_cast<float>(sum);
    *low = static_cast<float>(sum - double(*high));
}
inline void set_log2(double largest, double log_total, double *high, double *low) {
    constexpr double LOG2_E_LOW = 2.0355273740931033e-17;
    *high = largest * LOG2_E;
    *low = __builtin_fma(largest, LOG2_E, -*high) + largest * LOG2_E_LOW + log_total * LOG2_E;
}

/// The rows after the last query have no weights.
template <class T> inline void end_statistics(Head<T> *h) {
    for (int64_t i = h->pairs.n_q; i < rounded_up(h->pairs.n_q, PANEL<T>); i++)
        h->high[i] = limit_of<T>(OVERFLOWING), h->low[i] = 0, h->shift[i] = 0;
}

/// Set high, low and shift from the forward's statistics and out; return false if scores are large.
template <class Element>
inline bool row_statistics(const AttentionBackward &call, int64_t item, int64_t head, Head<Wide<Element>> *h) {
    typedef Wide<Element> T;
    const Attention &a = call.forward;
    const Element *out = head_of<Element>(a, a.out, item, head), *dout = head_of<Element>(a, call.dout, item, head);
    T *of_out = h->spare, *of_dout = h->spare + h->wide_v;
    const T *dlse = call.dlse.data ? head_of<T>(a, call.dlse, item, head) : nullptr;
    const T *largest = static_cast<const T *>(a.largest) + (item * a.heads + head) * a.n_q;
    const T *log_total = static_cast<const T *>(a.log_total) + (item * a.heads + head) * a.n_q;
    for (int64_t c = h->d_v; c < h->wide_v; c++) of_out[c] = of_dout[c] = 0;
    bool moderate = true;
    for (int64_t i = 0; i < a.n_q; i++) {
        bool empty = log_total[i] == -T(__builtin_inf());
        set_log2(largest[i], empty ? T(0) : log_total[i], h->high + i, h->low + i);
        moderate &= largest[i] <= limit_of<T>(LARGE) && largest[i] >= -limit_of<T>(LARGE);
        read_row(out + i * a.out.row, a.out.feature, h->d_v, of_out);
        read_row(dout + i * call.dout.row, call.dout.feature, h->d_v, of_dout);
        Vector<T> sums{};
        for (int64_t c = 0; c < h->wide_v; c += LANES<T>) sums += load(of_out + c) * load(of_dout + c);
        h->shift[i] = empty ? T(0) : (dlse ? dlse[i * call.dlse.row] : T(0)) - sum_of<T>(sums);
    }
    end_statistics(h);
    return moderate;
}

/// The scores of a key of a strip in units of log 2, -inf where excluded, in place of the products of q and k.
template <class T> inline void finish_scores(const Head<T> &h, const Strip &s, int64_t key, const Seen &seen) {
    const T excluded = -T(__builtin_inf());
    KeyRow<T> row = row_of_key(h, s, key);
    Range of_key = key < s.keys ? queries_of(h.pairs, h.first_key + s.key + key) : Range{0, 0};
    for (int64_t i = seen.from; i < seen.to; i += LANES<T>) {
        Vector<T> tangent, score = h.softcap != 0 ? score_of<T, true, false>(row, i, &tangent)
                                                   : score_of<T, false, false>(row, i, &tangent);
        if (h.addends) {
            Vector<T> addend = load(row.added + i);
            score = addend == excluded ? addend : score + addend;
        }
        store(row.weights + i, score);
    }
    for (int64_t i = seen.from; i < seen.to; i++)
        if (s.query + i < of_key.first || s.query + i >= of_key.stop) row.weights[i] = excluded;
}

/// Merge the scores and dweights of a group of keys into high (the largest), low (the sum) and shift (the sum of
/// weight * dweight) of the queries that see it.
template <class T> inline void merge_group(const Head<T> &h, const Strip &s, int64_t group) {
    const T excluded = -T(__builtin_inf());
    for (int64_t i = s.of(group).from; i < s.of(group).to; i += LANES<T>) {
        T *high = h.high + s.query + i, *low = h.low + s.query + i, *mean = h.shift + s.query + i;
        Vector<T> before = load(high), most = before;
        for (int64_t r = 0; r < ROWS; r++) most = maximum(most, load(h.weights + (group + r) * STRIP + i));
        Vector<T> base = most == excluded ? Vector<T>{} : most, factor = exp2_of(before - base);
        Vector<T> total = load(low) * factor, products = load(mean) * factor;
        for (int64_t r = 0; r < ROWS; r++) {
            KeyRow<T> row = row_of_key(h, s, group + r);
            Vector<T> weight = exp2_of(load(row.weights + i) - base), dweight = load(row.dscores + i);
            if (h.pairs.drop_below) dweight *= load(row.kept + i);
            total += weight;
            products += weight == T(0) ? Vector<T>{} : weight * dweight;
        }
        store(high, most), store(low, total), store(mean, products);
    }
}

/// Merge the scores and dweights of a strip.
template <class T> inline void merge_strip(const Head<T> &h, const Strip &s) {
    products_of_strip(h, s);
    for (int64_t group = 0; group < s.keys; group += ROWS) {
        for (int64_t r = 0; r < ROWS; r++) finish_scores(h, s, group + r, s.of(group));
        merge_group(h, s, group);
    }
}

/// Set high, low and shift from the scores of all keys of the task, for scores so large that those of another
/// computation do not fit: two computations of a score round differently, and exp makes that a factor.
template <class Element>
inline void own_statistics(const AttentionBackward &call, int64_t item, int64_t head, Head<Wide<Element>> *h) {
    typedef Wide<Element> T;
    const Attention &a = call.forward;
    const T *dlse = call.dlse.data ? head_of<T>(a, call.dlse, item, head) : nullptr;
    T sink = a.sinks ? static_cast<const T *>(a.sinks)[head] * T(LOG2_E) : -T(__builtin_inf());
    for (int64_t i = 0; i < rounded_up(a.n_q, PANEL<T>); i++)
        h->high[i] = sink, h->low[i] = sink == -T(__builtin_inf()) ? 0 : 1, h->shift[i] = 0;
    for_tiles(*h, [&](const Tile &t) {
        for (int64_t i = 0; i < t.queries; i += STRIP) merge_strip(*h, strip_of(*h, t, i));
    });
    for (int64_t i = 0; i < a.n_q; i++) {
        bool empty = h->high[i] == -T(__builtin_inf());
        T mean = empty ? T(0) : h->shift[i] / h->low[i];
        h->shift[i] = (dlse && !empty ? dlse[i * call.dlse.row] : T(0)) - mean;
        h->high[i] = empty ? T(0) : h->high[i];
        h->low[i] = empty ? T(0) : static_cast<T>(log_of(double(h->low[i])) * LOG2_E);
    }
    end_statistics(h);
}

/// The gradient of a sink: sum over the rows of weight of the sink * shift.
template <class T> inline double sink_gradient(const Head<T> &h, T sink) {
    double total = 0;
    for (int64_t i = 0; i < h.pairs.n_q; i++)
        total += double(exp2_of((T(sink * LOG2_E) - h.high[i]) - h.low[i])) * double(h.shift[i]);
    return total;
}

// ---- results --------------------------------------------------------------------------------------------------------

/// Write scale * rows (n, d) to a head of an array; return whether all numbers are finite.
template <class Element, class T>
inline bool write_rows(T *rows, int64_t wide, int64_t n, int64_t d, T scale, Element *to, const Array &x) {
    Vector<T> zeros{};
    for (int64_t i = 0; i < n; i++) {
        T *row = rows + i * wide;
        for (int64_t c = 0; c < wide; c += LANES<T>) {
            Vector<T> scaled = load(row + c) * scale;
            store(row + c, scaled);
            zeros += scaled - scaled;
        }
        write_row(row, d, to + i * x.row, x.feature);
    }
    return sum_of<T>(zeros) == 0;
}

}  // namespace gradients
