// The forward of attention: softmax(scale * q k^T + ...) v, tile by tile, with a running largest score of each row
// (Milakov and Gimelshein, 2018; Dao et al., "FlashAttention", 2022). Scores are in units of log 2.
//
// The query heads that share a key head are one list of rows: row r is query r % n_q of the r / n_q-th of these heads.
// A task is a chunk of these rows. It packs each block of keys once, transposed in panels, and uses it for all rows.
// Where there are few chunks, each is split further over its keys, and the sums of the splits are merged at the end.

#include "forward_tiles.h"
#include "system.h"

namespace forward {
namespace {

constexpr int64_t CHUNK_BYTES = 400 << 10;  // of the queries and sums of a chunk
constexpr int64_t SPLIT = 512;              // the least number of keys of a split

/// Write out and the statistics, or with splits the sums; returns false if a result or an input is in doubt.
template <class Element> bool finish(Chunk<Element> *c) {
    const Call<Element> &call = *c->call;
    bool right = scores_fit(call, c->q_most.value(), c->k_most.value());
    for (int64_t r = 0; r < c->count; r++) {
        const auto &row = c->rows[r];
        auto *out = c->out + r * call.padded;
        if (call.splits > 1) {
            auto *partial = call.partial_at(c->item * call.a->kv_heads + c->kv_head, c->first + r, c->split);
            partial[0] = row.sums.largest, partial[1] = row.sums.total;
            memcpy(partial + LANES<Wide<Element>>, out, sizeof(*out) * call.padded);
        } else {
            right &= finish_row(call, c->item, c->heads[row.head].number, row.query, row.sums, out);
        }
    }
    return right;
}

/// One task: some keys of a chunk of rows of one key head. The last chunks, with most keys if causal, come first.
template <class Element> void run_chunk(const void *context, int64_t task, void *workspace) {
    typedef Wide<Element> T;
    const Call<Element> &call = *static_cast<const Call<Element> *>(context);
    const Attention &a = *call.a;
    if (call.in_doubt()) return;
    Chunk<Element> c;
    lay_out(&c, call, workspace);
    int64_t chunks = (call.rows + call.chunk - 1) / call.chunk, of_head = task / call.splits / chunks;
    c.item = of_head / a.kv_heads, c.kv_head = of_head % a.kv_heads, c.split = task % call.splits;
    c.first = (chunks - 1 - task / call.splits % chunks) * call.chunk;
    c.count = lesser(call.chunk, call.rows - c.first);
    begin(&c);
    Range range = union_of(c, 0, c.count);
    int64_t length = ((range.stop - range.first) / call.splits / PANEL<T> + 1) * PANEL<T>;
    c.start = call.splits > 1 ? range.first + c.split * length : range.first;
    c.stop = call.splits > 1 ? lesser(c.start + length, range.stop) : range.stop;
    for (int64_t block = c.start; block < c.stop; block += KEYS) {
        memset(c.packed, 0, sizeof(bool) * (KEYS / PANEL<T>));
        for (int64_t row = 0; row < c.count; row += GROUP)
            add_block(&c, row, lesser(GROUP, c.count - row), block, lesser(KEYS, c.stop - block));
    }
    if (!finish(&c)) call.doubt();
}

/// One task of the second loop: merge the splits of one row, in their order.
template <class Element> void merge_row(const void *context, int64_t task, void *) {
    typedef Wide<Element> T;
    const Call<Element> &call = *static_cast<const Call<Element> *>(context);
    const Attention &a = *call.a;
    int64_t kv_head = task / call.rows, row = task % call.rows;
    T *first = call.partial_at(kv_head, row, 0), *out = first + LANES<T>;
    Running<T> sums = {first[0], first[1]};
    for (int64_t split = 1; split < call.splits; split++) {
        const T *other = call.partial_at(kv_head, row, split);
        T largest = other[0] > sums.largest ? other[0] : sums.largest;
        T base = largest == -T(__builtin_inf()) ? T(0) : largest;
        T ours = exp2_of(sums.largest - base), theirs = exp2_of(other[0] - base);
        sums = {largest, sums.total * ours + other[1] * theirs};
        for (int64_t x = 0; x < call.padded; x++) out[x] = out[x] * ours + other[LANES<T> + x] * theirs;
    }
    int64_t head = kv_head % a.kv_heads * call.groups + row / a.n_q;
    if (!finish_row(call, kv_head / a.kv_heads, head, row % a.n_q, sums, out)) call.doubt();
}

/// The rows of a task: enough to pay for packing the keys, few enough for the cache and for all threads.
int64_t chunk_of(int64_t rows, int64_t heads, int64_t row_bytes, int threads) {
    int64_t most = greater(CHUNK_BYTES / row_bytes / GROUP * GROUP, 8 * GROUP);
    int64_t wanted = 4 * threads, each = (wanted + heads - 1) / heads;  // chunks of a head, for balance
    int64_t chunk = (rows + each - 1) / each;
    chunk = lesser(greater((chunk + GROUP - 1) / GROUP * GROUP, 8 * GROUP), most);
    return lesser(chunk, rows);
}

/// The number of parts into which the keys of a chunk are split, so that all threads have work.
int64_t splits_of(int64_t tasks, int64_t n_k, int threads) {
    if (threads == 1 || tasks >= 2 * threads) return 1;
    return greater(lesser((4 * threads + tasks - 1) / tasks, n_k / SPLIT), 1);
}

template <class Element> Status run(const Attention &a) {
    typedef Wide<Element> T;
    Call<Element> call(a);
    int64_t heads = items_of(a) * a.kv_heads;
    double operations = 2.0 * heads * call.rows * a.n_k * (a.d_k + a.d_v);
    int threads = threads_for(operations, a.threads);
    call.chunk = chunk_of(call.rows, heads, (call.q_step + call.padded) * sizeof(T), threads);
    int64_t tasks = heads * ((call.rows + call.chunk - 1) / call.chunk);
    call.splits = splits_of(tasks, a.n_k, threads);
    if (call.splits > 1) {
        size_t size = sizeof(T) * heads * call.rows * call.splits * (call.padded + LANES<T>);
        call.partial = static_cast<T *>(aligned_memory(64, size));
        if (!call.partial) return static_cast<Status>(size);
    }
    Chunk<Element> measured;
    size_t workspace = lay_out(&measured, call, nullptr).used;
    Status status = parallel_for(tasks * call.splits, threads, workspace, run_chunk<Element>, &call);
    if (status == OK && call.splits > 1) parallel_for(heads * call.rows, 1, 0, merge_row<Element>, &call);
    if (call.partial) free_memory(call.partial);
    return status == OK && call.in_doubt() ? DOUBT : status;
}

}  // namespace
}  // namespace forward

/// Compute out, largest and log_total.
POLYATTN_EXPORT Status polyattn_attention_forward(const Attention *a) {
    switch (a->dtype) {
    case FLOAT64:
        return forward::run<double>(*a);
    case FLOAT16:
        return forward::run<Half>(*a);
    case BFLOAT16:
        return forward::run<Bfloat>(*a);
    default:
        return forward::run<float>(*a);
    }
}

/// The same with other arrays of the same layout: many calls differ in nothing else.
POLYATTN_EXPORT Status polyattn_attention_forward_at(const Attention *a, void *q, void *k, void *v, void *out,
                                                      void *largest, void *log_total, int32_t threads) {
    Attention here = *a;
    here.q.data = q, here.k.data = k, here.v.data = v, here.out.data = out;
    here.largest = largest, here.log_total = log_total, here.threads = threads;
    return polyattn_attention_forward(&here);
}
