// The backward of a strip of a tile: the scores of some keys and STRIP queries, and what follows from them.
#pragma once

#include "backward_head.h"
#include "softcap.h"

namespace gradients {

// ---- weights --------------------------------------------------------------------------------------------------------

/// The scores of a vector of queries in units of log 2: softcapped, with addends. tangent is set with a softcap.
/// The factor is not in the operands: here it is one instruction, and one rounding, with the difference that follows.
template <class T, bool CAPPED, bool ADDED>
POLYATTN_INLINE Vector<T> score_of(const KeyRow<T> &row, int64_t i, Vector<T> *tangent) {
    Vector<T> score = load(row.weights + i) * row.factor;
    if (CAPPED) {
        *tangent = tanh_of<T>(score);
        score = *tangent * row.softcap;
    }
    return ADDED ? score + load(row.added + i) : score;
}

/// Zeros where the addend says that the pair is excluded, also in place of NaN.
template <class T, bool ADDED> POLYATTN_INLINE Vector<T> unless_excluded(const KeyRow<T> &row, int64_t i, Vector<T> x) {
    return ADDED ? (load(row.added + i) == -T(__builtin_inf()) ? Vector<T>{} : x) : x;
}

/// weights: scores -> weights after dropout; dscores: dweights -> weights * (dweights + shift); queries [from, to).
template <class T, bool CAPPED, bool ADDED, bool DROPPED>
inline void weigh(const KeyRow<T> &row, int64_t from, int64_t to) {
    for (int64_t i = from; i < to; i += LANES<T>) {
        Vector<T> tangent{}, score = score_of<T, CAPPED, ADDED>(row, i, &tangent);
        Vector<T> weight = exp2_of((score - load(row.high + i)) - load(row.low + i));
        Vector<T> dweight = load(row.dscores + i), kept = weight;
        if (DROPPED) {
            dweight *= load(row.kept + i);
            kept *= load(row.kept + i);
        }
        if (CAPPED) store(row.tangents + i, tangent);
        store(row.weights + i, unless_excluded<T, ADDED>(row, i, kept));
        store(row.dscores + i, unless_excluded<T, ADDED>(row, i, weight * (dweight + load(row.shift + i))));
    }
}

/// The functions above by the options of a head: softcap, addends, dropout.
template <class T> inline void weigh(const Head<T> &h, const KeyRow<T> &row, int64_t from, int64_t to) {
    typedef void (*Weigh)(const KeyRow<T> &, int64_t, int64_t);
    constexpr Weigh OPTIONS[2][2][2] = {
        {{weigh<T, false, false, false>, weigh<T, false, false, true>},
         {weigh<T, false, true, false>, weigh<T, false, true, true>}},
        {{weigh<T, true, false, false>, weigh<T, true, false, true>},
         {weigh<T, true, true, false>, weigh<T, true, true, true>}},
    };
    OPTIONS[h.softcap != 0][h.addends][h.pairs.drop_below != 0](row, from, to);
}

// ---- products -------------------------------------------------------------------------------------------------------

/// The products of ROWS keys and a panel of queries over `depth` features.
template <class Add, Start START, int64_t STEP, class T>
inline void multiply_group(int vectors, const T *of_keys, int64_t step, const T *panel, int64_t depth, T *out) {
    multiply_vectors<T, ROWS, START, Add>(vectors, of_keys, step, 1, panel, PANEL<T>, depth, out, STEP, nullptr);
}

/// out[key][query] = sum over the features, or their pairs, of the rows of keys times the panels of queries.
template <class Add, int64_t STEP, class T> inline void products(const Strip &s, const Operands<T> &x, T *out) {
    const int64_t step = x.keys.step;
    for (int64_t c = 0; c < x.depth; c += DEPTH) {
        int64_t depth = lesser(DEPTH, x.depth - c);
        for (int64_t i = 0; i < s.queries; i += PANEL<T>) {
            const T *panel = x.panels + (s.query + i) * step + c * PANEL<T>;
            for (int64_t group = 0; group < s.keys; group += ROWS) {
                const Seen &seen = s.of(group);
                if (seen.from > i || seen.to <= i) continue;
                int vectors = static_cast<int>(lesser(seen.to - i, PANEL<T>) / LANES<T>);
                const T *of_keys = x.keys.row(s.key + group) + c;
                auto multiply = c == 0 ? multiply_group<Add, FROM_ZERO, STEP, T> : multiply_group<Add, FROM_C, STEP, T>;
                multiply(vectors, of_keys, step, panel, depth, out + group * STEP + i);
            }
        }
    }
}

/// The scores of a strip in weights, without softcap and addends, and its dweights in dscores.
template <class Add, class T> inline void products_of_strip(const Head<T> &h, const Strip &s) {
    products<Add, STRIP>(s, h.scores, h.weights);
    products<Add, QUERIES>(s, h.dweights, h.dscores + s.column);
}

/// to[key][c] += sum over the queries of a strip of by_key[key][query] * rows[query][c].
template <class T, int64_t STEP>
inline void add_products(const Strip &s, const T *by_key, const Matrix<T> &rows, int64_t wide, T *to) {
    for (int64_t c = 0; c < wide; c += PANEL<T>) {
        int vectors = static_cast<int>(lesser(PANEL<T>, wide - c) / LANES<T>);
        for (int64_t group = 0; group < s.keys; group += ROWS) {
            const Seen &seen = s.of(group);
            multiply_vectors<T, ROWS, ADDED_TO_C>(vectors, by_key + group * STEP + seen.first, STEP, 1,
                                                  rows.row(s.query + seen.first) + c, rows.step,
                                                  seen.stop - seen.first, to + (s.key + group) * wide + c, wide,
                                                  nullptr);
        }
    }
}

/// Zero the weights and dscores of a group of ROWS keys where queries do not see them by position.
template <class T> inline void zero_unseen(const Head<T> &h, const Strip &s, int64_t group) {
    for (int64_t key = group; key < group + ROWS; key++) {
        Range seen = queries_of(h.pairs, h.first_key + s.key + key);
        KeyRow<T> row = row_of_key(h, s, key);
        for (int64_t i = 0; i < STRIP; i++)
            if (s.query + i < seen.first || s.query + i >= seen.stop) row.weights[i] = row.dscores[i] = 0;
    }
}

/// dbias[query][key] += dscores[key][query] of a strip, in squares of LANES if the keys of dbias are contiguous.
template <class T> inline void add_bias(const Head<T> &h, const Strip &s) {
    constexpr int64_t N = LANES<T>;
    T *dbias = h.dbias + s.query * h.dbias_row + (h.first_key + s.key) * h.dbias_key;
    const T *dscores = h.dscores + s.column;
    for (int64_t i = 0; i < s.queries; i += N) {
        for (int64_t j = 0; j < s.keys; j += N) {
            if (h.dbias_key == 1 && i + N <= s.queries && j + N <= s.keys) {
                Vector<T> square[N];
                for (int64_t x = 0; x < N; x++) square[x] = load(dscores + (j + x) * QUERIES + i);
                transpose<T>(square);
                for (int64_t x = 0; x < N; x++) {
                    T *to = dbias + (i + x) * h.dbias_row + j;
                    store(to, load(to) + square[x]);
                }
                continue;
            }
            for (int64_t x = i; x < lesser(i + N, s.queries); x++)
                for (int64_t y = j; y < lesser(j + N, s.keys); y++)
                    dbias[x * h.dbias_row + y * h.dbias_key] += dscores[y * QUERIES + x];
        }
    }
}

/// Add the dscores of a strip to the gradients of the distances.
template <class T> inline void add_distances(const Head<T> &h, const Strip &s) {
    for (int64_t j = 0; j < s.keys; j++) {
        T *to = h.ddistances + h.first_key + s.key + j - s.query;
        const T *dscores = h.dscores + j * QUERIES + s.column;
        for (int64_t i = 0; i < s.queries; i++) to[-i] += dscores[i];
    }
}

/// dscores *= 1 - tangent^2, the derivative of the softcap, where a pair is not excluded.
template <class T> inline void through_softcap(const KeyRow<T> &row, const Seen &seen) {
    for (int64_t i = seen.from; i < seen.to; i += LANES<T>) {
        Vector<T> tangent = load(row.tangents + i), dscore = load(row.dscores + i);
        store(row.dscores + i, dscore == T(0) ? dscore : dscore * (T(1) - tangent * tangent));
    }
}

/// The weights and dscores of a strip from its scores and dweights.
template <class T> inline void weigh_strip(const Head<T> &h, const Strip &s) {
    for (int64_t group = 0; group < s.keys; group += ROWS) {
        const Seen &seen = s.of(group);
        for (int64_t r = 0; r < ROWS; r++) weigh(h, row_of_key(h, s, group + r), seen.from, seen.to);
        if (!seen.whole) zero_unseen(h, s, group);
    }
    if (h.dbias) add_bias(h, s);
    if (h.ddistances) add_distances(h, s);
    if (h.softcap == 0) return;
    for (int64_t group = 0; group < s.keys; group += ROWS)
        for (int64_t r = 0; r < ROWS; r++) through_softcap(row_of_key(h, s, group + r), s.of(group));
}

/// The dscores of a strip, and from them and its weights its parts of dv and dk.
template <class Add, class T> inline void gradients_of_strip(const Head<T> &h, const Strip &s) {
    products_of_strip<Add>(h, s);
    weigh_strip(h, s);
    add_products<T, STRIP>(s, h.weights, h.dout, h.wide_v, h.dv);
    add_products<T, QUERIES>(s, h.dscores + s.column, h.q, h.wide_k, h.dk);
}

}  // namespace gradients
