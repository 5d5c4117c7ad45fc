// The memory of one head for the backward, and its operands in the layouts of the micro-kernel.
#pragma once

#include "backward_tiles.h"
#include "threads.h"

namespace gradients {

/// Room for operands of d features.
template <class Element>
inline Operands<Wide<Element>> operands_in(int64_t keys, int64_t queries, int64_t d, Arena *arena) {
    typedef Wide<Element> T;
    int64_t depth = PAIRS<Element> ? (d + 1) / 2 : d, step = PAIRS<Element> ? depth : rounded_up(d, LANES<T>);
    Matrix<T> rows = {arena->take<T>(keys * step), step};
    return {rows, arena->take<T>(queries * step), depth};
}

/// The operands and buffers of a head, in the arena.
template <class Element>
inline Head<Wide<Element>> head_in(const AttentionBackward &call, int64_t n_k, Arena *arena) {
    typedef Wide<Element> T;
    const Attention &a = call.forward;
    Head<T> h{};
    h.d_k = a.d_k, h.d_v = a.d_v;
    h.wide_k = rounded_up(a.d_k, LANES<T>), h.wide_v = rounded_up(a.d_v, LANES<T>);
    int64_t keys = rounded_up(n_k, ROWS), queries = rounded_up(a.n_q, PANEL<T>), rows = a.n_q + ROWS;
    double factor = a.softcap != 0 ? a.scale / a.softcap : a.scale * LOG2_E;
    h.factor = static_cast<T>(factor);
    h.scores = operands_in<Element>(keys, queries, a.d_k, arena);
    h.dweights = operands_in<Element>(keys, queries, a.d_v, arena);
    h.k = PAIRS<Element> ? Matrix<T>{arena->take<T>(keys * h.wide_k), h.wide_k} : h.scores.keys;
    h.q = {arena->take<T>(rows * h.wide_k), h.wide_k};
    h.dout = {arena->take<T>(rows * h.wide_v), h.wide_v};
    h.dq = arena->take<T>(rows * h.wide_k);
    h.dk = arena->take<T>(keys * h.wide_k), h.dv = arena->take<T>(keys * h.wide_v);
    h.high = arena->take<T>(queries), h.low = arena->take<T>(queries), h.shift = arena->take<T>(queries);
    h.weights = arena->take<T>(KEYS * STRIP), h.dscores = arena->take<T>(KEYS * QUERIES);
    h.tangents = arena->take<T>(a.softcap != 0 ? KEYS * STRIP : 0);
    bool addends = a.mask.data || a.q_segments.data || a.blocks.data || a.bias.data || a.slopes || a.distances.data;
    h.added = arena->take<T>(addends ? KEYS * QUERIES : 0);
    h.kept = arena->take<T>(a.drop_below ? KEYS * QUERIES : 0);
    h.spare = arena->take<T>(LANES<T> * greater(KEYS, greater(h.wide_k, h.wide_v)));
    h.softcap = static_cast<T>(a.softcap * LOG2_E);
    return h;
}

/// Set the pairs and the bias gradients of a query head, and zero dq.
template <class T> inline void set_head(const AttentionBackward &call, int64_t item, int64_t head, Head<T> *h) {
    const Attention &a = call.forward;
    h->pairs = pairs_of<T>(a, item, head);
    h->addends = h->pairs.has_addends();
    h->dbias = call.dbias.data ? head_of<T>(a, call.dbias, item, head) : nullptr;
    h->dbias_row = call.dbias.row, h->dbias_key = call.dbias.feature;
    h->ddistances = call.ddistances.data ? head_of<T>(a, call.ddistances, item, head) + a.n_q - 1 : nullptr;
    memset(h->dq, 0, static_cast<size_t>((a.n_q + ROWS) * h->wide_k) * sizeof(T));
}

/// Copy rows (n, d) into rows of whole vectors, with zeros at the end of each.
template <class Element, class T>
inline void copy_rows(const Element *from, const Array &x, int64_t n, int64_t d, const Matrix<T> &room) {
    for (int64_t i = 0; i < n; i++) {
        T *to = const_cast<T *>(room.row(i));
        read_row(from + i * x.row, x.feature, d, to);
        for (int64_t c = d; c < room.step; c++) to[c] = 0;
    }
}

/// The rows themselves if they are dense rows of whole vectors, else a copy.
template <class Element, class T>
inline Matrix<T> rows_of(const Element *from, const Array &x, int64_t n, int64_t d, const Matrix<T> &room) {
    if (sizeof(Element) == sizeof(T) && x.feature == 1 && x.row == d && d == room.step)
        return {reinterpret_cast<const T *>(from), d};
    copy_rows(from, x, n, d, room);
    return room;
}

/// Copy keys or values (n, d) to the rows of operands, with rows of zeros up to whole groups of ROWS.
template <class Element>
inline void pack_groups(const Element *from, const Array &x, int64_t n, int64_t d,
                        const Operands<Wide<Element>> &room) {
    typedef Wide<Element> T;
    if constexpr (PAIRS<Element>) {
        for (int64_t i = 0; i < n; i++)
            pack_pairs(Rows<Element>{from, x.row, x.feature}, i, d, const_cast<T *>(room.keys.row(i)));
    } else {
        copy_rows(from, x, n, d, room.keys);
    }
    int64_t count = (rounded_up(n, ROWS) - n) * room.keys.step;
    memset(const_cast<T *>(room.keys.row(n)), 0, static_cast<size_t>(count) * sizeof(T));
}

/// panels[i / PANEL][c][i % PANEL] = x[i][c], for n rows of d; the last panel is filled with zeros.
template <class T> inline void transpose_panels(const Matrix<T> &x, int64_t n, T *panels) {
    constexpr int N = LANES<T>;
    const int64_t wide = x.step;
    for (int64_t i = 0; i < rounded_up(n, PANEL<T>); i += N) {
        T *panel = panels + i / PANEL<T> * PANEL<T> * wide + i % PANEL<T>;
        for (int64_t c = 0; c < wide; c += N) {
            Vector<T> square[N];
            for (int r = 0; r < N; r++) square[r] = i + r < n ? load(x.row(i + r) + c) : Vector<T>{};
            transpose<T>(square);
            for (int r = 0; r < N; r++) store(panel + (c + r) * PANEL<T>, square[r]);
        }
    }
}

/// Copy queries or dout (n, d), which are in `rows` too, to the panels of operands.
template <class Element, class T>
inline void pack_panels(const Element *from, const Array &x, const Matrix<T> &rows, int64_t n, int64_t d,
                        const Operands<T> &room, T *spare) {
    if constexpr (PAIRS<Element>) {
        for (int64_t i = 0; i < n; i += PANEL<T>)
            pack_pair_panel(Rows<Element>{from, x.row, x.feature}, i, lesser(PANEL<T>, n - i), d,
                            room.panels + i * room.depth, spare);
    } else {
        transpose_panels(rows, n, room.panels);
    }
}

/// The largest Euclidean norm of n rows of d elements. Not finite if a number is not.
template <class Element>
inline Wide<Element> largest_norm(const Element *from, const Array &x, int64_t n, int64_t d, Wide<Element> *spare) {
    typedef Wide<Element> T;
    Vector<T> zeros{};
    T largest = 0;
    for (int64_t c = d; c < rounded_up(d, LANES<T>); c++) spare[c] = 0;
    for (int64_t i = 0; i < n; i++) {
        read_row(from + i * x.row, x.feature, d, spare);
        Vector<T> squares{};
        for (int64_t c = 0; c < d; c += LANES<T>) squares += load(spare + c) * load(spare + c);
        T square = sum_of<T>(squares);
        largest = largest > square ? largest : square;
        zeros += square - square;
    }
    return square_root<T>(broadcast(largest))[0] + zeros[0];
}

/// Pack the keys and values of a task and zero their gradients; return the largest norm of a key.
template <class Element>
inline Wide<Element> pack_keys(const AttentionBackward &call, int64_t item, int64_t kv_head, Head<Wide<Element>> *h) {
    typedef Wide<Element> T;
    const Attention &a = call.forward;
    const Element *k = head_of<Element>(a, a.k, item, kv_head) + h->first_key * a.k.row;
    const Element *v = head_of<Element>(a, a.v, item, kv_head) + h->first_key * a.v.row;
    pack_groups(k, a.k, h->n_k, h->d_k, h->scores);
    pack_groups(v, a.v, h->n_k, h->d_v, h->dweights);
    if (PAIRS<Element>) copy_rows(k, a.k, h->n_k, h->d_k, h->k);
    int64_t keys = rounded_up(h->n_k, ROWS);
    memset(h->dk, 0, static_cast<size_t>(keys * h->wide_k) * sizeof(T));
    memset(h->dv, 0, static_cast<size_t>(keys * h->wide_v) * sizeof(T));
    return largest_norm(k, a.k, h->n_k, h->d_k, h->spare);
}

/// Pack the queries and dout of a head; return the largest norm of a query.
template <class Element>
inline Wide<Element> pack_queries(const AttentionBackward &call, int64_t item, int64_t head, Head<Wide<Element>> *h) {
    const Attention &a = call.forward;
    const Element *q = head_of<Element>(a, a.q, item, head), *dout = head_of<Element>(a, call.dout, item, head);
    h->q = rows_of(q, a.q, a.n_q, h->d_k, h->q);
    h->dout = rows_of(dout, call.dout, a.n_q, h->d_v, h->dout);
    pack_panels(q, a.q, h->q, a.n_q, h->d_k, h->scores, h->spare);
    pack_panels(dout, call.dout, h->dout, a.n_q, h->d_v, h->dweights, h->spare);
    return largest_norm(q, a.q, a.n_q, h->d_k, h->spare);
}

}  // namespace gradients
