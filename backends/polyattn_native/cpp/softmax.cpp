// Softmax and log-softmax along contiguous rows, and their backwards.
#include "pieces.h"

namespace {

template <class T> struct Context {
    int64_t rows, n, height;  // a task has `height` rows
    Rows<const T> x, y;       // backward: dy and y
    Rows<T> result;
    bool logarithm;
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
template <class T> POLYATTN_INLINE void softmax_row(const T *x, T *y, int64_t n) {
    const T most = largest(x, n), least = static_cast<T>(-__builtin_inf());
    Vector<T> sums{};
    for (int64_t j = 0; j < n; j += LANES<T>) {
        Vector<T> e = exp_below<T>(load_part(x + j, n - j, least) - most);
        sums += e;
        store_part(y + j, e, n - j);
    }
    const T total = sum_of<T>(sums), inverse = 1 / total;
    for (int64_t j = 0; j < n; j += LANES<T>) store_part(y + j, load_part(y + j, n - j) * inverse, n - j);
}

/// Log-softmax of a row.
template <class T> POLYATTN_INLINE void log_softmax_row(const T *x, T *y, int64_t n) {
    const T most = largest(x, n), least = static_cast<T>(-__builtin_inf());
    Vector<T> sums{};
    for (int64_t j = 0; j < n; j += LANES<T>) sums += exp_below<T>(load_part(x + j, n - j, least) - most);
    const T log_total = static_cast<T>(log_of(static_cast<double>(sum_of<T>(sums))));
    for (int64_t j = 0; j < n; j += LANES<T>)
        store_part(y + j, (load_part(x + j, n - j) - most) - log_total, n - j);
}

template <class T> void forward_task(const void *context, int64_t task, void *) {
    const auto &c = *static_cast<const Context<T> *>(context);
    for (int64_t i = task * c.height; i < (task + 1) * c.height && i < c.rows; i++) {
        if (c.logarithm)
            log_softmax_row(c.x.at(i), c.result.at(i), c.n);
        else
            softmax_row(c.x.at(i), c.result.at(i), c.n);
    }
}

/// dx = y · (dy − Σ dy · y), or dy − exp(y) · Σ dy for the logarithm.
template <class T> void backward_task(const void *context, int64_t task, void *) {
    const auto &c = *static_cast<const Context<T> *>(context);
    Watch<T> watch;
    for (int64_t i = task * c.height; i < (task + 1) * c.height && i < c.rows; i++) {
        const T *dy = c.x.at(i), *y = c.y.at(i);
        T *dx = c.result.at(i);
        Vector<T> sums{};
        for (int64_t j = 0; j < c.n; j += LANES<T>) {
            Vector<T> part = load_part(dy + j, c.n - j);
            sums += c.logarithm ? part : part * load_part(y + j, c.n - j);
        }
        const T sum = sum_of<T>(sums);
        for (int64_t j = 0; j < c.n; j += LANES<T>) {
            Vector<T> dy_ = load_part(dy + j, c.n - j), y_ = load_part(y + j, c.n - j);
            Vector<T> dx_ = c.logarithm ? dy_ - exp_below<T>(y_) * sum : y_ * (dy_ - sum);
            watch.see(dx_);
            store_part(dx + j, dx_, c.n - j);
        }
    }
    if (watch.not_finite()) c.flag->raise();
}

template <class T>
Status run(TaskBody body, int32_t logarithm, int32_t threads, int64_t rows, int64_t n, const void *x, int64_t x_row,
           const void *y, int64_t y_row, void *result) {
    Flag flag;
    const int64_t height = n < 8192 ? 8192 / n : 1;
    Context<T> c = {rows, n, height, {static_cast<const T *>(x), x_row}, {static_cast<const T *>(y), y_row},
                    {static_cast<T *>(result), n}, logarithm != 0, &flag};
    const int64_t tasks = (rows + height - 1) / height;
    Status status = parallel_for(tasks, threads_for_elements(rows * n, threads), 0, body, &c);
    return status == OK ? flag.status() : status;
}

}  // namespace

/// y (rows, n), contiguous, = softmax(x) along the rows, or its logarithm.
POLYATTN_EXPORT int32_t polyattn_softmax(int32_t dtype, int32_t logarithm, int32_t threads, int64_t rows, int64_t n,
                                         const void *x, int64_t x_row, void *y) {
    return dtype == FLOAT64
               ? run<double>(forward_task<double>, logarithm, threads, rows, n, x, x_row, nullptr, 0, y)
               : run<float>(forward_task<float>, logarithm, threads, rows, n, x, x_row, nullptr, 0, y);
}

/// dx (rows, n), contiguous, from dy and the forward's result.
POLYATTN_EXPORT int32_t polyattn_softmax_backward(int32_t dtype, int32_t logarithm, int32_t threads, int64_t rows,
                                                  int64_t n, const void *dy, int64_t dy_row, const void *y,
                                                  int64_t y_row, void *dx) {
    return dtype == FLOAT64
               ? run<double>(backward_task<double>, logarithm, threads, rows, n, dy, dy_row, y, y_row, dx)
               : run<float>(backward_task<float>, logarithm, threads, rows, n, dy, dy_row, y, y_row, dx);
}
