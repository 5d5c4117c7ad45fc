// The backward of attention: the weights are computed again tile by tile, from the row statistics of the forward.
// Algorithm 4 of Dao et al., "FlashAttention" (2022), on transposed tiles.
#include "backward_rows.h"
#include "system.h"

namespace gradients {
namespace {

/// How the work is divided. Only the arguments and the number of threads decide it, so that results are repeatable.
/// A task is some keys of one key head of one entry of the batch, with all query heads that use it; of all entries, or
/// of all heads, if they add to the same gradient of a bias.
struct Division {
    int64_t items, kv_heads, groups;  // entries of the batch; key heads; query heads of a key head
    bool all_items, all_heads;        // of a task
    int64_t chunks, keys;             // of the keys of a head, and the keys of a chunk
    int threads;

    int64_t tasks() const { return (all_items ? 1 : items) * (all_heads ? 1 : kv_heads) * chunks; }
};

/// Some keys of one key head.
struct Part {
    int64_t item, kv_head, chunk;

    int64_t number(const Division &d) const { return (item * d.kv_heads + kv_head) * d.chunks + chunk; }
};

/// Whether entries of the batch add to the same elements of a gradient.
bool is_shared(const Attention &a, const Array &x) {
    bool shared = false;
    for (int axis = 0; axis < BATCH_AXES; axis++) shared |= x.data && x.batch[axis] == 0 && a.batch[axis] > 1;
    return shared;
}

/// Divide the work into tasks. The keys of few heads are divided, unless chunks would add to the same gradients.
Division divided(const AttentionBackward &call) {
    const Attention &a = call.forward;
    Division d = {items_of(a), a.kv_heads, a.heads / a.kv_heads, false, false, 1, a.n_k, 1};
    double pairs = double(a.n_q) * double(a.n_k) * double(d.items * a.heads);
    d.threads = threads_for(pairs * double(6 * a.d_k + 4 * a.d_v), a.threads);
    d.all_items = is_shared(a, call.dbias) || is_shared(a, call.ddistances);
    d.all_heads = (call.dbias.data && call.dbias.head == 0) || (call.ddistances.data && call.ddistances.head == 0);
    int64_t apart = d.tasks(), tiles = (a.n_k + KEYS - 1) / KEYS;
    bool whole = call.ddistances.data || (call.dbias.data && call.dbias.feature == 0);
    if (whole || apart % d.threads == 0 || apart >= 4 * d.threads) return d;
    int64_t most = (d.all_items || d.all_heads ? 2 : 4) * d.threads;  // each chunk keeps dq of all its queries
    int64_t wanted = lesser((most + apart - 1) / apart, tiles);
    d.keys = (tiles + wanted - 1) / wanted * KEYS;
    d.chunks = (a.n_k + d.keys - 1) / d.keys;
    return d;
}

/// What all tasks share.
template <class Element> struct Context {
    const AttentionBackward &call;
    Division division;
    Wide<Element> *partial;  // dq of each part and query head, (n_q, wide_k), if there are several chunks
    mutable int doubt;       // set by any task: a result may be wrong

    int64_t wide_k() const { return rounded_up(call.forward.d_k, LANES<Wide<Element>>); }

    Wide<Element> *partial_of(const Part &part, int64_t group) const {
        return partial + (part.number(division) * division.groups + group) * call.forward.n_q * wide_k();
    }
};

inline void raise(int *flag) { __atomic_store_n(flag, 1, __ATOMIC_RELAXED); }
inline bool is_raised(const int *flag) { return __atomic_load_n(flag, __ATOMIC_RELAXED); }

/// dq of one query head of a part: write it, or keep it until all chunks are there.
template <class Element>
void finish_queries(const Context<Element> &context, const Head<Wide<Element>> &h, const Part &part, int64_t group) {
    typedef Wide<Element> T;
    const AttentionBackward &call = context.call;
    int64_t head = part.kv_head * context.division.groups + group;
    if (context.partial) {
        memcpy(context.partial_of(part, group), h.dq, static_cast<size_t>(h.pairs.n_q * h.wide_k) * sizeof(T));
    } else {
        Element *to = head_of<Element>(call.forward, call.dq, part.item, head);
        if (!write_rows(h.dq, h.wide_k, h.pairs.n_q, h.d_k, T(call.forward.scale), to, call.dq)) raise(&context.doubt);
    }
    if (call.dsinks && part.chunk == 0) {
        double total = sink_gradient(h, static_cast<const T *>(call.forward.sinks)[head]);
        call.dsinks[part.item * call.forward.heads + head] = total;
        if (total - total != 0) raise(&context.doubt);
    }
}

/// The gradients of the pairs of one query head and the keys of a part; false if there is no result.
template <class Element>
bool run_queries(const Context<Element> &context, const Part &part, int64_t group, Wide<Element> largest_key,
                 Head<Wide<Element>> *h) {
    typedef Wide<Element> T;
    const AttentionBackward &call = context.call;
    int64_t head = part.kv_head * context.division.groups + group;
    set_head(call, part.item, head, h);
    T bound = pack_queries<Element>(call, part.item, head, h) * largest_key * T(__builtin_fabs(call.forward.scale));
    // Of larger scores the generic kernel computes the statistics again, with the scores that it then uses.
    if (!(bound <= T(LARGE)) || !row_statistics<Element>(call, part.item, head, h)) return raise(&context.doubt), false;
    add_gradients<ProductsOf<Element>>(*h);
    finish_queries(context, *h, part, group);
    return true;
}

/// The gradients of all pairs of a part.
template <class Element> void run_part(const Context<Element> &context, const Part &part, void *workspace) {
    typedef Wide<Element> T;
    const AttentionBackward &call = context.call;
    const Attention &a = call.forward;
    Arena arena(workspace);
    Head<T> h = head_in<Element>(call, context.division.keys, &arena);
    h.first_key = part.chunk * context.division.keys;
    h.n_k = lesser(context.division.keys, a.n_k - h.first_key);
    T largest_key = pack_keys<Element>(call, part.item, part.kv_head, &h);
    for (int64_t group = 0; group < context.division.groups; group++)
        if (!run_queries(context, part, group, largest_key, &h)) return;
    Element *dk = head_of<Element>(a, call.dk, part.item, part.kv_head) + h.first_key * call.dk.row;
    Element *dv = head_of<Element>(a, call.dv, part.item, part.kv_head) + h.first_key * call.dv.row;
    bool finite = write_rows(h.dk, h.wide_k, h.n_k, h.d_k, T(a.scale), dk, call.dk);
    finite &= write_rows(h.dv, h.wide_v, h.n_k, h.d_v, T(1), dv, call.dv);
    if (!finite) raise(&context.doubt);
}

/// Run the parts of one task.
template <class Element> void run_task(const void *shared, int64_t number, void *workspace) {
    const Context<Element> &context = *static_cast<const Context<Element> *>(shared);
    const Division &d = context.division;
    int64_t heads = d.all_heads ? 1 : d.kv_heads, rest = number / d.chunks, item = rest / heads, head = rest % heads;
    for (int64_t i = d.all_items ? 0 : item; i < (d.all_items ? d.items : item + 1); i++) {
        for (int64_t j = d.all_heads ? 0 : head; j < (d.all_heads ? d.kv_heads : head + 1); j++) {
            if (is_raised(&context.doubt)) return;
            run_part(context, Part{i, j, number % d.chunks}, workspace);
        }
    }
}

/// Sum dq of one query head over its chunks, in order, and write it.
template <class Element> void sum_chunks(const void *shared, int64_t number, void *) {
    typedef Wide<Element> T;
    const Context<Element> &context = *static_cast<const Context<Element> *>(shared);
    const AttentionBackward &call = context.call;
    const Division &d = context.division;
    int64_t head = number / d.groups, group = number % d.groups, size = call.forward.n_q * context.wide_k();
    Part part = {head / d.kv_heads, head % d.kv_heads, 0};
    T *total = context.partial_of(part, group);
    for (part.chunk = 1; part.chunk < d.chunks; part.chunk++) {
        const T *more = context.partial_of(part, group);
        for (int64_t x = 0; x < size; x++) total[x] += more[x];
    }
    Element *to = head_of<Element>(call.forward, call.dq, part.item, part.kv_head * d.groups + group);
    const Attention &a = call.forward;
    bool finite = write_rows(total, context.wide_k(), a.n_q, a.d_k, T(a.scale), to, call.dq);
    if (!finite) raise(&context.doubt);
}

/// Run all tasks.
template <class Element> Status backward(const AttentionBackward &call) {
    typedef Wide<Element> T;
    Context<Element> context = {call, divided(call), nullptr, 0};
    const Division &d = context.division;
    Arena measure(nullptr);
    head_in<Element>(call, d.keys, &measure);
    int64_t heads = d.items * call.forward.heads;
    if (d.chunks > 1) {
        size_t size = sizeof(T) * static_cast<size_t>(d.chunks * heads * call.forward.n_q * context.wide_k());
        context.partial = static_cast<T *>(aligned_memory(64, size));
        if (!context.partial) return static_cast<Status>(size);
    }
    Status status = parallel_for(d.tasks(), d.threads, measure.used, run_task<Element>, &context);
    if (status == OK && context.partial && !context.doubt)
        status = parallel_for(heads, d.threads, 0, sum_chunks<Element>, &context);
    if (context.partial) free_memory(context.partial);
    return status == OK && context.doubt ? DOUBT : status;
}

}  // namespace
}  // namespace gradients

/// The gradients of attention. See attention.h for the arguments.
POLYATTN_EXPORT Status polyattn_attention_backward(const AttentionBackward *call) {
    switch (call->forward.dtype) {
        case FLOAT32: return gradients::backward<float>(*call);
        case FLOAT64: return gradients::backward<double>(*call);
        case FLOAT16: return gradients::backward<Half>(*call);
        default: return gradients::backward<Bfloat>(*call);
    }
}
