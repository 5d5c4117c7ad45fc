// The backward of a strip of a tile: the scores of some keys and STRIP queries, and what follows from them. Strips are
// transposed, keys x queries, so that no product needs a transposed copy of the weights.
#pragma once

#include "masks.h"
#include "math.h"
#include "micro_kernel.h"
#include "pairs.h"
#include "softcap.h"

namespace gradients {

constexpr int64_t KEYS = 192;     // of a tile
constexpr int64_t QUERIES = 192;  // of a tile, the length of its rows
constexpr int64_t STRIP = 64;     // queries of a strip: its operands fit the first-level cache
constexpr int64_t DEPTH = 64;     // features of the operands of a strip that are used at a time
static_assert(KEYS % ROWS == 0 && KEYS % LANES<float> == 0 && QUERIES % ROWS == 0, "a tile is whole blocks");
static_assert(STRIP % PANEL<float> == 0 && STRIP % PANEL<double> == 0, "a strip is whole panels");
static_assert(QUERIES % STRIP == 0, "a tile is whole strips");

constexpr double LOG2_E = 1.44269504088896340736;

inline int64_t rounded_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

template <class A, class B> constexpr bool is_same = false;
template <class A> constexpr bool is_same<A, A> = true;

/// Rows of one operand in the type of the sums, of whole vectors.
template <class T> struct Matrix {
    const T *rows;
    int64_t step;

    const T *row(int64_t i) const { return rows + i * step; }
};

/// The operands, sums and buffers of one head. bfloat16 operands may be `paired`: an element of them stands for two
/// neighbours of the axis that is summed, as pairs.h says. d is padded to whole vectors, with zeros.
template <class T> struct Head {
    Pairs<T> pairs;
    int64_t d_k, d_v, wide_k, wide_v;
    int64_t first_key, n_k;  // of the task
    T softcap;               // in units of log 2, 0 without
    bool addends;            // whether weights have addends from pairs
    T *dbias, *ddistances;   // of this head, or null
    int64_t dbias_row, dbias_key;

    bool paired;
    int64_t depth_k, depth_v;       // d_k and d_v, or the numbers of pairs
    T factor;                       // of the scores, 1 if q_panels have it
    Matrix<T> k, v;                 // (n_k, depth_k), (n_k, depth_v)
    T *q_panels, *dout_panels;      // (panels, wide, PANEL)
    Matrix<T> k_rows, q, dout;      // (n_k, d_k), (n_q, d_k), (n_q, d_v), or half as many rows of pairs
    T *dq, *dk, *dv;                // sums, without the scale: (n_q, wide_k), (n_k, wide_k), (n_k, wide_v)
    T *high, *low, *shift;          // (n_q) of each row: log2 of its sum as two numbers, and dlse - rowsum(dout * out)
    T *weights, *dscores, *tangents;  // (KEYS, STRIP), (KEYS, QUERIES), (ROWS, STRIP)
    T *pairs_of_keys;                 // (KEYS / 2, QUERIES): dscores of two keys, if paired
    T *added, *kept;                // (KEYS, QUERIES)
    T *spare;                       // (LANES, KEYS)
};

/// Keys and queries of one tile, counted from the first of the task and of the head.
struct Tile {
    int64_t key, keys, query, queries;
};

// ---- weights --------------------------------------------------------------------------------------------------------

/// One key of a strip: pointers to its rows, and to the statistics of the queries of the strip.
template <class T> struct KeyRow {
    T *weights, *dscores, *tangents;
    const T *added, *kept, *high, *low, *shift;
    T factor, softcap;
};

/// The scores of a vector of queries in units of log 2: softcapped, with addends. tangent is set with a softcap.
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

// ---- one strip ------------------------------------------------------------------------------------------------------

/// STRIP queries of a tile, from `column` on. Of its queries, `first` to `stop` see a key of a group of ROWS keys.
struct Seen {
    int64_t first, stop, from, to;  // [from, to) is the same in whole panels and vectors
    bool whole;                     // all queries of the strip see all keys of the group
};
struct Strip : Tile {
    int64_t column;
    Seen seen[KEYS / ROWS];

