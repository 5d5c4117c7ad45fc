// The steps of a chunk of the forward: scores of a few rows with a block of keys, softmax, product with the values.
#pragma once

#include "forward_chunk.h"

namespace forward {

/// scores (rows, n) of ROWS or GROUP rows from row `row`, for the n keys from panel `panel` of the block on.
template <class Element> void multiply_keys(Chunk<Element> *c, int64_t row, int64_t rows, int64_t panel, int64_t n) {
    typedef Wide<Element> T;
    int64_t d_k = c->call->a->d_k, q_step = c->call->q_step;
    for (int64_t x = 0; x < n; x += PANEL<T>) {
        const T *of_panel = panel_at(c, panel + x / PANEL<T>);
        int vectors = static_cast<int>((lesser(n - x, PANEL<T>) + LANES<T> - 1) / LANES<T>);
        for (int64_t r = 0; r < rows; r += ROWS) {
            const T *q = c->q + (row + r) * q_step;
            T *scores = c->scores + r * SCORES_ROW + x;
            if constexpr (PAIRS<Element>)
                multiply_vectors<T, ROWS, FROM_ZERO, PairProducts>(vectors, q, q_step, 1, of_panel, PANEL<T>,
                                                                   (d_k + 1) / 2, scores, SCORES_ROW, nullptr);
            else
                multiply_vectors<T, ROWS, FROM_ZERO>(vectors, q, q_step, 1, of_panel, PANEL<T>, d_k, scores, SCORES_ROW,
                                                     nullptr);
        }
    }
}

/// The sums of LANES products of q (d padded to whole vectors) with the rows at `keys`, of which `there` exist.
template <class T>
POLYATTN_INLINE Vector<T> dot_products(const T *q, const T *keys, int64_t step, int64_t there, int64_t d) {
    Vector<T> sums[LANES<T>];
    POLYATTN_UNROLL
    for (int i = 0; i < LANES<T>; i++) {  // in the order of memory, which the CPU reads ahead
        sums[i] = Vector<T>{};
        if (i >= there) continue;
        for (int64_t f = 0; f < d; f += LANES<T>) {
            sums[i] += load(q + f) * load(keys + i * step + f);
        }
    }
    return sums_of<T>(sums);
}

/// scores (rows, n) of at most FEW rows for n keys from key `key` on, row by row of the keys.
template <class Element> void multiply_few(Chunk<Element> *c, int64_t row, int64_t rows, int64_t key, int64_t n) {
    typedef Wide<Element> T;
    const Call<Element> &call = *c->call;
    Rows<Element> k = c->k;
    bool plain = k.template plain<T>() && call.q_step == call.a->d_k;
    for (int64_t x = 0; x < n; x += LANES<T>) {
        int64_t there = lesser(LANES<T>, n - x), step = k.row;
        const T *keys = reinterpret_cast<const T *>(k.at(key + x));
        if (!plain) {
            pack_rows(k, key + x, there, call.a->d_k, call.q_step, c->spare);
            keys = c->spare, step = call.q_step;
        }
        for (int64_t r = 0; r < rows; r++) {
            const T *q = c->q + (row + r) * call.q_step;
            Vector<T> scores = there == LANES<T> ? dot_products(q, keys, step, LANES<T>, call.q_step)
                                                 : dot_products(q, keys, step, there, call.q_step);
            c->k_most.add(scores);  // finite only if all keys are
            store(c->scores + r * SCORES_ROW + x, scores);
        }
    }
}

/// Softcap, bias, exclusion and softmax of one row of scores of keys [key, key + n); returns the factor of its sums.
template <class Element>
Wide<Element> weigh(Chunk<Element> *c, Row<Wide<Element>> *row, Wide<Element> *scores, int64_t key, int64_t n) {
    typedef Wide<Element> T;
    const Call<Element> &call = *c->call;
    int64_t vectors = (n + LANES<T> - 1) / LANES<T>;
    if (call.of_q * call.unit != call.factor) scale_row(scores, vectors, call.factor);
    if (call.softcap != 0) cap_row(scores, vectors, call.softcap);
    const Pairs<T> &pairs = c->heads[row->head].pairs;
    if (call.has_addends) {
        addends_of(pairs, row->query, key, n, call.log2e, c->spare);
        for (int64_t x = n; x < vectors * LANES<T>; x++) c->spare[x] = 0;
        add_row(scores, c->spare, vectors);
    }
    if (row->keys.first > key || row->keys.stop < key + vectors * LANES<T>)
        exclude_outside(scores, row->keys.first - key, row->keys.stop - key, vectors);
    T factor = advance(&row->sums, scores, vectors, call.unit);
    if (pairs.drop_below) {
        keeps_of(pairs, row->query, key, n, c->spare);
        for (int64_t x = 0; x < n; x++) scores[x] = c->spare[x] != 0 ? scores[x] * c->spare[x] : 0;
    }
    return factor;
}

/// multiply_tile for `rows` rows of weights, 1 to R.
template <class T, int R>
void multiply_values(int64_t rows, int64_t vectors, const T *weights, const T *values, int64_t step, int64_t n, T *out,
                     int64_t out_step, const T *factors) {
    if (rows == R)
        multiply_tile<T, R, ADDED_TO_SCALED>(vectors, weights, SCORES_ROW, 1, values, step, n, out, out_step, factors);
    else if constexpr (R > 1)
        multiply_values<T, R - 1>(rows, vectors, weights, values, step, n, out, out_step, factors);
}

/// out = factors * out + weights (rows, n) times the values of n keys from key `key`, of panel `panel`, on.
template <class Element>
void add_values(Chunk<Element> *c, int64_t row, int64_t rows, int64_t key, int64_t panel, int64_t n,
                const Wide<Element> *factors) {
    typedef Wide<Element> T;
    const Call<Element> &call = *c->call;
    T *out = c->out + row * call.padded;
    const int64_t vectors = call.padded / LANES<T>, first = panel * PANEL<T>;
    if constexpr (PAIRS<Element>) {
        for (int64_t r = 0; call.pairs && r < rows; r++)
            round_row(c->scores + r * SCORES_ROW, (n + LANES<T> - 1) / LANES<T>);
        for (int64_t r = 0; call.pairs && r < rows; r += ROWS)
            multiply_tile<T, ROWS, ADDED_TO_SCALED, PairProducts>(
                vectors, c->scores + r * SCORES_ROW, SCORES_ROW, 1, c->values + first / 2 * call.padded, call.padded,
                (n + 1) / 2, out + r * call.padded, call.padded, factors + r);
        if (call.pairs) return;
    }
    const T *values =
        call.values_in_place ? reinterpret_cast<const T *>(c->v.at(key)) : c->values + first * call.padded;
    int64_t step = call.values_in_place ? c->v.row : call.padded;
    if (call.rows <= FEW)
        return multiply_values<T, FEW>(rows, vectors, c->scores, values, step, n, out, call.padded, factors);
    for (int64_t r = 0; r < rows; r += ROWS)
        multiply_rows<T, ADDED_TO_SCALED>(vectors, c->scores + r * SCORES_ROW, SCORES_ROW, 1, values, step, n,
                                          out + r * call.padded, call.padded, factors + r);
}

/// Add n keys from panel `panel` of the block at key `block` to the sums of `rows` rows from row `row` on.
template <class Element>
void add_keys(Chunk<Element> *c, int64_t row, int64_t rows, int64_t block, int64_t panel, int64_t n) {
    typedef Wide<Element> T;
    const Call<Element> &call = *c->call;
    bool few = call.rows <= FEW;
    int64_t padded_rows = few ? rows : (rows + ROWS - 1) / ROWS * ROWS, key = block + panel * PANEL<T>;
    pack_block(c, block, panel, panel + (n + PANEL<T> - 1) / PANEL<T>);
    if (few) multiply_few(c, row, rows, key, n);
    else multiply_keys(c, row, padded_rows, panel, n);
    T factors[GROUP];
    for (int64_t r = 0; r < padded_rows; r++) factors[r] = 1;
    for (int64_t r = 0; r < rows; r++) factors[r] = weigh(c, c->rows + row + r, c->scores + r * SCORES_ROW, key, n);
    add_values(c, row, padded_rows, key, panel, n, factors);
}

/// Add the keys of the block that rows [row, row + rows) may see; runs of panels that a block mask excludes are
/// skipped.
template <class Element> void add_block(Chunk<Element> *c, int64_t row, int64_t rows, int64_t block, int64_t length) {
    typedef Wide<Element> T;
    Range range = union_of(*c, row, row + rows);
    int64_t from = greater(range.first - block, 0) / PANEL<T>, stop = lesser(range.stop - block, length);
    if (!c->call->a->blocks.data) {
        if (from * PANEL<T> < stop) add_keys(c, row, rows, block, from, stop - from * PANEL<T>);
        return;
    }
    auto excluded = [&](int64_t panel) {
        int64_t key = block + panel * PANEL<T>;
        for (const Row<T> *r = c->rows + row; r < c->rows + row + rows; r++)
            if (!blocks_exclude(c->heads[r->head].pairs, r->query, r->query + 1, key,
                                lesser(key + PANEL<T>, block + stop)))
                return false;
        return true;
    };
    for (int64_t p = from; p * PANEL<T> < stop;) {
        if (excluded(p)) {
            p++;
            continue;
        }
        int64_t end = p + 1;
        while (end * PANEL<T> < stop && !excluded(end)) end++;
        add_keys(c, row, rows, block, p, lesser(end * PANEL<T>, stop) - p * PANEL<T>);
        p = end;
    }
}

}  // namespace forward
