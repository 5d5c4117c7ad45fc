// The backward of one head, tile by tile. A tile is transposed, keys x queries, so that the weights and the gradients of
// the scores come out of one product as the next ones need them, and nothing n_q x n_k is stored.
#pragma once

#include "masks.h"
#include "math.h"
#include "micro_kernel.h"
#include "softcap.h"
#include "threads.h"

namespace gradients {

constexpr int64_t KEYS = 96;      // of a tile
constexpr int64_t QUERIES = 192;  // of a tile, the length of its rows
constexpr int64_t SUMMED = 64;    // queries of one sum: a sum of fewer has a smaller rounding error
static_assert(KEYS % ROWS == 0 && KEYS % LANES<float> == 0 && QUERIES % ROWS == 0, "a tile is whole blocks");
static_assert(QUERIES % PANEL<float> == 0 && QUERIES % PANEL<double> == 0, "a tile is whole panels");

constexpr double LOG2_E = 1.44269504088896340736;

inline int64_t rounded_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

/// Rows of one operand in the type of the sums, of whole vectors.
template <class T> struct Matrix {
    const T *rows;
    int64_t step;

    const T *row(int64_t i) const { return rows + i * step; }
};

/// The operands, sums and buffers of one head. n_k keys are those of the task. d is padded to whole vectors, with zeros.
template <class T> struct Head {
    Pairs<T> pairs;
    int64_t d_k, d_v, wide_k, wide_v;
    int64_t first_key, n_k;  // of the task
    T softcap;               // in units of log 2, 0 without
    bool addends;            // whether weights have addends from pairs
    T *dbias, *ddistances;   // of this head, or null
    int64_t dbias_row, dbias_key;

    Matrix<T> k, q, dout;           // (n_k, d_k), (n_q, d_k), (n_q, d_v)
    T *k_groups, *v_groups;         // (groups of ROWS keys, d, ROWS)
    T *q_panels, *dout_panels;      // (panels, wide, PANEL); q is scaled
    T *dq, *dk, *dv;                // sums, without the scale: (n_q, wide_k), (n_k, wide_k), (n_k, wide_v)
    T *high, *low, *shift;          // (n_q) of each row: log2 of its sum as two numbers, and dlse - rowsum(dout * out)
    T *weights, *dscores, *tangents;  // (ROWS or KEYS, QUERIES), (KEYS, QUERIES), (ROWS, QUERIES)
    T *added, *kept;                // (KEYS, QUERIES)
    T *spare;                       // (LANES, KEYS)
};

/// Keys and queries of one tile, counted from the first of the task and of the head.
struct Tile {
    int64_t key, keys, query, queries;
};

/// The queries that see any of these keys by position.
template <class T> inline Range queries_of_keys(const Head<T> &h, int64_t key, int64_t stop) {
    Range all = {h.pairs.n_q, 0};
    for (int64_t j = key; j < stop; j++) {
        Range of_key = queries_of(h.pairs, h.first_key + j);
        if (of_key.first >= of_key.stop) continue;
        all.first = lesser(all.first, of_key.first);
        all.stop = greater(all.stop, of_key.stop);
    }
    return all;
}

/// out[key][query] = rows of queries, each written by row_of(query, spare); QUERIES is the length of rows of out.
template <class T, class RowOf> inline void transposed_rows(const Tile &t, T *spare, T *out, RowOf row_of) {
    constexpr int N = LANES<T>;
    for (int64_t i = 0; i < t.queries; i += N) {
        for (int64_t x = 0; x < N; x++) row_of(t.query + lesser(i + x, t.queries - 1), spare + x * KEYS);
        for (int64_t j = 0; j < t.keys; j += N) {
            Vector<T> square[N];
            for (int x = 0; x < N; x++) square[x] = load(spare + x * KEYS + j);
            transpose<T>(square);
            for (int x = 0; x < N; x++) store(out + (j + x) * QUERIES + i, square[x]);
        }
    }
}

// ---- weights --------------------------------------------------------------------------------------------------------

/// One key of a tile: pointers to its rows, and to the statistics of the queries of the tile.
template <class T> struct KeyRow {
    T *weights, *dscores, *tangents;
    const T *added, *kept, *high, *low, *shift;
    T softcap;
};

/// The scores of a vector of queries in units of log 2: softcapped, with addends. tangent is set with a softcap.
template <class T, bool CAPPED, bool ADDED>
POLYATTN_INLINE Vector<T> score_of(const KeyRow<T> &row, int64_t i, Vector<T> *tangent) {
    Vector<T> score = load(row.weights + i);
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

// ---- one tile -------------------------------------------------------------------------------------------------------

/// The queries of a tile that see a key of a group by position: [first, stop), in whole vectors [from, to).
struct Seen {
    int64_t first, stop, from, to;
    bool whole;  // all queries of the tile see all keys of the group
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
    return seen;
}

/// The rows of key r of a group; those of the whole tile start at `group`.
template <class T> inline KeyRow<T> row_of_key(const Head<T> &h, const Tile &t, int64_t group, int64_t r) {
    int64_t here = r * QUERIES, at = group * QUERIES + here;
    return {h.weights + here,  h.dscores + at,   h.tangents + here,  h.added + at, h.kept + at,
            h.high + t.query, h.low + t.query, h.shift + t.query, h.softcap};
}

/// Scores and dweights of the ROWS keys of a group, for the queries [from, to).
template <class T>
inline void products_of_group(const Head<T> &h, const Tile &t, int64_t group, const Seen &seen, T *weights, T *dscores) {
    const T *k = h.k_groups + (t.key + group) * h.d_k, *v = h.v_groups + (t.key + group) * h.d_v;
    for (int64_t i = seen.from; i < seen.to; i += PANEL<T>) {
        int vectors = static_cast<int>(lesser(seen.to - i, PANEL<T>) / LANES<T>);
        const T *q = h.q_panels + (t.query + i) * h.wide_k;
        multiply_vectors<T, ROWS, FROM_ZERO>(vectors, k, 1, ROWS, q, PANEL<T>, h.d_k, weights + i, QUERIES, nullptr);
    }
    for (int64_t i = seen.from; i < seen.to; i += PANEL<T>) {
        int vectors = static_cast<int>(lesser(seen.to - i, PANEL<T>) / LANES<T>);
        const T *dout = h.dout_panels + (t.query + i) * h.wide_v;
        multiply_vectors<T, ROWS, FROM_ZERO>(vectors, v, 1, ROWS, dout, PANEL<T>, h.d_v, dscores + i, QUERIES, nullptr);
    }
}

/// Zero a row of a tile except [first, stop).
template <class T> inline void zero_outside(T *row, int64_t first, int64_t stop) {
    memset(row, 0, static_cast<size_t>(first) * sizeof(T));
    memset(row + stop, 0, static_cast<size_t>(QUERIES - stop) * sizeof(T));
}

/// Zero the weights and dscores of a group of ROWS keys where their queries do not see them by position.
template <class T> inline void zero_unseen(const Head<T> &h, const Tile &t, int64_t group, T *weights, T *dscores) {
    for (int64_t r = 0; r < ROWS; r++) {
        Range seen = queries_of(h.pairs, h.first_key + t.key + group + r);
        int64_t first = greater(lesser(seen.first - t.query, QUERIES), 0);
        int64_t stop = greater(lesser(seen.stop - t.query, QUERIES), first);
        zero_outside(weights + r * QUERIES, first, stop);
        zero_outside(dscores + r * QUERIES, first, stop);
    }
}

/// Add the dscores of a group of keys to the gradients of the bias and of the distances.
template <class T>
inline void add_bias(const Head<T> &h, const Tile &t, int64_t group, const Seen &seen, const T *dscores) {
    int64_t keys = lesser(t.keys - group, ROWS), key = h.first_key + t.key + group;
    if (h.dbias) {
        for (int64_t i = seen.first; i < seen.stop; i++) {
            T *dbias = h.dbias + (t.query + i) * h.dbias_row + key * h.dbias_key;
            for (int64_t r = 0; r < keys; r++) dbias[r * h.dbias_key] += dscores[r * QUERIES + i];
        }
    }
    if (h.ddistances) {
        for (int64_t r = 0; r < keys; r++) {
            T *dx = h.ddistances + key + r - t.query;
            for (int64_t i = seen.first; i < seen.stop; i++) dx[-i] += dscores[r * QUERIES + i];
        }
    }
}

/// dscores *= 1 - tangent^2, the derivative of the softcap, where a pair is not excluded.
template <class T> inline void through_softcap(const Seen &seen, const T *tangents, T *dscores) {
    for (int64_t r = 0; r < ROWS; r++) {
        for (int64_t i = r * QUERIES + seen.from; i < r * QUERIES + seen.to; i += LANES<T>) {
            Vector<T> tangent = load(tangents + i), dscore = load(dscores + i);
            store(dscores + i, dscore == T(0) ? dscore : dscore * (T(1) - tangent * tangent));
        }
    }
}

/// One group of ROWS keys of a tile: its weights and dscores, and from them its parts of dv and dk.
template <class T> inline void gradients_of_group(const Head<T> &h, const Tile &t, int64_t group) {
    T *dscores = h.dscores + group * QUERIES, *weights = h.weights;
    Seen seen = seen_by(h, t, group);
    if (seen.first >= seen.stop) {
        memset(dscores, 0, static_cast<size_t>(ROWS * QUERIES) * sizeof(T));
        return;
    }
    products_of_group(h, t, group, seen, weights, dscores);
    for (int64_t r = 0; r < ROWS; r++) weigh(h, row_of_key(h, t, group, r), seen.from, seen.to);
    if (!seen.whole) zero_unseen(h, t, group, weights, dscores);
    if (h.dbias || h.ddistances) add_bias(h, t, group, seen, dscores);
    if (h.softcap != 0) through_softcap(seen, h.tangents, dscores);
    for (int64_t i = seen.from; i < seen.stop; i += SUMMED) {
        int64_t queries = lesser(SUMMED, seen.stop - i), at = t.query + i;
        multiply_rows<T, ADDED_TO_C>(h.wide_v / LANES<T>, weights + i, QUERIES, 1, h.dout.row(at), h.dout.step, queries,
                                     h.dv + (t.key + group) * h.wide_v, h.wide_v, nullptr);
        multiply_rows<T, ADDED_TO_C>(h.wide_k / LANES<T>, dscores + i, QUERIES, 1, h.q.row(at), h.q.step, queries,
                                     h.dk + (t.key + group) * h.wide_k, h.wide_k, nullptr);
    }
}

/// Add the parts of dq of a tile.
template <class T> inline void add_dq(const Head<T> &h, const Tile &t) {
    for (int64_t i = 0; i < t.queries; i += ROWS) {
        Range first = keys_of(h.pairs, t.query + i), last = keys_of(h.pairs, lesser(t.query + i + ROWS, h.pairs.n_q) - 1);
        int64_t from = greater(lesser(first.first, last.first) - h.first_key - t.key, 0);
        int64_t to = lesser(greater(first.stop, last.stop) - h.first_key - t.key, t.keys);
        if (from >= to) continue;
        multiply_rows<T, ADDED_TO_C>(h.wide_k / LANES<T>, h.dscores + from * QUERIES + i, 1, QUERIES, h.k.row(t.key + from),
                                 h.k.step, to - from, h.dq + (t.query + i) * h.wide_k, h.wide_k, nullptr);
    }
}

/// Fill added and kept of a tile; return whether any pair of it may be allowed.
template <class T> inline bool prepare(const Head<T> &h, const Tile &t) {
    int64_t key = h.first_key + t.key;
    if (blocks_exclude(h.pairs, t.query, t.query + t.queries, key, key + t.keys)) return false;
    if (h.addends)
        transposed_rows(t, h.spare, h.added,
                        [&](int64_t i, T *row) { addends_of(h.pairs, i, key, t.keys, T(LOG2_E), row); });
    if (h.pairs.drop_below)
        transposed_rows(t, h.spare, h.kept, [&](int64_t i, T *row) { keeps_of(h.pairs, i, key, t.keys, row); });
    return true;
}

/// Call body for each tile of the task that may have an allowed pair, its addends prepared: all queries of a key tile.
template <class T, class Body> inline void for_tiles(const Head<T> &h, Body body) {
    for (int64_t key = 0; key < h.n_k; key += KEYS) {
        int64_t keys = lesser(KEYS, h.n_k - key);
        Range seen = queries_of_keys(h, key, key + keys);
        for (int64_t query = seen.first / QUERIES * QUERIES; query < seen.stop; query += QUERIES) {
            Tile t = {key, keys, query, lesser(QUERIES, h.pairs.n_q - query)};
            if (prepare(h, t)) body(t);
        }
    }
}

/// Add the gradients of all tiles of a head to dq, dk and dv.
template <class T> inline void add_gradients(const Head<T> &h) {
    for_tiles(h, [&](const Tile &t) {
        for (int64_t group = 0; group < t.keys; group += ROWS) gradients_of_group(h, t, group);
        add_dq(h, t);
    });
}

}  // namespace gradients
