// Layer norm and RMS norm along contiguous rows, and their backwards: the formulas of functional/_layer_norm.py and
// functional/_rms_norm.py without their scaling. A root or a mean outside the range where no square or product
// overflows or loses digits raises the flag; Python then computes the scaled formula.
#include "pieces.h"

namespace {

/// A number whose square, and the square of its inverse, are far inside the normal range; as `low` in _range.py.
template <class T> constexpr T LOW = static_cast<T>(sizeof(T) == 4 ? 0x1p-48 : 0x1p-384);

template <class T> struct Forward {
    int64_t rows, n, height;
    bool centred;  // layer norm
    T eps;
    Rows<const T> x;
    const T *weight, *bias;  // null if absent
    T *y, *xhat, *root;      // xhat is null for RMS norm, and if it is y
    Flag *flag;
};

/// The sum of (x − shift)ᵖ for p = 1 or 2 along a row.
template <class T, bool SQUARED> POLYATTN_INLINE T sum_along(const T *x, int64_t n, T shift, T rest) {
    Vector<T> a{}, b{};
    int64_t j = 0;
    for (; j + 2 * LANES<T> <= n; j += 2 * LANES<T>) {
        Vector<T> first = (load(x + j) - shift) - rest, second = (load(x + j + LANES<T>) - shift) - rest;
        a += SQUARED ? first * first : first;
        b += SQUARED ? second * second : second;
    }
    for (; j < n; j += LANES<T>) {
        Vector<T> first = (load_part(x + j, n - j, shift) - shift) - rest;
        if (n - j < LANES<T>) first = count_up<T>() < static_cast<T>(n - j) ? first : Vector<T>{};
        a += SQUARED ? first * first : first;
    }
    return sum_of<T>(a + b);
}

/// y = x̂ · weight + bias with x̂ = (x − mean) / √(var + eps), or without the mean.
template <class T> void forward_task(const void *context, int64_t task, void *) {
    const auto &c = *static_cast<const Forward<T> *>(context);
    const int64_t n = c.n;
    const T length = static_cast<T>(n);
    bool in_range = true;
    for (int64_t i = task * c.height; i < (task + 1) * c.height && i < c.rows; i++) {
        const T *x = c.x.at(i);
        // The first mean of a row far from zero has a rounding error, which the second one is.
        const T mean = c.centred ? sum_along<T, false>(x, n, 0, 0) / length : 0;
        const T rest = c.centred ? sum_along<T, false>(x, n, mean, 0) / length : 0;
        const T root = square_root<T>(broadcast<T>(sum_along<T, true>(x, n, mean, rest) / length + c.eps))[0];
        in_range = in_range && root <= 1 / LOW<T> && (c.eps >= LOW<T> * LOW<T> || root >= LOW<T>);
        c.root[i] = root;
        const T inverse = 1 / root;
        T *y = c.y + i * n, *xhat = c.xhat ? c.xhat + i * n : nullptr;
        for (int64_t j = 0; j < n; j += LANES<T>) {
            Vector<T> y_ = ((load_part(x + j, n - j) - mean) - rest) * inverse;
            if (xhat) store_part(xhat + j, y_, n - j);
            if (c.weight) y_ *= load_part(c.weight + j, n - j);
            if (c.bias) y_ += load_part(c.bias + j, n - j);
            store_part(y + j, y_, n - j);
        }
    }
    if (!in_range) c.flag->raise();
}

template <class T> struct Backward {
    int64_t rows, n, height;
    bool centred;
    Rows<const T> dy, x;  // x: x̂ for layer norm
    const T *root, *weight;
    T *dx;
    T *dweight, *dbias;  // (tasks, n) sums over the rows of each task; null if absent
    Flag *flag;
};

/// dx = (dx̂ − mean(dx̂) − x̂ · mean(dx̂ · x̂)) / root with dx̂ = dy · weight, without the first mean for RMS norm.
template <class T> void backward_task(const void *context, int64_t task, void *) {
    const auto &c = *static_cast<const Backward<T> *>(context);
    const int64_t n = c.n;
    const T length = static_cast<T>(n);
    T *dweight = c.dweight ? c.dweight + task * n : nullptr, *dbias = c.dbias ? c.dbias + task * n : nullptr;
    if (dweight) memset(dweight, 0, static_cast<size_t>(n) * sizeof(T));
    if (dbias) memset(dbias, 0, static_cast<size_t>(n) * sizeof(T));
    bool in_range = true;
    for (int64_t i = task * c.height; i < (task + 1) * c.height && i < c.rows; i++) {
        const T *dy = c.dy.at(i), *x = c.x.at(i), root = c.root[i], inverse = 1 / root;
        const T to_xhat = c.centred ? 1 : inverse;
        Vector<T> sums{}, products{};
        for (int64_t j = 0; j < n; j += LANES<T>) {
            Vector<T> dxhat = load_part(dy + j, n - j), xhat = load_part(x + j, n - j) * to_xhat;
            if (dbias) store_part(dbias + j, load_part(dbias + j, n - j) + dxhat, n - j);
            if (dweight) {
                store_part(dweight + j, load_part(dweight + j, n - j) + dxhat * xhat, n - j);
            }
            if (c.weight) dxhat *= load_part(c.weight + j, n - j);
            sums += dxhat;
            products += dxhat * xhat;
        }
        const T mean = c.centred ? sum_of<T>(sums) / length : 0, along = sum_of<T>(products) / length;
        const T size = (mean < 0 ? -mean : mean) + (along < 0 ? -along : along);
        in_range = in_range && size <= 1 / (LOW<T> * LOW<T>) && (size >= LOW<T> * LOW<T> || size == 0) &&
                   root >= static_cast<T>(0x1p-16) && root <= static_cast<T>(0x1p48);
        T *dx = c.dx + i * n;
        for (int64_t j = 0; j < n; j += LANES<T>) {
            Vector<T> dxhat = load_part(dy + j, n - j), xhat = load_part(x + j, n - j) * to_xhat;
            if (c.weight) dxhat *= load_part(c.weight + j, n - j);
            store_part(dx + j, (dxhat - mean - xhat * along) * inverse, n - j);
        }
    }
    if (!in_range) c.flag->raise();
}

/// total (n) = the sum of parts (count, n), in order; raise the flag if it is not finite.
template <class T> void add_up(const T *parts, int64_t count, int64_t n, T *total, Flag *flag) {
    Watch<T> watch;
    for (int64_t j = 0; j < n; j += LANES<T>) {
        Vector<T> sum{};
        for (int64_t k = 0; k < count; k++) sum += load_part(parts + k * n + j, n - j);
        watch.see(sum);
        store_part(total + j, sum, n - j);
    }
    if (watch.not_finite()) flag->raise();
}

/// The rows of a task: so many that there are at most 64 tasks, and enough for the work to outweigh its sums.
int64_t rows_of_task(int64_t rows, int64_t n) {
    const int64_t enough = n < 8192 ? 8192 / n : 1, few = (rows + 63) / 64;
    return enough > few ? enough : few;
}

template <class T>
Status forward(int32_t centred, int32_t threads, int64_t rows, int64_t n, double eps, const void *x, int64_t x_row,
               const void *weight, const void *bias, void *y, void *xhat, void *root) {
    Flag flag;
    const int64_t height = n < 8192 ? 8192 / n : 1;
    Forward<T> c = {rows, n, height, centred != 0, static_cast<T>(eps), {static_cast<const T *>(x), x_row},
                    static_cast<const T *>(weight), static_cast<const T *>(bias), static_cast<T *>(y),
                    static_cast<T *>(xhat), static_cast<T *>(root), &flag};
    const int64_t tasks = (rows + height - 1) / height;
    Status status = parallel_for(tasks, threads_for_elements(rows * n, threads), 0, forward_task<T>, &c);
    return status == OK ? flag.status() : status;
}

template <class T>
Status backward(int32_t centred, int32_t threads, int64_t rows, int64_t n, const void *dy, int64_t dy_row,
                const void *x, int64_t x_row, const void *root, const void *weight, void *dx, void *dweight,
                void *dbias, void *parts) {
    Flag flag;
    const int64_t height = rows_of_task(rows, n), tasks = (rows + height - 1) / height;
    T *first = static_cast<T *>(parts), *second = dweight ? first + tasks * n : first;
    Backward<T> c = {rows, n, height, centred != 0, {static_cast<const T *>(dy), dy_row},
                     {static_cast<const T *>(x), x_row}, static_cast<const T *>(root), static_cast<const T *>(weight),
                     static_cast<T *>(dx), dweight ? first : nullptr, dbias ? second : nullptr, &flag};
    Status status = parallel_for(tasks, threads_for_elements(rows * n, threads), 0, backward_task<T>, &c);
    if (dweight && status == OK) add_up(first, tasks, n, static_cast<T *>(dweight), &flag);
    if (dbias && status == OK) add_up(second, tasks, n, static_cast<T *>(dbias), &flag);
    return status == OK ? flag.status() : status;
}

}  // namespace

