// Softmax and log-softmax along contiguous rows, and their backwards.
#include "pieces.h"

namespace {

template <class T> struct Context {
    int64_t rows, n, height;  // a task has `height` rows
    Lines<const T> x, y;       // backward: dy and y
    Lines<T> result;
    Flag *flag;
};

/// The largest of n numbers; NaN may be lost.
template <class T> POLYATTN_INLINE T largest(const T *x, int64_t n) {
    const T least = static_cast<T>(-__builtin_inf());
    Vector<T> a = broadcast(least), b = a;
    int64_t j = 0;
    for (; j + 2 * LANES<T> <= n; j += 2 * LANES<T>) {
        a = larger(load(x + j), a);
        b = larger(load(x + j + LANES<T>), b);
    }
    for (; j < n; j += LANES<T>) a = larger(load_part(x + j, n - j, least), a);
    return most_of<T>(larger(a, b));
}

/// Softmax of a row. NaN and a row of -inf give NaN, since x - max is NaN there.
template <class T> void softmax_row(const T *x, T *y, int64_t n) {
    const T most = largest(x, n), least = static_cast<T>(-__builtin_inf());
    Vector<T> sums{};
    along<T>(n, [&](int64_t j, int64_t count) __attribute__((always_inline)) {
        Vector<T> e = exp_below<T>(load_part(x + j, count, least) - most);
        sums += e;
        store_part(y + j, e, count);
    });
    const T total = sum_of<T>(sums), inverse = 1 / total;
    along<T>(n, [&](int64_t j, int64_t count) __attribute__((always_inline)) {
        store_part(y + j, load_part(y + j, count) * inverse, count);
    });
}

/// Log-softmax of a row.
template <class T> void log_softmax_row(const T *x, T *y, int64_t n) {
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

template <class T, bool LOGARITHM> void forward_task(const void *context, int64_t task, void *) {
    const auto &c = *static_cast<const Context<T> *>(context);
    for (int64_t i = task * c.height; i < (task + 1) * c.height && i < c.rows; i++)
        (LOGARITHM ? log_softmax_row<T> : softmax_row<T>)(c.x.at(i), c.result.at(i), c.n);
}

/// dx = y · (dy − Σ dy · y), or dy − exp(y) · Σ dy for the logarithm.
template <class T, bool LOGARITHM> void backward_task(const void *context, int64_t task, void *) {
    const auto &c = *static_cast<const Context<T> *>(context);
    Watch<T> watch;
    for (int64_t i = task * c.height; i < (task + 1) * c.height && i < c.rows; i++) {
        const T *dy = c.x.at(i), *y = c.y.at(i);
        T *dx = c.result.at(i);
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

template <class T>
Status run(TaskBody body, int32_t threads, int64_t rows, int64_t n, const void *x, int64_t x_row, const void *y,
           int64_t y_row, void *result) {
    Flag flag;
    const int64_t height = n < 8192 ? 8192 / n : 1;
    Context<T> c = {rows, n, height, {static_cast<const T *>(x), x_row}, {static_cast<const T *>(y), y_row},
                    {static_cast<T *>(result), n}, &flag};
    const int64_t tasks = (rows + height - 1) / height;
    Status status = parallel_for(tasks, threads_for_elements(rows * n, threads), 0, body, &c);
    return status == OK ? flag.status() : status;
}

template <class T>
Status forward(int32_t logarithm, int32_t threads, int64_t rows, int64_t n, const void *x, int64_t x_row, void *y) {
    TaskBody body = logarithm ? forward_task<T, true> : forward_task<T, false>;
    return run<T>(body, threads, rows, n, x, x_row, nullptr, 0, y);
}

template <class T>
Status backward(int32_t logarithm, int32_t threads, int64_t rows, int64_t n, const void *dy, int64_t dy_row,
                const void *y, int64_t y_row, void *dx) {
    TaskBody body = logarithm ? backward_task<T, true> : backward_task<T, false>;
    return run<T>(body, threads, rows, n, dy, dy_row, y, y_row, dx);
}

}  // namespace

/// y (rows, n), contiguous, = softmax(x) along the rows, or its logarithm.
POLYATTN_EXPORT Status polyattn_softmax(int32_t dtype, int32_t logarithm, int32_t threads, int64_t rows, int64_t n,
                                         const void *x, int64_t x_row, void *y) {
    return (dtype == FLOAT64 ? forward<double> : forward<float>)(logarithm, threads, rows, n, x, x_row, y);
}

/// dx (rows, n), contiguous, from dy and the forward's result.
POLYATTN_EXPORT Status polyattn_softmax_backward(int32_t dtype, int32_t logarithm, int32_t threads, int64_t rows,
                                                  int64_t n, const void *dy, int64_t dy_row, const void *y,
                                                  int64_t y_row, void *dx) {
    return (dtype == FLOAT64 ? backward<double> : backward<float>)(logarithm, threads, rows, n, dy, dy_row, y, y_row,
                                                                   dx);
}
