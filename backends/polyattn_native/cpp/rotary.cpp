// Rotary position embedding: pairs of features rotated by given cosines and sines. The backward is the same with the
// sines negated.
// Products and sums are rounded one by one, so that the results are those of the formula in NumPy.
#include "unfused.h"

#include "pieces.h"

namespace {

template <class Element> struct Context {
    int64_t heads, n, d, half, height;  // a task has `height` rows of a head
    const Element *x;
    int64_t x_entry, x_head, x_row;
    const Wide<Element> *cos, *sin;     // (n, half) for an entry of the batch
    int64_t angles_entry;
    Element *y;

    int64_t tasks_of_head() const { return (n + height - 1) / height; }
};

/// The pairs are (x[j], x[half + j]).
template <class Element>
POLYATTN_INLINE void rotate_halves(const Element *x, const Wide<Element> *cos, const Wide<Element> *sin, int64_t half,
                                   Element *y) {
    typedef Wide<Element> T;
    along<T>(half, [&](int64_t j, int64_t count) __attribute__((always_inline)) {
        Vector<T> x1 = load_part(x + j, count), x2 = load_part(x + half + j, count);
        Vector<T> c = load_part(cos + j, count), s = load_part(sin + j, count);
        store_part(y + j, x1 * c - x2 * s, count);
        store_part(y + half + j, x2 * c + x1 * s, count);
    });
}

/// Lane i of the result is lane START + i / 2 of x.
template <int START, class V, int... I> POLYATTN_INLINE V doubled(V x, Numbers<I...>) {
    return __builtin_shufflevector(x, x, (START + I / 2)...);
}

/// Rotate the pairs in the first `count` lanes of a vector of features: (x1, x2) -> (x1 c - x2 s, x2 c + x1 s).
template <int START, class Element>
POLYATTN_INLINE void rotate_neighbours(const Element *x, Vector<Wide<Element>> cos, Vector<Wide<Element>> sin,
                                       int64_t count, Element *y) {
    typedef Wide<Element> T;
    constexpr LaneNumbers<T> lanes;
    Vector<T> sign = broadcast<T>(1);
    for (int i = 0; i < LANES<T>; i += 2) sign[i] = -1;
    Vector<T> x_ = load_part(x, count);
    Vector<T> crossed = swapped<1>(x_, lanes) * (doubled<START>(sin, lanes) * sign);
    store_part(y, x_ * doubled<START>(cos, lanes) + crossed, count);
}

/// The pairs are (x[2 j], x[2 j + 1]).
template <class Element>
POLYATTN_INLINE void rotate_pairs(const Element *x, const Wide<Element> *cos, const Wide<Element> *sin, int64_t half,
                                  Element *y) {
    typedef Wide<Element> T;
    along<T>(half, [&](int64_t j, int64_t count) __attribute__((always_inline)) {
        Vector<T> c = load_part(cos + j, count), s = load_part(sin + j, count);
        const int64_t features = 2 * count, rest = features - LANES<T>;
        rotate_neighbours<0>(x + 2 * j, c, s, features, y + 2 * j);
        if (rest > 0) rotate_neighbours<LANES<T> / 2>(x + 2 * j + LANES<T>, c, s, rest, y + 2 * j + LANES<T>);
    });
}

template <class Element, bool INTERLEAVED> void rotate_task(const void *context, int64_t task, void *) {
    const auto &c = *static_cast<const Context<Element> *>(context);
    const int64_t pair = task / c.tasks_of_head(), entry = pair / c.heads, head = pair % c.heads;
    const int64_t first = task % c.tasks_of_head() * c.height;
    const Element *x = c.x + entry * c.x_entry + head * c.x_head;
    const Wide<Element> *cos = c.cos + entry * c.angles_entry, *sin = c.sin + entry * c.angles_entry;
    for (int64_t i = first; i < first + c.height && i < c.n; i++) {
        const Element *row = x + i * c.x_row;
        Element *y = c.y + (pair * c.n + i) * c.d;
        (INTERLEAVED ? rotate_pairs<Element> : rotate_halves<Element>)(row, cos + i * c.half, sin + i * c.half,
                                                                       c.half, y);
        const int64_t rotated = 2 * c.half;
        memcpy(y + rotated, row + rotated, static_cast<size_t>(c.d - rotated) * sizeof(Element));
    }
}

template <class Element>
Status rotate(int32_t interleaved, int32_t threads, int64_t entries, int64_t heads, int64_t n, int64_t d, int64_t half,
              const void *x, const int64_t *x_steps, const void *cos, const void *sin, int64_t angles_entry, void *y) {
    typedef Wide<Element> T;
    constexpr int64_t ELEMENTS = 4096;
    Context<Element> c = {heads, n, d, half, d < ELEMENTS ? ELEMENTS / d : 1, static_cast<const Element *>(x),
                          x_steps[0], x_steps[1], x_steps[2], static_cast<const T *>(cos),
                          static_cast<const T *>(sin), angles_entry, static_cast<Element *>(y)};
    const double operations = 4.0 * static_cast<double>(entries * heads * n) * static_cast<double>(d);
    TaskBody body = interleaved ? rotate_task<Element, true> : rotate_task<Element, false>;
    return parallel_for(entries * heads * c.tasks_of_head(), threads_for(operations, threads), 0, body, &c);
}

}  // namespace

/// y (entries, heads, n, d), contiguous: x with the first 2 · half features of each row rotated by the angles of the
/// row; the others are copied. x has contiguous features, and steps between entries, heads and rows. cos and sin
/// (entries, n, half), in the type of the sums, have contiguous entries; a step of 0 is one for all.
POLYATTN_EXPORT Status polyattn_rotary(int32_t dtype, int32_t interleaved, int32_t threads, int64_t entries,
                                        int64_t heads, int64_t n, int64_t d, int64_t half, const void *x,
                                        const int64_t *x_steps, const void *cos, const void *sin,
                                        int64_t angles_entry, void *y) {
    return FOR_DTYPE(dtype, rotate)(interleaved, threads, entries, heads, n, d, half, x, x_steps, cos, sin,
                                    angles_entry, y);
}
