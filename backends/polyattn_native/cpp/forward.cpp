// The forward of attention: softmax(scale * q k^T + ...) v, tile by tile, with a running largest score of each row
// (Milakov and Gimelshein, 2018; Dao et al., "FlashAttention", 2022). Scores are in units of log 2.
//
// The query heads that share a key head are one list of rows: row r is query r % n_q of the r / n_q-th of these heads.
// A task is a chunk of these rows. It packs each block of keys once, transposed in panels, and uses it for all rows.

#include "forward.h"
#include "system.h"

namespace {

constexpr int KEYS = 512;             // of a block
constexpr int GROUP = 2 * ROWS;       // rows whose scores of a block are in the cache at a time
constexpr int SCORES_ROW = KEYS + 16;  // not a power of two, so that rows do not fall on the same cache lines
constexpr int64_t CHUNK_BYTES = 400 << 10;
constexpr int FEW = 4;          // up to so many rows of a key head, the keys are read as they are, without packing
constexpr int64_t SPLIT = 512;  // the least number of keys of a split

/// A chunk of rows: its buffers in the workspace of a thread.
template <class Element> struct Chunk {
    typedef Wide<Element> T;

    const Call<Element> *call;
    int64_t item, kv_head, first, count;  // rows [first, first + count)
    int64_t split, start, stop;           // the task is for keys [start, stop)
    Pairs<T> *pairs;                      // of the query heads from head `first_head` on
    int64_t first_head;
    Range *ranges;       // the keys of each row by position
    Running<T> *sums;    // of each row
    T *q, *out;          // (count, q_step), scaled; (count, padded d_v)
    T *panels, *values;  // of a block: (panels, d_k, PANEL), (KEYS, padded d_v)
    T *scores, *spare;   // (GROUP, SCORES_ROW); a row of addends or of dropout, also a buffer for packing
    bool *packed, *packed_values;  // which panels of the block are packed
    Magnitude<T> q_most, k_most;

    const Pairs<T> &pairs_at(int64_t row) const { return pairs[(first + row) / call->a->n_q - first_head]; }
    int64_t query_at(int64_t row) const { return (first + row) % call->a->n_q; }
};

/// Cut the workspace into the buffers of a chunk; the result's `used` is their size.
template <class Element> Arena lay_out(Chunk<Element> *c, const Call<Element> &call, void *workspace) {
    typedef Wide<Element> T;
    const Attention &a = *call.a;
    int64_t rows = (call.chunk + GROUP - 1) / GROUP * GROUP;
    int64_t heads = lesser(call.groups, call.chunk / a.n_q + 2);
    Arena arena(workspace);
    arena.take<char>(64);
    c->call = &call;
    c->pairs = arena.take<Pairs<T>>(heads);
    c->ranges = arena.take<Range>(rows);
    c->sums = arena.take<Running<T>>(rows);
    c->q = arena.take<T>(rows * call.q_step);
    c->out = arena.take<T>(rows * call.padded);
    c->panels = arena.take<T>(KEYS * a.d_k);
    c->values = arena.take<T>(call.values_in_place ? 0 : KEYS * call.padded);
    c->scores = arena.take<T>(GROUP * SCORES_ROW);
    c->spare = arena.take<T>(greater(SCORES_ROW, LANES<T> * call.q_step));
    c->packed = arena.take<bool>(KEYS / PANEL<T>);
    c->packed_values = arena.take<bool>(KEYS / PANEL<T>);
    return arena;
}

/// Pack the queries of a chunk, and start its sums with the sinks.
template <class Element> void begin(Chunk<Element> *c) {
    typedef Wide<Element> T;
    const Call<Element> &call = *c->call;
    const Attention &a = *call.a;
    c->first_head = c->first / a.n_q;
    int64_t last_head = (c->first + c->count - 1) / a.n_q;
    for (int64_t g = c->first_head; g <= last_head; g++)
        c->pairs[g - c->first_head] = pairs_of<T>(a, c->item, c->kv_head * call.groups + g);
    int64_t padded = (c->count + ROWS - 1) / ROWS * ROWS;
    for (int64_t r = 0; r < padded; r++) {
        c->sums[r] = {-T(__builtin_inf()), 0};
        memset(c->q + r * call.q_step, 0, sizeof(T) * call.q_step);
        if (r >= c->count) continue;
        int64_t head = c->kv_head * call.groups + (c->first + r) / a.n_q;
        c->ranges[r] = keys_of(c->pairs_at(r), c->query_at(r));
        pack_scaled(rows_of<Element>(a, a.q, c->item, head), c->query_at(r), a.d_k, call.factor,
                    c->q + r * call.q_step, &c->q_most);
        if (c->split == 0) c->sums[r] = sink_of<T>(a, head);
    }
    memset(c->out, 0, sizeof(T) * padded * call.padded);
}

/// The union of the key ranges of rows [from, to).
template <class Element> Range union_of(const Chunk<Element> &c, int64_t from, int64_t to) {
    Range all = {c.call->a->n_k, 0};
    for (int64_t r = from; r < to; r++) {
        if (c.ranges[r].first >= c.ranges[r].stop) continue;
        all.first = lesser(all.first, c.ranges[r].first);
        all.stop = greater(all.stop, c.ranges[r].stop);
    }
    return all;
}

/// Pack the keys and values of panels [from, to) of the block at key `block`, those that are not packed yet.
template <class Element> void pack_block(Chunk<Element> *c, int64_t block, int64_t from, int64_t to) {
    typedef Wide<Element> T;
    const Call<Element> &call = *c->call;
    const Attention &a = *call.a;
    for (int64_t p = from; p < to; p++) {
        if (c->packed[p]) continue;
        c->packed[p] = true;
        int64_t key = block + p * PANEL<T>, count = lesser(PANEL<T>, c->stop - key);
        if (call.rows > FEW)
            pack_panel(rows_of<Element>(a, a.k, c->item, c->kv_head), key, count, a.d_k,
                       c->panels + p * PANEL<T> * a.d_k, c->spare, &c->k_most);
        if (!call.values_in_place)
            pack_rows(rows_of<Element>(a, a.v, c->item, c->kv_head), key, count, a.d_v, call.padded,
                      c->values + p * PANEL<T> * call.padded);
    }
}

/// scores (rows, n) of ROWS or GROUP rows from row `row`, for the n keys from panel `panel` of the block on.
template <class Element> void multiply_keys(Chunk<Element> *c, int64_t row, int64_t rows, int64_t panel, int64_t n) {
    typedef Wide<Element> T;
    int64_t d_k = c->call->a->d_k, q_step = c->call->q_step;
    for (int64_t x = 0; x < n; x += PANEL<T>) {
        const T *of_panel = c->panels + (panel * PANEL<T> + x) * d_k;
        int vectors = static_cast<int>((lesser(n - x, PANEL<T>) + LANES<T> - 1) / LANES<T>);
        for (int64_t r = 0; r < rows; r += ROWS)
            multiply_vectors<T, ROWS, FROM_ZERO>(vectors, c->q + (row + r) * q_step, q_step, 1, of_panel, PANEL<T>, d_k,
                                                 c->scores + r * SCORES_ROW + x, SCORES_ROW, nullptr);
    }
}

/// The sums of LANES products of q (d padded to whole vectors) with the rows at `keys`, of which `there` exist.
template <class T> POLYATTN_INLINE Vector<T> dot_products(const T *q, const T *keys, int64_t step, int64_t there, int64_t d) {
    Vector<T> sums[LANES<T>];
    POLYATTN_UNROLL
    for (int i = 0; i < LANES<T>; i++) sums[i] = Vector<T>{};
    for (int64_t f = 0; f < d; f += LANES<T>) {
        Vector<T> of_q = load(q + f);
        POLYATTN_UNROLL
        for (int i = 0; i < LANES<T>; i++)
            if (i < there) sums[i] += of_q * load(keys + i * step + f);
    }
    return sums_of<T>(sums);
}

/// scores (rows, n) of at most FEW rows for n keys from key `key` on, row by row of the keys.
template <class Element> void multiply_few(Chunk<Element> *c, int64_t row, int64_t rows, int64_t key, int64_t n) {
    typedef Wide<Element> T;
    const Call<Element> &call = *c->call;
    Rows<Element> k = rows_of<Element>(*call.a, call.a->k, c->item, c->kv_head);
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
template <class Element> Wide<Element> weigh(Chunk<Element> *c, int64_t row, Wide<Element> *scores, int64_t key, int64_t n) {
    typedef Wide<Element> T;
    const Call<Element> &call = *c->call;
    int64_t vectors = (n + LANES<T> - 1) / LANES<T>;
    if (call.softcap != 0) cap_row(scores, vectors, call.softcap);
    const Pairs<T> &pairs = c->pairs_at(row);
    if (call.has_addends) {
        addends_of(pairs, c->query_at(row), key, n, call.log2e, c->spare);
        for (int64_t x = n; x < vectors * LANES<T>; x++) c->spare[x] = 0;
        add_row(scores, c->spare, vectors);
    }
    Range range = c->ranges[row];
    if (range.first > key || range.stop < key + vectors * LANES<T>)
        exclude_outside(scores, range.first - key, range.stop - key, vectors);
    T factor = advance(c->sums + row, scores, vectors);
    if (pairs.drop_below) {
        keeps_of(pairs, c->query_at(row), key, n, c->spare);
        for (int64_t x = 0; x < n; x++) scores[x] = c->spare[x] != 0 ? scores[x] * c->spare[x] : 0;
    }
    return factor;
}

/// multiply_tile for `rows` rows of weights, 1 to R.
template <class T, int R>
void multiply_values(int64_t rows, int64_t vectors, const T *weights, const T *values, int64_t step, int64_t n, T *out,
                     int64_t out_step, const T *factors) {
    if (rows == R)
        multiply_tile<T, R, FROM_SCALED>(vectors, weights, SCORES_ROW, 1, values, step, n, out, out_step, factors);
    else if constexpr (R > 1)
        multiply_values<T, R - 1>(rows, vectors, weights, values, step, n, out, out_step, factors);
}

/// Add n keys from panel `panel` of the block at key `block` to the sums of `rows` rows from row `row` on.
template <class Element> void add_keys(Chunk<Element> *c, int64_t row, int64_t rows, int64_t block, int64_t panel, int64_t n) {
    typedef Wide<Element> T;
    const Call<Element> &call = *c->call;
    const Attention &a = *call.a;
    bool few = call.rows <= FEW;
    int64_t padded_rows = few ? rows : (rows + ROWS - 1) / ROWS * ROWS, key = block + panel * PANEL<T>;
    pack_block(c, block, panel, panel + (n + PANEL<T> - 1) / PANEL<T>);
    if (few) multiply_few(c, row, rows, key, n);
    else multiply_keys(c, row, padded_rows, panel, n);
    T factors[GROUP];
    for (int64_t r = 0; r < padded_rows; r++) factors[r] = 1;
    for (int64_t r = 0; r < rows; r++) factors[r] = weigh(c, row + r, c->scores + r * SCORES_ROW, key, n);
    const T *values = c->values + panel * PANEL<T> * call.padded;
    int64_t stride = call.padded;
    if (call.values_in_place) {
        Rows<Element> v = rows_of<Element>(a, a.v, c->item, c->kv_head);
        values = reinterpret_cast<const T *>(v.at(key)), stride = v.row;
    }
    T *out = c->out + row * call.padded;
    int64_t vectors = call.padded / LANES<T>;
    if (few) return multiply_values<T, FEW>(rows, vectors, c->scores, values, stride, n, out, call.padded, factors);
    for (int64_t r = 0; r < padded_rows; r += ROWS)
        multiply_rows<T, FROM_SCALED>(vectors, c->scores + r * SCORES_ROW, SCORES_ROW, 1, values, stride, n,
                                            out + r * call.padded, call.padded, factors + r);
}

/// Add the keys of the block that rows [row, row + rows) may see; runs of panels that a block mask excludes are skipped.
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
        for (int64_t r = row; r < row + rows; r++)
            if (!blocks_exclude(c->pairs_at(r), c->query_at(r), c->query_at(r) + 1, key,
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

/// Write out and the statistics, or with splits the sums; returns false if a result or an input is in doubt.
template <class Element> bool finish(Chunk<Element> *c) {
    const Call<Element> &call = *c->call;
    bool right = scores_fit(call, c->q_most.value(), c->k_most.value());
    for (int64_t r = 0; r < c->count; r++) {
        int64_t head = c->kv_head * call.groups + (c->first + r) / call.a->n_q;
        auto *sums = c->out + r * call.padded;
        if (call.splits > 1) {
            auto *partial = call.partial_at(c->item * call.a->kv_heads + c->kv_head, c->first + r, c->split);
            partial[0] = c->sums[r].largest, partial[1] = c->sums[r].total;
            memcpy(partial + LANES<Wide<Element>>, sums, sizeof(*sums) * call.padded);
        } else {
            right &= finish_row(call, c->item, head, c->query_at(r), c->sums[r], sums);
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
        if (!call.partial) return NO_MEMORY;
    }
    Chunk<Element> measured;
    size_t workspace = lay_out(&measured, call, nullptr).used;
    Status status = parallel_for(tasks * call.splits, threads, workspace, run_chunk<Element>, &call);
    if (status == OK && call.splits > 1) {
        parallel_for(heads * call.rows, 1, 0, merge_row<Element>, &call);
        free_memory(call.partial);
    }
    return status == OK && call.in_doubt() ? DOUBT : status;
}

}  // namespace

/// Compute out, largest and log_total.
POLYATTN_EXPORT int32_t polyattn_attention_forward(const Attention *a) {
    switch (a->dtype) {
    case FLOAT64: return run<double>(*a);
    case FLOAT16: return run<Half>(*a);
    case BFLOAT16: return run<Bfloat>(*a);
    default: return run<float>(*a);
    }
}