/// y, xhat (rows, n) and root (rows), contiguous, of x with rows at a distance of x_row elements.
POLYATTN_EXPORT int32_t polyattn_norm(int32_t dtype, int32_t centred, int32_t threads, int64_t rows, int64_t n,
                                      double eps, const void *x, int64_t x_row, const void *weight, const void *bias,
                                      void *y, void *xhat, void *root) {
    return (dtype == FLOAT64 ? forward<double> : forward<float>)(centred, threads, rows, n, eps, x, x_row, weight, bias,
                                                                 y, xhat, root);
}

/// The number of elements that polyattn_norm_backward needs at `parts` for each of dweight and dbias.
POLYATTN_EXPORT int64_t polyattn_norm_parts(int64_t rows, int64_t n) {
    const int64_t height = rows_of_task(rows, n);
    return (rows + height - 1) / height * n;
}

/// dx (rows, n), dweight and dbias (n), null if not wanted; x is x̂ for layer norm. The sums do not depend on threads.
POLYATTN_EXPORT int32_t polyattn_norm_backward(int32_t dtype, int32_t centred, int32_t threads, int64_t rows, int64_t n,
                                               const void *dy, int64_t dy_row, const void *x, int64_t x_row,
                                               const void *root, const void *weight, void *dx, void *dweight,
                                               void *dbias, void *parts) {
    return (dtype == FLOAT64 ? backward<double> : backward<float>)(centred, threads, rows, n, dy, dy_row, x, x_row,
                                                                   root, weight, dx, dweight, dbias, parts);
}
