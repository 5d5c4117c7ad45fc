// The parts of the backward of one head: tiles of keys and queries, and strips of tiles, which have STRIP queries.
// They are transposed, keys x queries, so that no product needs a transposed copy of the weights.
#pragma once

#include "masks.h"
#include "pairs.h"

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

/// Rows of one operand in the type of the sums, of whole vectors.
template <class T> struct Matrix {
    const T *rows;
    int64_t step;

    const T *row(int64_t i) const { return rows + i * step; }
};

/// The operands of the products of keys and queries: rows of keys and panels of queries, (n_k, depth) and (panels, step,
/// PANEL), where depth is the number of features or of their pairs, and step that of the rows in memory.
template <class T> struct Operands {
    Matrix<T> keys;
    T *panels;
    int64_t depth;
};

/// The operands, sums and buffers of one head. d is padded to whole vectors, with zeros.
template <class T> struct Head {
    Pairs<T> pairs;
    int64_t d_k, d_v, wide_k, wide_v;
    int64_t first_key, n_k;  // of the task
    T softcap;               // in units of log 2, 0 without
    bool addends;            // whether weights have addends from pairs
    T *dbias, *ddistances;   // of this head, or null
    int64_t dbias_row, dbias_key;

    T factor;                       // of the products of q and k: scores are in units of log 2, or of the softcap
    Operands<T> scores, dweights;   // q and k, dout and v
    Matrix<T> k;                    // (n_k, d_k)
    Matrix<T> q, dout;              // (n_q, d_k), (n_q, d_v)
    T *dq, *dk, *dv;                // sums, without the scale: (n_q, wide_k), (n_k, wide_k), (n_k, wide_v)
    T *high, *low, *shift;          // (n_q) of each row: log2 of its sum as two numbers, and dlse - rowsum(dout * out)
    T *weights, *dscores, *tangents;  // (KEYS, STRIP), (KEYS, QUERIES), (KEYS, STRIP)
    T *added, *kept;                // (KEYS, QUERIES)
    T *spare;                       // (LANES, the most of KEYS and the widths)
};

/// Keys and queries of one tile, counted from the first of the task and of the head.
struct Tile {
    int64_t key, keys, query, queries;
};

/// The queries of a strip that see a key of a group of ROWS keys by position.
struct Seen {
    int64_t first, stop, from, to;  // [first, stop), and the same in whole panels and vectors
    bool whole;                     // all queries of the strip see all keys of the group
};

/// STRIP queries of a tile, from `column` on.
struct Strip : Tile {
    int64_t column;
    Seen seen[KEYS / ROWS];

    const Seen &of(int64_t group) const { return seen[group / ROWS]; }
};

/// The queries of a strip that see a key of a group.
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

/// A strip of a tile.
template <class T> inline Strip strip_of(const Head<T> &h, const Tile &t, int64_t column) {
    Strip s;
    s.key = t.key, s.keys = t.keys, s.query = t.query + column, s.queries = lesser(STRIP, t.queries - column);
    s.column = column;
    int64_t key = h.first_key + s.key;
    Range of_first = keys_of(h.pairs, s.query), of_last = keys_of(h.pairs, s.query + s.queries - 1);
    bool whole = of_last.first <= key && of_first.stop >= key + s.keys;
    Seen all = {0, s.queries, 0, rounded_up(s.queries, LANES<T>), true};
    for (int64_t group = 0; group < t.keys; group += ROWS) s.seen[group / ROWS] = whole ? all : seen_by(h, s, group);
    return s;
}

/// One key of a strip: pointers to its rows, and to the statistics of the queries of the strip.
template <class T> struct KeyRow {
    T *weights, *dscores, *tangents;
    const T *added, *kept, *high, *low, *shift;
    T factor, softcap;
};

/// The rows of a key of a strip.
template <class T> inline KeyRow<T> row_of_key(const Head<T> &h, const Strip &s, int64_t key) {
    int64_t at = key * QUERIES + s.column;
    return {h.weights + key * STRIP, h.dscores + at, h.tangents + key * STRIP, h.added + at, h.kept + at,
            h.high + s.query, h.low + s.query, h.shift + s.query, h.factor, h.softcap};
}

}  // namespace gradients
