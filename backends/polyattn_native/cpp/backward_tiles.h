// The backward of one head, tile by tile: nothing of n_q x n_k numbers is stored.
#pragma once

#include "backward_strips.h"

namespace gradients {

constexpr int64_t SUMMED = 96;  // keys of a sum for dq: they fit the first-level cache, and the rounding error is small

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

/// Add the parts of dq of a tile of the keys [key, stop), which stay in the first-level cache.
template <class T> inline void add_dq(const Head<T> &h, const Tile &t, int64_t key, int64_t stop) {
    for (int64_t c = 0; c < h.wide_k; c += PANEL<T>) {
        int vectors = static_cast<int>(lesser(PANEL<T>, h.wide_k - c) / LANES<T>);
        for (int64_t i = 0; i < t.queries; i += ROWS) {
            Range first = keys_of(h.pairs, t.query + i);
            Range last = keys_of(h.pairs, lesser(t.query + i + ROWS, h.pairs.n_q) - 1);
            int64_t from = greater(lesser(first.first, last.first) - h.first_key - t.key, key);
            int64_t to = lesser(greater(first.stop, last.stop) - h.first_key - t.key, stop);
            if (from >= to) continue;
            multiply_vectors<T, ROWS, ADDED_TO_C>(vectors, h.dscores + from * QUERIES + i, 1, QUERIES,
                                                  h.k.row(t.key + from) + c, h.k.step, to - from,
                                                  h.dq + (t.query + i) * h.wide_k + c, h.wide_k, nullptr);
        }
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

/// Add the gradients of all tiles of a head to dq, dk and dv. Add is for the products of the operands, which lose no
/// digits as pairs of bfloat16; weights and dscores would.
template <class Add, class T> inline void add_gradients(const Head<T> &h) {
    for_tiles(h, [&](const Tile &t) {
        for (int64_t i = 0; i < t.queries; i += STRIP) gradients_of_strip<Add>(h, strip_of(h, t, i));
        for (int64_t key = 0; key < t.keys; key += SUMMED) add_dq(h, t, key, lesser(key + SUMMED, t.keys));
    });
}

}  // namespace gradients
