// Layer norm and RMS norm along contiguous rows, and their backwards: the formulas of functional/_layer_norm.py and
// functional/_rms_norm.py without their scaling. A root or a mean outside the range where no square or product
// overflows or loses digits raises the flag; Python then computes the scaled formula.
#include "pieces.h"

namespace {

/// A number whose square, and the square of its inverse, are far inside the normal range; as `low` in _range.py.
template <class T> constexpr T LOW = static_cast<T>(sizeof(T) == 4 ? 0x1p-48 : 0x1p-384);

/// Rows that are computed at the same time, since the sums of one row wait for each other.
constexpr int TOGETHER = 4;

template <class Element> struct Forward {
    typedef Wide<Element> T;

    int64_t rows, n, height;
    bool centred;  // layer norm
    T eps;
    Lines<const Element> x;
    const Element *weight, *bias;  // null if absent
    Element *y;
    T *xhat, *root;  // xhat is null for RMS norm, and if it is y
    Flag *flag;
};

/// The sums of (x − shift) − rest along some rows, and of its squares.
template <class T, int ROWS> struct Sums {
    T first[ROWS], second[ROWS];

    template <class Element>
    POLYATTN_INLINE Sums(const Lines<const Element> &x, int64_t i, int64_t n, const T *shift, const T *rest) {
        Vector<T> a[ROWS]{}, b[ROWS]{};
        along<T>(n, [&](int64_t j, int64_t count) __attribute__((always_inline)) {
            POLYATTN_UNROLL
            for (int r = 0; r < ROWS; r++) {
                Vector<T> c = (load_part(x.at(i + r, j), count) - shift[r]) - rest[r];
                if (count < LANES<T>) c = count_up<T>() < static_cast<T>(count) ? c : Vector<T>{};
                a[r] += c;
                b[r] += c * c;
            }
        });
        for (int r = 0; r < ROWS; r++) first[r] = sum_of<T>(a[r]), second[r] = sum_of<T>(b[r]);
    }
};

/// The mean of each row as the sum of two numbers, and the mean of the squares of the differences from it.
template <class T, int ROWS> struct Moments {
    T mean[ROWS]{}, rest[ROWS]{}, square[ROWS];

    template <class Element>
    POLYATTN_INLINE Moments(const Lines<const Element> &x, int64_t i, int64_t n, bool centred) {
        const T inverse = 1 / static_cast<T>(n), zero[ROWS]{};
        bool accurate = true;
        Sums<T, ROWS> plain(x, i, n, zero, zero);
        for (int r = 0; r < ROWS; r++) mean[r] = centred ? plain.first[r] * inverse : 0;
        for (int r = 0; r < ROWS; r++) square[r] = plain.second[r] * inverse;
        if (!centred) return;
        // The first mean of a row far from zero has a rounding error, which is the mean of the differences.
        Sums<T, ROWS> sums(x, i, n, mean, zero);
        for (int r = 0; r < ROWS; r++) {
            rest[r] = sums.first[r] * inverse;
            square[r] = sums.second[r] * inverse;
            accurate = accurate && rest[r] * rest[r] <= square[r] * static_cast<T>(1.0 / 64);
            square[r] -= rest[r] * rest[r];
        }
        if (accurate) return;  // else the difference has lost digits
        Sums<T, ROWS> again(x, i, n, mean, rest);
        for (int r = 0; r < ROWS; r++) square[r] = again.second[r] * inverse;
    }
};

/// y = x̂ · weight + bias with x̂ = (x − mean) / √(var + eps), or without the mean, for some rows.
template <class Element, int ROWS> POLYATTN_INLINE void forward_rows(const Forward<Element> &c, int64_t i) {
    typedef Wide<Element> T;
    const int64_t n = c.n;
    const Moments<T, ROWS> of_rows(c.x, i, n, c.centred);
    T inverse[ROWS];
    for (int r = 0; r < ROWS; r++) {
        const T root = square_root<T>(broadcast<T>(of_rows.square[r] + c.eps))[0];
        if (!(root <= 1 / LOW<T> && (c.eps >= LOW<T> * LOW<T> || root >= LOW<T>))) c.flag->raise();
        c.root[i + r] = root;
        inverse[r] = 1 / root;
    }
    along<T>(n, [&](int64_t j, int64_t count) __attribute__((always_inline)) {
        const Vector<T> weight = c.weight ? load_part(c.weight + j, count) : broadcast<T>(1);
        const Vector<T> bias = c.bias ? load_part(c.bias + j, count) : Vector<T>{};
        POLYATTN_UNROLL
        for (int r = 0; r < ROWS; r++) {
            Vector<T> xhat = ((load_part(c.x.at(i + r, j), count) - of_rows.mean[r]) - of_rows.rest[r]) * inverse[r];
            if (c.xhat) store_part(c.xhat + (i + r) * n + j, xhat, count);
            store_part(c.y + (i + r) * n + j, xhat * weight + bias, count);
        }
    });
}

template <class Element> void forward_task(const void *context, int64_t task, void *) {
    const auto &c = *static_cast<const Forward<Element> *>(context);
    int64_t i = task * c.height;
    const int64_t end = i + c.height < c.rows ? i + c.height : c.rows;
    for (; i + TOGETHER <= end; i += TOGETHER) forward_rows<Element, TOGETHER>(c, i);
    for (; i < end; i++) forward_rows<Element, 1>(c, i);
}

/// X is the type of x, or of x̂ for layer norm.
template <class Element, class X> struct Backward {
    typedef Wide<Element> T;

    int64_t rows, n, height;
    bool centred;
    Lines<const Element> dy;
    Lines<const X> x;
    const T *root;
    const Element *weight;
    Element *dx;
    T *dweight, *dbias;  // (tasks, n) sums over the rows of each task; null if absent
    Flag *flag;
};

/// dx = (dx̂ − mean(dx̂) − x̂ · mean(dx̂ · x̂)) / root with dx̂ = dy · weight for some rows, without the first mean for RMS
/// norm. Their parts of dweight and dbias are added to those of the task.
template <int ROWS, class Element, class X>
POLYATTN_INLINE void backward_rows(const Backward<Element, X> &c, int64_t i, Wide<Element> *dweight,
                                   Wide<Element> *dbias) {
    typedef Wide<Element> T;
    const int64_t n = c.n;
    Vector<T> sums[ROWS]{}, products[ROWS]{};
    T inverse[ROWS], to_xhat[ROWS], mean[ROWS], projection[ROWS];
    for (int r = 0; r < ROWS; r++) inverse[r] = 1 / c.root[i + r], to_xhat[r] = c.centred ? 1 : inverse[r];
    along<T>(n, [&](int64_t j, int64_t count) __attribute__((always_inline)) {
        const Vector<T> weight = c.weight ? load_part(c.weight + j, count) : broadcast<T>(1);
        Vector<T> dgain{}, dshift{};
        POLYATTN_UNROLL
        for (int r = 0; r < ROWS; r++) {
            Vector<T> dy = load_part(c.dy.at(i + r, j), count), xhat = load_part(c.x.at(i + r, j), count) * to_xhat[r];
            dshift += dy;
            dgain += dy * xhat;
            dy *= weight;
            sums[r] += dy;
            products[r] += dy * xhat;
        }
        if (dweight) store_part(dweight + j, load_part(dweight + j, count) + dgain, count);
        if (dbias) store_part(dbias + j, load_part(dbias + j, count) + dshift, count);
    });
    for (int r = 0; r < ROWS; r++) {
        mean[r] = c.centred ? sum_of<T>(sums[r]) / static_cast<T>(n) : 0;
        projection[r] = sum_of<T>(products[r]) / static_cast<T>(n);
        const T root = c.root[i + r], size = magnitude(mean[r]) + magnitude(projection[r]);
        if (!(size <= 1 / (LOW<T> * LOW<T>) && (size >= LOW<T> * LOW<T> || size == 0) &&
              root >= static_cast<T>(0x1p-16) && root <= static_cast<T>(0x1p48)))
            c.flag->raise();
    }
    along<T>(n, [&](int64_t j, int64_t count) __attribute__((always_inline)) {
        const Vector<T> weight = c.weight ? load_part(c.weight + j, count) : broadcast<T>(1);
        POLYATTN_UNROLL
        for (int r = 0; r < ROWS; r++) {
            Vector<T> dxhat = load_part(c.dy.at(i + r, j), count) * weight;
            Vector<T> xhat = load_part(c.x.at(i + r, j), count) * to_xhat[r];
            store_part(c.dx + (i + r) * n + j, (dxhat - mean[r] - xhat * projection[r]) * inverse[r], count);
        }
    });
}

template <class Element, class X> void backward_task(const void *context, int64_t task, void *) {
    typedef Wide<Element> T;
    const auto &c = *static_cast<const Backward<Element, X> *>(context);
    T *dweight = c.dweight ? c.dweight + task * c.n : nullptr, *dbias = c.dbias ? c.dbias + task * c.n : nullptr;
    if (dweight) memset(dweight, 0, static_cast<size_t>(c.n) * sizeof(T));
    if (dbias) memset(dbias, 0, static_cast<size_t>(c.n) * sizeof(T));
    int64_t i = task * c.height;
    const int64_t end = i + c.height < c.rows ? i + c.height : c.rows;
    for (; i + TOGETHER <= end; i += TOGETHER) backward_rows<TOGETHER>(c, i, dweight, dbias);
    for (; i < end; i++) backward_rows<1>(c, i, dweight, dbias);
}

/// total (n) = the sum of parts (tasks, n), in order; raise the flag if it is not finite.
template <class Element>
void add_up(const Wide<Element> *parts, int64_t tasks, int64_t n, Element *total, Flag *flag) {
    typedef Wide<Element> T;
    Watch<T> watch;
    along<T>(n, [&](int64_t j, int64_t count) __attribute__((always_inline)) {
        Vector<T> sum{};
        for (int64_t k = 0; k < tasks; k++) sum += load_part(parts + k * n + j, count);
        watch.see(sum);
        store_part(total + j, sum, count);
    });
    if (watch.not_finite()) flag->raise();
}

/// The rows of a task: so many that there are at most 64 tasks, and enough for the work to outweigh its sums.
int64_t rows_of_task(int64_t rows, int64_t n) {
    const int64_t enough = n < 8192 ? 8192 / n : 1, few = (rows + 63) / 64;
    return enough > few ? enough : few;
}

template <class Element>
Status forward(int32_t centred, int32_t threads, int64_t rows, int64_t n, double eps, const void *x, int64_t x_row,
               const void *weight, const void *bias, void *y, void *xhat, void *root) {
    Flag flag;
    const int64_t height = n < 8192 ? 8192 / n : 1;
    typedef Wide<Element> T;
    Forward<Element> c = {rows, n, height, centred != 0, static_cast<T>(eps), {static_cast<const Element *>(x), x_row},
                          static_cast<const Element *>(weight), static_cast<const Element *>(bias),
                          static_cast<Element *>(y), static_cast<T *>(xhat), static_cast<T *>(root), &flag};
    const int64_t tasks = (rows + height - 1) / height;
    Status status = parallel_for(tasks, threads_for_elements(rows * n, threads), 0, forward_task<Element>, &c);
    return status == OK ? flag.status() : status;
}

template <class Element, class X>
Status backward_of(int32_t centred, int32_t threads, int64_t rows, int64_t n, const void *dy, int64_t dy_row,
                const void *x, int64_t x_row, const void *root, const void *weight, void *dx, void *dweight,
                void *dbias, void *parts) {
    Flag flag;
    const int64_t height = rows_of_task(rows, n), tasks = (rows + height - 1) / height;
    typedef Wide<Element> T;
    T *first = static_cast<T *>(parts), *second = dweight ? first + tasks * n : first;
    Backward<Element, X> c = {rows, n, height, centred != 0, {static_cast<const Element *>(dy), dy_row},
                              {static_cast<const X *>(x), x_row}, static_cast<const T *>(root),
                              static_cast<const Element *>(weight), static_cast<Element *>(dx),
                              dweight ? first : nullptr, dbias ? second : nullptr, &flag};
    const int used = threads_for_elements(rows * n, threads);
    Status status = parallel_for(tasks, used, 0, backward_task<Element, X>, &c);
    if (dweight && status == OK) add_up(first, tasks, n, static_cast<Element *>(dweight), &flag);
    if (dbias && status == OK) add_up(second, tasks, n, static_cast<Element *>(dbias), &flag);
    return status == OK ? flag.status() : status;
}

template <class Element>
Status backward(int32_t centred, int32_t threads, int64_t rows, int64_t n, const void *dy, int64_t dy_row,
                const void *x, int64_t x_row, const void *root, const void *weight, void *dx, void *dweight,
                void *dbias, void *parts) {
    return (centred ? backward_of<Element, Wide<Element>> : backward_of<Element, Element>)(
        centred, threads, rows, n, dy, dy_row, x, x_row, root, weight, dx, dweight, dbias, parts);
}

}  // namespace

