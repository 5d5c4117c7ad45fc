// The row statistics of one head for the backward, and the gradients that are written row by row.
#pragma once

#include "backward_pack.h"

namespace gradients {

/// Up to this size, the rounding of two computations of a score changes a weight by less than 1e-6 of itself.
constexpr double LARGE = 32;

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
    constexpr T FAR = T(1e30);
    for (int64_t i = h->pairs.n_q; i < rounded_up(h->pairs.n_q, PANEL<T>); i++)
        h->high[i] = FAR, h->low[i] = 0, h->shift[i] = 0;
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
        moderate &= largest[i] <= T(LARGE) && largest[i] >= -T(LARGE);
        read_row(out + i * a.out.row, a.out.feature, h->d_v, of_out);
        read_row(dout + i * call.dout.row, call.dout.feature, h->d_v, of_dout);
        Vector<T> sums{};
        for (int64_t c = 0; c < h->wide_v; c += LANES<T>) sums += load(of_out + c) * load(of_dout + c);
        h->shift[i] = empty ? T(0) : (dlse ? dlse[i * call.dlse.row] : T(0)) - sum_of<T>(sums);
    }
    end_statistics(h);
    return moderate;
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
