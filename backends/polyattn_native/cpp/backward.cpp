// The backward of attention: the weights are computed again tile by tile, from the row statistics of the forward.
// Algorithm 4 of Dao et al., "FlashAttention" (2022), on transposed tiles.
#include "backward_rows.h"
#include "system.h"

namespace gradients {
namespace {

/// How the work is divided. Only the arguments and the number of threads decide it, so that results are repeatable.
struct Division {
    int64_t items, groups;  // entries of the batch; query heads of a key head
    int64_t chunks, keys;   // of the keys of a head, and the keys of a chunk
    int threads;

    int64_t tasks(const AttentionBackward &call) const { return items * call.forward.kv_heads * chunks; }
};

/// A task: some keys of one key head, and all query heads that use it.
struct Task {
    int64_t item, kv_head, chunk;
};

inline Task task_of(const AttentionBackward &call, const Division &division, int64_t number) {
    int64_t head = number / division.chunks;
    return {head / call.forward.kv_heads, head % call.forward.kv_heads, number % division.chunks};
}

/// Whether entries of the batch or heads add to the same elements of a gradient.
bool is_shared(const Attention &a, const Array &x) {
    bool shared = x.data && x.head == 0 && a.heads > 1;
    for (int axis = 0; axis < BATCH_AXES; axis++) shared |= x.data && x.batch[axis] == 0 && a.batch[axis] > 1;
    return shared;
}

/// Divide the keys of few heads into chunks, unless chunks would add to the same elements of a gradient of a bias.
Division divided(const AttentionBackward &call, bool own_statistics) {
    const Attention &a = call.forward;
    Division d = {items_of(a), a.heads / a.kv_heads, 1, a.n_k, 1};
    double pairs = double(a.n_q) * double(a.n_k) * double(d.items * a.heads);
    d.threads = threads_for(pairs * double(6 * a.d_k + 4 * a.d_v), a.threads);
    if (is_shared(a, call.dbias) || is_shared(a, call.ddistances)) d.threads = 1;
    int64_t heads = d.items * a.kv_heads, tiles = (a.n_k + KEYS - 1) / KEYS;
    bool whole = own_statistics || call.ddistances.data || (call.dbias.data && call.dbias.feature == 0);
    if (whole || heads % d.threads == 0 || heads >= 4 * d.threads) return d;
    int64_t wanted = lesser((4 * d.threads + heads - 1) / heads, tiles);
    d.keys = (tiles + wanted - 1) / wanted * KEYS;
    d.chunks = (a.n_k + d.keys - 1) / d.keys;
    return d;
}

/// What all tasks share.
template <class Element> struct Context {
    const AttentionBackward &call;
    Division division;
    bool own_statistics;
    Wide<Element> *partial;  // dq of each task and group, (n_q, wide_k), if there are several chunks
    mutable int doubt;       // set by any task: a result may be wrong
    mutable int large;       // set by any task: scores are so large that the forward's statistics do not fit

    int64_t wide_k() const { return rounded_up(call.forward.d_k, LANES<Wide<Element>>); }

    Wide<Element> *partial_of(int64_t task, int64_t group) const {
        return partial + (task * division.groups + group) * call.forward.n_q * wide_k();
    }
};

inline void raise(int *flag) { __atomic_store_n(flag, 1, __ATOMIC_RELAXED); }
inline bool is_raised(const int *flag) { return __atomic_load_n(flag, __ATOMIC_RELAXED); }

/// dq of one query head of a task: write it, or keep it until all chunks are there.
template <class Element>
void finish_queries(const Context<Element> &context, const Head<Wide<Element>> &h, const Task &task, int64_t number, int64_t group) {
    typedef Wide<Element> T;
    const AttentionBackward &call = context.call;
    int64_t head = task.kv_head * context.division.groups + group;
    if (context.partial) {
        memcpy(context.partial_of(number, group), h.dq, static_cast<size_t>(h.pairs.n_q * h.wide_k) * sizeof(T));
    } else {
        Element *to = head_of<Element>(call.forward, call.dq, task.item, head);
        if (!write_rows(h.dq, h.wide_k, h.pairs.n_q, h.d_k, T(call.forward.scale), to, call.dq)) raise(&context.doubt);
    }
    if (call.dsinks && task.chunk == 0) {
        T sink = static_cast<const T *>(call.forward.sinks)[head];
        double total = sink_gradient(h, sink);
        call.dsinks[task.item * call.forward.heads + head] = total;
        if (total - total != 0) raise(&context.doubt);
    }
}

/// Run one task.
template <class Element> void run_task(const void *shared, int64_t number, void *workspace) {
    typedef Wide<Element> T;
    const Context<Element> &context = *static_cast<const Context<Element> *>(shared);
    if (is_raised(&context.doubt) || is_raised(&context.large)) return;
    const AttentionBackward &call = context.call;
    const Attention &a = call.forward;
    Task task = task_of(call, context.division, number);
    Arena arena(workspace);
    Head<T> h = head_in<T>(call, context.division.keys, &arena);
    h.first_key = task.chunk * context.division.keys;
    h.n_k = lesser(context.division.keys, a.n_k - h.first_key);
    T largest_key = pack_keys<Element>(call, task.item, task.kv_head, &h);
    for (int64_t group = 0; group < context.division.groups; group++) {
        int64_t head = task.kv_head * context.division.groups + group;
        set_head(call, task.item, head, &h);
        T largest_query = pack_queries<Element>(call, task.item, head, &h);
        Size size = context.own_statistics ? OVERFLOWING : LARGE;
        if (!(largest_query * largest_key * T(__builtin_fabs(a.scale)) <= limit_of<T>(size)))
            return raise(context.own_statistics ? &context.doubt : &context.large);
        if (context.own_statistics) own_statistics<Element>(call, task.item, head, &h);
        else if (!row_statistics<Element>(call, task.item, head, &h)) return raise(&context.large);
        add_gradients(h);
        finish_queries(context, h, task, number, group);
    }
    Element *dk = head_of<Element>(a, call.dk, task.item, task.kv_head) + h.first_key * call.dk.row;
    Element *dv = head_of<Element>(a, call.dv, task.item, task.kv_head) + h.first_key * call.dv.row;
    bool finite = write_rows(h.dk, h.wide_k, h.n_k, h.d_k, T(a.scale), dk, call.dk);
    finite &= write_rows(h.dv, h.wide_v, h.n_k, h.d_v, T(1), dv, call.dv);
    if (!finite) raise(&context.doubt);
}

/// Sum dq of one query head over its chunks, in order, and write it.
template <class Element> void sum_chunks(const void *shared, int64_t number, void *) {
    typedef Wide<Element> T;
    const Context<Element> &context = *static_cast<const Context<Element> *>(shared);
    const AttentionBackward &call = context.call;
    const Division &division = context.division;
    int64_t head = number / division.groups, group = number % division.groups, size = call.forward.n_q * context.wide_k();
    T *total = context.partial_of(head * division.chunks, group);
    for (int64_t chunk = 1; chunk < division.chunks; chunk++) {
        const T *part = context.partial_of(head * division.chunks + chunk, group);
        for (int64_t x = 0; x < size; x++) total[x] += part[x];
    }
    int64_t item = head / call.forward.kv_heads, kv_head = head % call.forward.kv_heads;
    Element *to = head_of<Element>(call.forward, call.dq, item, kv_head * division.groups + group);
    const T scale = T(call.forward.scale);
    if (!write_rows(total, context.wide_k(), call.forward.n_q, call.forward.d_k, scale, to, call.dq)) raise(&context.doubt);
}

/// Run all tasks, with the statistics of the forward or with own ones. *large says whether own ones are needed.
template <class Element> Status run(const AttentionBackward &call, bool own, bool *large) {
    typedef Wide<Element> T;
    Context<Element> context = {call, divided(call, own), own, nullptr, 0, 0};
    const Division &division = context.division;
    Arena measure(nullptr);
    head_in<T>(call, division.keys, &measure);
    int64_t tasks = division.tasks(call);
    if (division.chunks > 1) {
        int64_t count = tasks * division.groups * call.forward.n_q * context.wide_k();
        context.partial = static_cast<T *>(aligned_memory(64, static_cast<size_t>(count) * sizeof(T)));
        if (!context.partial) return NO_MEMORY;
    }
    Status status = parallel_for(tasks, division.threads, measure.used, run_task<Element>, &context);
    if (status == OK && context.partial && !context.large && !context.doubt)
        status = parallel_for(tasks / division.chunks * division.groups, division.threads, 0, sum_chunks<Element>, &context);
    if (context.partial) free_memory(context.partial);
    *large = context.large;
    return status == OK && context.doubt ? DOUBT : status;
}

/// Zero an array (batch..., H, rows, features), to which tasks of a run without result have added.
template <class T> void zero(const Attention &a, const Array &x, int64_t rows, int64_t features) {
    for (int64_t item = 0; item < items_of(a); item++)
        for (int64_t head = 0; head < a.heads; head++)
            for (int64_t i = 0; i < rows; i++)
                for (int64_t c = 0; c < features; c++) head_of<T>(a, x, item, head)[i * x.row + c * x.feature] = 0;
}

/// The backward with the statistics of the forward, or with own ones if scores are large.
template <class Element> Status backward(const AttentionBackward &call) {
    bool large = false;
    Status status = run<Element>(call, false, &large);
    if (status != OK || !large) return status;
    if (call.dbias.data) zero<Wide<Element>>(call.forward, call.dbias, call.forward.n_q, call.forward.n_k);
    if (call.ddistances.data)
        zero<Wide<Element>>(call.forward, call.ddistances, call.forward.n_q + call.forward.n_k - 1, 1);
    return run<Element>(call, true, &large);
}

}  // namespace
}  // namespace gradients

/// The gradients of attention. See attention.h for the arguments.
POLYATTN_EXPORT int32_t polyattn_attention_backward(const AttentionBackward *call) {
    switch (call->forward.dtype) {
        case FLOAT32: return gradients::backward<float>(*call);
        case FLOAT64: return gradients::backward<double>(*call);
        case FLOAT16: return gradients::backward<Half>(*call);
        default: return gradients::backward<Bfloat>(*call);
    }
}