/// y, xhat (rows, n) and root (rows), contiguous, of x with rows at a distance of x_row elements; xhat and root are
/// float32 for elements of 16 bits.
POLYATTN_EXPORT Status polyattn_norm(int32_t dtype, int32_t centred, int32_t threads, int64_t rows, int64_t n,
                                      double eps, const void *x, int64_t x_row, const void *weight, const void *bias,
                                      void *y, void *xhat, void *root) {
    return FOR_DTYPE(dtype, forward)(centred, threads, rows, n, eps, x, x_row, weight, bias, y, xhat, root);
}

/// The number of elements, of the type of the sums, that polyattn_norm_backward needs at `parts` for each of dweight and
/// dbias.
POLYATTN_EXPORT int64_t polyattn_norm_parts(int64_t rows, int64_t n) {
    const int64_t height = rows_of_task(rows, n);
    return (rows + height - 1) / height * n;
}

/// dx (rows, n), dweight and dbias (n), null if not wanted; x is x̂ for layer norm. The sums do not depend on threads.
POLYATTN_EXPORT Status polyattn_norm_backward(int32_t dtype, int32_t centred, int32_t threads, int64_t rows, int64_t n,
                                               const void *dy, int64_t dy_row, const void *x, int64_t x_row,
                                               const void *root, const void *weight, void *dx, void *dweight,
                                               void *dbias, void *parts) {
    return FOR_DTYPE(dtype, backward)(centred, threads, rows, n, dy, dy_row, x, x_row, root, weight, dx, dweight, dbias,
                                      parts);
}
