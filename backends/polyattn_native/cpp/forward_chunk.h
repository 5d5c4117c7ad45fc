// A task of the forward: a chunk of the rows of one key head, with its buffers, queries, and packed keys.
#pragma once

#include "forward.h"

namespace forward {

constexpr int KEYS = 512;              // of a block
constexpr int GROUP = 2 * ROWS;        // rows whose scores of a block are in the cache at a time
constexpr int SCORES_ROW = KEYS + 16;  // not a power of two, so that rows do not fall on the same cache lines

/// One query head of a chunk.
template <class Element> struct Head {
    int64_t number;
    Pairs<Wide<Element>> pairs;
    Rows<Element> q;
};

/// One row of a chunk.
template <class T> struct Row {
    int64_t head, query;  // index into the heads of the chunk; number of the query
    Range keys;           // that it may see by position
    Running<T> sums;
};

/// A chunk of rows: its buffers in the workspace of a thread.
template <class Element> struct Chunk {
    typedef Wide<Element> T;

    const Call<Element> *call;
    int64_t item, kv_head, first, count;  // rows [first, first + count) of the key head
    int64_t split, start, stop;           // the task is for keys [start, stop)
    Rows<Element> k, v;
    Head<Element> *heads;
    Row<T> *rows;
    T *q, *out;          // (count, q_step), scaled; (count, padded d_v)
    T *panels, *values;  // of a block: (panels, d_k, PANEL), (KEYS, padded d_v); half of it if pairs
    T *scores, *spare;   // (GROUP, SCORES_ROW); a row of addends or of dropout, also a buffer for packing
    bool *packed;        // which panels of the block are packed
    Magnitude<T> q_most, k_most;
};

/// Cut the workspace into the buffers of a chunk; the result's `used` is their size.
template <class Element> Arena lay_out(Chunk<Element> *c, const Call<Element> &call, void *workspace) {
    typedef Wide<Element> T;
    const Attention &a = *call.a;
    int64_t rows = (call.chunk + GROUP - 1) / GROUP * GROUP;
    Arena arena(workspace);
    arena.take<char>(64);
    c->call = &call;
    c->heads = arena.take<Head<Element>>(lesser(call.groups, call.chunk / a.n_q + 2));
    c->rows = arena.take<Row<T>>(rows);
    c->q = arena.take<T>(rows * call.q_step);
    c->out = arena.take<T>(rows * call.padded);
    c->panels = arena.take<T>(call.rows > FEW ? KEYS * (a.d_k + 1) : 0);
    c->values = arena.take<T>(call.values_in_place ? 0 : KEYS * call.padded);
    c->scores = arena.take<T>(GROUP * SCORES_ROW);
    c->spare = arena.take<T>(greater(SCORES_ROW, LANES<T> * call.q_step));
    c->packed = arena.take<bool>(KEYS / PANEL<T>);
    return arena;
}

/// Pack the queries of a chunk, and start its sums with the sinks.
template <class Element> void begin(Chunk<Element> *c) {
    typedef Wide<Element> T;
    const Call<Element> &call = *c->call;
    const Attention &a = *call.a;
    c->k = rows_of<Element>(a, a.k, c->item, c->kv_head), c->v = rows_of<Element>(a, a.v, c->item, c->kv_head);
    int64_t head = -1, query = c->first % a.n_q, number = c->kv_head * call.groups + c->first / a.n_q;
    Running<T> start = {-T(__builtin_inf()), 0};
    Magnitude<T> most;  // in a register
    for (int64_t r = 0; r < c->count; r++, query++) {
        if (r == 0 || query == a.n_q) {
            if (r > 0) query = 0, number++;
            c->heads[++head] = {number, pairs_of<T>(a, c->item, number), rows_of<Element>(a, a.q, c->item, number)};
            if (c->split == 0) start = sink_of<T>(a, number);
        }
        c->rows[r] = {head, query, keys_of(c->heads[head].pairs, query), start};
        T *q = c->q + r * call.q_step;
        if constexpr (PAIRS<Element>) {
            if (call.pairs) {
                most.add(widened(Bfloat{pack_pairs(c->heads[head].q, query, a.d_k, q)}));
                continue;
            }
        }
        pack_scaled(c->heads[head].q, query, a.d_k, call.of_q, q, &most);
        for (int64_t f = a.d_k; f < call.q_step; f++) q[f] = 0;
    }
    c->q_most = most;
    int64_t padded = (c->count + ROWS - 1) / ROWS * ROWS;
    memset(c->q + c->count * call.q_step, 0, sizeof(T) * (padded - c->count) * call.q_step);
    memset(c->out, 0, sizeof(T) * padded * call.padded);
}

/// The union of the keys that rows [from, to) may see by position.
template <class Element> Range union_of(const Chunk<Element> &c, int64_t from, int64_t to) {
    Range all = {c.call->a->n_k, 0};
    for (int64_t r = from; r < to; r++) {
        Range keys = c.rows[r].keys;
        if (keys.first >= keys.stop) continue;
        all.first = lesser(all.first, keys.first);
        all.stop = greater(all.stop, keys.stop);
    }
    return all;
}

/// The packed keys of a panel of the block.
template <class Element> Wide<Element> *panel_at(const Chunk<Element> *c, int64_t p) {
    return c->panels + p * PANEL<Wide<Element>> * (c->call->pairs ? (c->call->a->d_k + 1) / 2 : c->call->a->d_k);
}

/// Pack the keys and values of a panel of the block at key `block`.
template <class Element> void pack_keys(Chunk<Element> *c, int64_t block, int64_t p) {
    typedef Wide<Element> T;
    const Call<Element> &call = *c->call;
    const int64_t d_k = call.a->d_k, d_v = call.a->d_v;
    int64_t key = block + p * PANEL<T>, count = lesser(PANEL<T>, c->stop - key);
    T *panel = panel_at(c, p);
    if constexpr (PAIRS<Element>) {
        if (call.pairs) {
            c->k_most.add(widened(Bfloat{pack_pair_panel(c->k, key, count, d_k, panel, c->spare)}));
            return pack_pair_rows(c->v, key, count, d_v, call.padded, c->values + p * PANEL<T> / 2 * call.padded);
        }
    }
    if (call.rows > FEW) pack_panel(c->k, key, count, d_k, panel, c->spare, &c->k_most);
    if (!call.values_in_place) pack_rows(c->v, key, count, d_v, call.padded, c->values + p * PANEL<T> * call.padded);
}

/// Pack panels [from, to) of the block at key `block`, those that are not packed yet.
template <class Element> void pack_block(Chunk<Element> *c, int64_t block, int64_t from, int64_t to) {
    for (int64_t p = from; p < to; p++) {
        if (c->packed[p]) continue;
        c->packed[p] = true;
        pack_keys(c, block, p);
    }
}

}  // namespace forward