    const Seen &of(int64_t group) const { return seen[group / ROWS]; }
};

template <class T> inline Seen seen_by(const Head<T> &h, const Tile &t, int64_t group) {
    int64_t key = h.first_key + t.key + group, keys = lesser(ROWS, t.keys - group);
    Seen seen = {t.queries, 0, 0, 0, true};
    for (int64_t r = 0; r < keys; r++) {
        Range of_key = queries_of(h.pairs, key + r);
        int64_t first = greater(of_key.first - t.query, 0), stop = lesser(of_key.stop - t.query, t.queries);
        seen.whole &= first == 0 && stop == t.queries;
        if (first >= stop) continue;
        seen.first = lesser(seen.first, first), seen.stop = greater(seen.stop, stop);
    }
    seen.from = seen.first / PANEL<T> * PANEL<T>, seen.to = rounded_up(seen.stop, LANES<T>);
    if (seen.first >= seen.stop) seen.from = seen.to = seen.first = seen.stop = 0;
    return seen;
}

template <class T> inline Strip strip_of(const Head<T> &h, const Tile &t, int64_t column) {
    Strip s;
    s.key = t.key, s.keys = t.keys, s.query = t.query + column, s.queries = lesser(STRIP, t.queries - column);
    s.column = column;
    for (int64_t group = 0; group < t.keys; group += ROWS) s.seen[group / ROWS] = seen_by(h, s, group);
    return s;
}

/// The rows of a key of a strip.
template <class T> inline KeyRow<T> row_of_key(const Head<T> &h, const Strip &s, int64_t key) {
    int64_t at = key * QUERIES + s.column;
    return {h.weights + key * STRIP, h.dscores + at, h.tangents + key % ROWS * STRIP, h.added + at, h.kept + at,
            h.high + s.query, h.low + s.query, h.shift + s.query, h.factor, h.softcap};
}

/// Call body(Add()), where Add is how the operands of a head are multiplied.
template <class T, class Body> inline void by_products(const Head<T> &h, Body body) {
    if constexpr (sizeof(T) == sizeof(float)) {
        if (h.paired) return body(PairProducts());
    }
    body(Products());
}

/// The products of ROWS keys and a panel of queries over `depth` features.
template <class T, class Add, Start START, int64_t STEP>
inline void multiply_group(int vectors, const T *of_keys, int64_t step, const T *panel, int64_t depth, T *out) {
    multiply_vectors<T, ROWS, START, Add>(vectors, of_keys, step, 1, panel, PANEL<T>, depth, out, STEP, nullptr);
}

/// out[key][query] = sum over the features c < d of rows[key][c] and of the panels of the queries.
template <class T, class Add, int64_t STEP>
inline void products(const Strip &s, int64_t d, const Matrix<T> &rows, const T *panels, int64_t wide, T *out) {
    for (int64_t c = 0; c < d; c += DEPTH) {
        int64_t depth = lesser(DEPTH, d - c);
        for (int64_t i = 0; i < s.queries; i += PANEL<T>) {
            const T *panel = panels + (s.query + i) * wide + c * PANEL<T>;
            for (int64_t group = 0; group < s.keys; group += ROWS) {
                const Seen &seen = s.of(group);
                if (seen.from > i || seen.to <= i) continue;
                int vectors = static_cast<int>(lesser(seen.to - i, PANEL<T>) / LANES<T>);
                const T *of_keys = rows.row(s.key + group) + c;
                auto multiply = c == 0 ? multiply_group<T, Add, FROM_ZERO, STEP> : multiply_group<T, Add, FROM_C, STEP>;
                multiply(vectors, of_keys, rows.step, panel, depth, out + group * STEP + i);
            }
        }
    }
}

/// The scores of a strip in weights, without softcap and addends, and its dweights in dscores.
template <class T> inline void products_of_strip(const Head<T> &h, const Strip &s) {
    by_products(h, [&](auto add) {
        typedef decltype(add) Add;
        products<T, Add, STRIP>(s, h.depth_k, h.k, h.q_panels, h.wide_k, h.weights);
        products<T, Add, QUERIES>(s, h.depth_v, h.v, h.dout_panels, h.wide_v, h.dscores + s.column);
    });
}

/// to[key][c] += sum over the queries of a strip of by_key[key][query] * rows[query][c].
template <class T, class Add, int64_t STEP>
inline void add_products(const Strip &s, const T *by_key, const Matrix<T> &rows, int64_t wide, T *to) {
    constexpr bool IN_PAIRS = !is_same<Add, Products>;
    for (int64_t c = 0; c < wide; c += PANEL<T>) {
        int vectors = static_cast<int>(lesser(PANEL<T>, wide - c) / LANES<T>);
        for (int64_t group = 0; group < s.keys; group += ROWS) {
            const Seen &seen = s.of(group);
            int64_t first = IN_PAIRS ? seen.first / 2 : seen.first, stop = IN_PAIRS ? (seen.stop + 1) / 2 : seen.stop;
            int64_t row = (IN_PAIRS ? s.query / 2 : s.query) + first;
            multiply_vectors<T, ROWS, ADDED_TO_C, Add>(vectors, by_key + group * STEP + first, STEP, 1,
                                                       rows.row(row) + c, rows.step, stop - first,
                                                       to + (s.key + group) * wide + c, wide, nullptr);
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

/// Add the dscores of a group of keys to the gradients of the bias and of the distances.
template <class T> inline void add_bias(const Head<T> &h, const Strip &s, int64_t group) {
    const Seen &seen = s.of(group);
    int64_t keys = lesser(s.keys - group, ROWS), key = h.first_key + s.key + group;
    const T *dscores = h.dscores + group * QUERIES + s.column;
    if (h.dbias) {
        for (int64_t i = seen.first; i < seen.stop; i++) {
            T *dbias = h.dbias + (s.query + i) * h.dbias_row + key * h.dbias_key;
            for (int64_t r = 0; r < keys; r++) dbias[r * h.dbias_key] += dscores[r * QUERIES + i];
        }
    }
    if (h.ddistances) {
        for (int64_t r = 0; r < keys; r++) {
            T *dx = h.ddistances + key + r - s.query;
            for (int64_t i = seen.first; i < seen.stop; i++) dx[-i] += dscores[r * QUERIES + i];
        }
    }
}

/// dscores *= 1 - tangent^2, the derivative of the softcap, where a pair is not excluded.
template <class T> inline void through_softcap(const KeyRow<T> &row, int64_t from, int64_t to) {
    for (int64_t i = from; i < to; i += LANES<T>) {
        Vector<T> tangent = load(row.tangents + i), dscore = load(row.dscores + i);
        store(row.dscores + i, dscore == T(0) ? dscore : dscore * (T(1) - tangent * tangent));
    }
}

/// Replace the weights and dscores of a group by pairs of queries, and the dscores also by pairs of keys.
template <class T> inline void pair_group(const Head<T> &h, const Strip &s, int64_t group) {
    if constexpr (sizeof(T) == sizeof(float)) {
        const int64_t vectors = rounded_up(s.queries, LANES<T>) / LANES<T>;
        for (int64_t key = group; key < group + ROWS; key += 2) {
            KeyRow<T> one = row_of_key(h, s, key), other = row_of_key(h, s, key + 1);
            bool there = key + 1 < s.keys;
            T *both = h.pairs_of_keys + key / 2 * QUERIES + s.column;
            for (int64_t v = 0; v < vectors; v++) {
                Vector<T> second = there ? load(other.dscores + v * LANES<T>) : Vector<T>{};
                store(both + v * LANES<T>, pair_of(load(one.dscores + v * LANES<T>), second));
            }
            round_row(one.weights, vectors), round_row(other.weights, vectors);
            round_row(one.dscores, vectors), round_row(other.dscores, vectors);
        }
    }
}

/// The weights and dscores of a group of ROWS keys from its scores and dweights.
template <class T> inline void weigh_group(const Head<T> &h, const Strip &s, int64_t group) {
    const Seen &seen = s.of(group);
    for (int64_t r = 0; r < ROWS; r++) weigh(h, row_of_key(h, s, group + r), seen.from, seen.to);
    if (!seen.whole || (h.paired && seen.to < s.queries)) zero_unseen(h, s, group);
    if (h.dbias || h.ddistances) add_bias(h, s, group);
    if (h.softcap != 0)
        for (int64_t r = 0; r < ROWS; r++) through_softcap(row_of_key(h, s, group + r), seen.from, seen.to);
    if (h.paired) pair_group(h, s, group);
}

/// The dscores of a strip, and from them and its weights its parts of dv and dk.
template <class T> inline void gradients_of_strip(const Head<T> &h, const Strip &s) {
    products_of_strip(h, s);
    for (int64_t group = 0; group < s.keys; group += ROWS) weigh_group(h, s, group);
    by_products(h, [&](auto add) {
        typedef decltype(add) Add;
        add_products<T, Add, STRIP>(s, h.weights, h.dout, h.wide_v, h.dv);
        add_products<T, Add, QUERIES>(s, h.dscores + s.column, h.q, h.wide_k, h.dk);
    });
}

}  // namespace gradients
