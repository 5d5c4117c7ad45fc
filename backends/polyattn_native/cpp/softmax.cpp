// Softmax and log-softmax along contiguous rows, and their backwards.
#include "pieces.h"

namespace {

template <class Element> struct Context {
    int64_t rows, n, height;       // a task has `height` rows
    Lines<const Element> x, y;     // backward: dy and y
    Lines<Element> result;
    Flag *flag;
};

/// The largest of n numbers; NaN may be lost.
template <class Element> POLYATTN_INLINE Wide<Element> largest(const Element *x, int64_t n) {
    typedef Wide<Element> T;
    const T least = static_cast<T>(-__builtin_inf());
    Vector<T> a = broadcast(least), b = a;
    int64_t j = 0;
    for (; j + 2 * LANES<T> <= n; j += 2 * LANES<T>) {
        a = larger(load_part(x + j, LANES<T>), a);
        b = larger(load_part(x + j + LANES<T>, LANES<T>), b);
    }
    for (; j < n; j += LANES<T>) a = larger(load_part(x + j, n - j, least), a);
    return most_of<T>(larger(a, b));
}

/// Softmax of a row. NaN and a row of -inf give NaN, since x - max is NaN there.
template <class Element> void softmax_row(const Element *x, Element *y, int64_t n) {
    typedef Wide<Element> T;
    const T most = largest(x, n), least = static_cast<T>(-__builtin_inf());
    Vector<T> sums{};
    along<T>(n, [&](int64_t j, int64_t count) __attribute__((always_inline)) {
        Vector<T> e = exp_below<T>(load_part(x + j, count, least) - most);
        sums += e;
        if constexpr (sizeof(Element) == sizeof(T)) store_part(y + j, e, count);
    });
    const T total = sum_of<T>(sums), inverse = 1 / total;
    along<T>(n, [&](int64_t j, int64_t count) __attribute__((always_inline)) {
        Vector<T> e;
        if constexpr (sizeof(Element) == sizeof(T)) e = load_part(y + j, count);
        else e = exp_below<T>(load_part(x + j, count, least) - most);  // again, since y would round it
        store_part(y + j, e * inverse, count);
    });
}

/// Log-softmax of a row.
template <class Element> void log_softmax_row(const Element *x, Element *y, int64_t n) {
    typedef Wide<Element> T;
    const T most = largest(x, n), least = static_cast<T>(-__builtin_inf());
    Vector<T> sums{};
    along<T>(n, [&](int64_t j, int64_t count) __attribute__((always_inline)) {
        sums += exp_below<T>(load_part(x + j, count, least) - most);
    });
    const T log_total = static_cast<T>(log_of(static_cast<double>(sum_of<T>(sums))));
    along<T>(n, [&](int64_t j, int64_t count) __attribute__((always_inline)) {
        store_part(y + j, (load_part(x + j, count) - most) - log_total, count);
    });
}

template <class Element, bool LOGARITHM> void forward_task(const void *context, int64_t task, void *) {
    const auto &c = *static_cast<const Context<Element> *>(context);
    for (int64_t i = task * c.height; i < (task + 1) * c.height && i < c.rows; i++)
        (LOGARITHM ? log_softmax_row<Element> : softmax_row<Element>)(c.x.at(i), c.result.at(i), c.n);
}

/// dx = y · (dy − Σ dy · y), or dy − exp(y) · Σ dy for the logarithm.
template <class Element, bool LOGARITHM> void backward_task(const void *context, int64_t task, void *) {
    typedef Wide<Element> T;
    const auto &c = *static_cast<const Context<Element> *>(context);
    Watch<T> watch;
    for (int64_t i = task * c.height; i < (task + 1) * c.height && i < c.rows; i++) {
        const Element *dy = c.x.at(i), *y = c.y.at(i);
        Element *dx = c.result.at(i);
        Vector<T> sums{};
        along<T>(c.n, [&](int64_t j, int64_t count) __attribute__((always_inline)) {
            Vector<T> dy_ = load_part(dy + j, count);
            sums += LOGARITHM ? dy_ : dy_ * load_part(y + j, count);
        });
        const T sum = sum_of<T>(sums);
        along<T>(c.n, [&](int64_t j, int64_t count) __attribute__((always_inline)) {
            Vector<T> dy_ = load_part(dy + j, count), y_ = load_part(y + j, count);
            Vector<T> dx_ = LOGARITHM ? dy_ - exp_below<T>(y_) * sum : y_ * (dy_ - sum);
            watch.see(dx_);
            store_part(dx + j, dx_, count);
        });
    }
    if (watch.not_finite()) c.flag->raise();
}

template <class Element>
Status run(TaskBody body, int32_t threads, int64_t rows, int64_t n, const void *x, int64_t x_row, const void *y,
           int64_t y_row, void *result) {
    Flag flag;
    const int64_t height = n < 8192 ? 8192 / n : 1;
    Context<Element> c = {rows, n, height, {static_cast<const Element *>(x), x_row},
                          {static_cast<const Element *>(y), y_row}, {static_cast<Element *>(result), n}, &flag};
    const int64_t tasks = (rows + height - 1) / height;
    Status status = parallel_for(tasks, threads_for_elements(rows * n, threads), 0, body, &c);
    return status == OK ? flag.status() : status;
}

template <class Element>
Status forward(int32_t logarithm, int32_t threads, int64_t rows, int64_t n, const void *x, int64_t x_row, void *y) {
    TaskBody body = logarithm ? forward_task<Element, true> : forward_task<Element, false>;
    return run<Element>(body, threads, rows, n, x, x_row, nullptr, 0, y);
}

template <class Element>
Status backward(int32_t logarithm, int32_t threads, int64_t rows, int64_t n, const void *dy, int64_t dy_row,
                const void *y, int64_t y_row, void *dx) {
    TaskBody body = logarithm ? backward_task<Element, true> : backward_task<Element, false>;
    return run<Element>(body, threads, rows, n, dy, dy_row, y, y_row, dx);
}

}  // namespace

/// y (rows, n), contiguous, = softmax(x) along the rows, or its logarithm.
POLYATTN_EXPORT Status polyattn_softmax(int32_t dtype, int32_t logarithm, int32_t threads, int64_t rows, int64_t n,
                                         const void *x, int64_t x_row, void *y) {
    return FOR_DTYPE(dtype, forward)(logarithm, threads, rows, n, x, x_row, y);
}

/// dx (rows, n), contiguous, from dy and the forward's result.
POLYATTN_EXPORT Status polyattn_softmax_backward(int32_t dtype, int32_t logarithm, int32_t threads, int64_t rows,
                                                  int64_t n, const void *dy, int64_t dy_row, const void *y,
                                                  int64_t y_row, void *dx) {
    return FOR_DTYPE(dtype, backward)(logarithm, threads, rows, n, dy, dy_row, y, y_row, dx);
}
