// Matrix products of projections: y = a b + bias, and sums of rows for the gradient of the bias.
//
// b is packed once into panels as wide as the micro-kernel, in blocks of DEPTH rows; a is read as it is if its rows are
// contiguous, else packed block by block. A task computes BLOCK rows of some panels. The sums of an element do not
// depend on the number of threads.
#include "pack.h"
#include "pieces.h"

namespace {

constexpr int64_t BLOCK = 16 * ROWS;

/// The rows of b in a block: a panel of them fits the second-level cache several times.
template <class T> constexpr int64_t DEPTH = 2048 / static_cast<int64_t>(sizeof(T));

/// A matrix with any strides.
template <class T> struct Matrix {
    const T *start;
    int64_t row, column;

    const T *at(int64_t i, int64_t j) const { return start + i * row + j * column; }
};

template <class T> struct Product {
    int64_t m, k, n;
    Matrix<T> a, b;  // (m, k) and (k, n)
    const T *bias;   // (n), or null
    T *y;            // (m, n), contiguous
    T *packed;       // b: panels of one block of rows, then those of the next one
    int64_t groups;  // a task computes a group of the panels
    int threads;
    Flag *flag;

    int64_t panels() const { return (n + PANEL<T> - 1) / PANEL<T>; }
    int64_t blocks() const { return (m + BLOCK - 1) / BLOCK; }
    int64_t depth(int64_t first) const { return k - first < DEPTH<T> ? k - first : DEPTH<T>; }
    T *panel(int64_t first, int64_t p) const { return packed + first * panels() * PANEL<T> + p * depth(first) * PANEL<T>; }
};

/// Pack one panel of b in all blocks of rows; columns beyond n are 0.
template <class T> void pack_b(const void *context, int64_t p, void *) {
    const auto &c = *static_cast<const Product<T> *>(context);
    const int64_t column = p * PANEL<T>, count = c.n - column < PANEL<T> ? c.n - column : PANEL<T>;
    for (int64_t first = 0; first < c.k; first += DEPTH<T>) {
        T *to = c.panel(first, p);
        const int64_t depth = c.depth(first);
        if (c.b.row == 1) {  // its columns are contiguous: the transpose of an ordinary matrix
            Magnitude<T> most;
            for (int64_t x = 0; x < PANEL<T>; x += LANES<T>) {
                const int there = static_cast<int>(count - x < LANES<T> ? count - x : LANES<T>);
                const T *from = c.b.at(first, column + x);
                if (there == LANES<T>) transpose_rows<T, true>(from, c.b.column, there, depth, to + x, &most);
                else if (there > 0) transpose_rows<T, false>(from, c.b.column, there, depth, to + x, &most);
                else
                    for (int64_t i = 0; i < depth; i++) store(to + i * PANEL<T> + x, Vector<T>{});
            }
            continue;
        }
        for (int64_t i = 0; i < depth; i++) {
            const T *from = c.b.at(first + i, column);
            T *row = to + i * PANEL<T>;
            int64_t x = 0;
            if (c.b.column == 1)
                for (; x + LANES<T> <= count; x += LANES<T>) store(row + x, load(from + x));
            for (; x < count; x++) row[x] = from[x * c.b.column];
            for (; x < PANEL<T>; x++) row[x] = 0;
        }
    }
}

/// to[q][k][r] = a[i + q * ROWS + r][first + k] for rows q * ROWS + r < height, 0 up to a multiple of ROWS.
template <class T> void pack_a(const Matrix<T> &a, int64_t i, int64_t height, int64_t first, int64_t depth, T *to) {
    const int64_t whole = a.row == 1 ? height / ROWS * ROWS : 0;
    for (int64_t k = 0; k < depth; k++) {
        const T *from = a.at(i, first + k);
        for (int64_t r = 0; r < whole; r += ROWS) memcpy(to + r * depth + k * ROWS, from + r, ROWS * sizeof(T));
    }
    for (int64_t top = whole; top < height; top += ROWS)
        for (int64_t k = 0; k < depth; k++)
            for (int64_t r = 0; r < ROWS; r++)
                to[top * depth + k * ROWS + r] = top + r < height ? *a.at(i + top + r, first + k) : 0;
}

/// y (rows, columns) = a times a panel, or y + that, for up to ROWS rows and PANEL columns.
template <class T, int64_t A_STEP>
POLYATTN_INLINE void tile(const T *a, int64_t a_row, const T *panel, int64_t depth, T *y, int64_t y_row, int64_t rows,
                          int64_t columns, bool add) {
    constexpr int V = VECTORS;
    if (rows == ROWS && columns == PANEL<T>) {
        if (add)
            multiply_block<T, ROWS, V, ADDED_TO_C>(a, a_row, A_STEP, panel, PANEL<T>, depth, y, y_row, nullptr);
        else
            multiply_block<T, ROWS, V, FROM_ZERO>(a, a_row, A_STEP, panel, PANEL<T>, depth, y, y_row, nullptr);
        return;
    }
    alignas(64) T whole[ROWS * PANEL<T>];
    multiply_block<T, ROWS, V, FROM_ZERO>(a, a_row, A_STEP, panel, PANEL<T>, depth, whole, PANEL<T>, nullptr);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t x = 0; x < columns; x++) y[r * y_row + x] = whole[r * PANEL<T> + x] + (add ? y[r * y_row + x] : 0);
}

/// One block of rows of a group of panels.
template <class T> void multiply_task(const void *context, int64_t task, void *workspace) {
    const auto &c = *static_cast<const Product<T> *>(context);
    const int64_t top = task / c.groups * BLOCK, height = c.m - top < BLOCK ? c.m - top : BLOCK;
    const int64_t group = task % c.groups, begin = c.panels() * group / c.groups, end = c.panels() * (group + 1) / c.groups;
    const int64_t left = begin * PANEL<T>, right = end * PANEL<T> < c.n ? end * PANEL<T> : c.n;
    T *packed = static_cast<T *>(workspace);
    if (c.bias)
        for (int64_t i = top; i < top + height; i++) memcpy(c.y + i * c.n + left, c.bias + left, (right - left) * sizeof(T));
    for (int64_t first = 0; first < c.k; first += DEPTH<T>) {
        const int64_t depth = c.depth(first);
        const int64_t whole = c.a.column == 1 ? height / ROWS * ROWS : 0;  // these rows need no packing
        if (whole < height) pack_a(c.a, top + whole, height - whole, first, depth, packed);
        for (int64_t p = begin; p < end; p++) {
            const T *panel = c.panel(first, p);
            const int64_t column = p * PANEL<T>, columns = c.n - column < PANEL<T> ? c.n - column : PANEL<T>;
            for (int64_t i = 0; i < height; i += ROWS) {
                const int64_t rows = height - i < ROWS ? height - i : ROWS;
                T *y = c.y + (top + i) * c.n + column;
                const bool add = c.bias || first > 0;
                if (i < whole)
                    tile<T, 1>(c.a.at(top + i, first), c.a.row, panel, depth, y, c.n, rows, columns, add);
                else
                    tile<T, ROWS>(packed + (i - whole) * depth, 1, panel, depth, y, c.n, rows, columns, add);
            }
        }
    }
    Watch<T> watch;
    for (int64_t i = top; i < top + height; i++) {
        const T *y = c.y + i * c.n + left;
        along<T>(right - left, [&](int64_t j, int64_t count) __attribute__((always_inline)) {
            watch.see(load_part(y + j, count));
        });
    }
    if (watch.not_finite()) c.flag->raise();
}

/// Pack b into the workspace, then multiply.
template <class T> void multiply(const void *context, int64_t, void *workspace) {
    Product<T> c = *static_cast<const Product<T> *>(context);
    c.packed = static_cast<T *>(workspace);
    parallel_for(c.panels(), threads_for(20.0 * static_cast<double>(c.k * c.n), c.threads), 0, pack_b<T>, &c);
    const int64_t few = 4 * c.threads, blocks = c.blocks();
    c.groups = blocks >= few ? 1 : (few + blocks - 1) / blocks;
    if (c.groups > c.panels()) c.groups = c.panels();
    const size_t room = sizeof(T) * static_cast<size_t>(BLOCK * DEPTH<T>);
    if (parallel_for(blocks * c.groups, c.threads, room, multiply_task<T>, &c) != OK) c.flag->raise();
}

template <class T>
Status product(int32_t threads, int64_t m, int64_t k, int64_t n, const void *a, int64_t a_row, int64_t a_column,
               const void *b, int64_t b_row, int64_t b_column, const void *bias, void *y) {
    Flag flag;
    Product<T> c = {m, k, n, {static_cast<const T *>(a), a_row, a_column}, {static_cast<const T *>(b), b_row, b_column},
                    static_cast<const T *>(bias), static_cast<T *>(y), nullptr, 1, 1, &flag};
    c.threads = threads_for(2.0 * static_cast<double>(m * k) * static_cast<double>(n), threads);
    const size_t room = sizeof(T) * static_cast<size_t>(k * c.panels() * PANEL<T>);
    Status status = parallel_for(1, 1, room, multiply<T>, &c);
    return status == OK ? flag.status() : status;
}

// ---- the sum of rows ------------------------------------------------------------------------------------------------

template <class T> struct RowSum {
    int64_t rows, n, height;  // a task adds `height` rows
    Lines<const T> x;
    T *total, *parts;
    int threads;
    Flag *flag;

    int64_t tasks() const { return (rows + height - 1) / height; }
};

template <class T> void add_rows(const void *context, int64_t task, void *) {
    const auto &c = *static_cast<const RowSum<T> *>(context);
    T *part = c.parts + task * c.n;
    const int64_t first = task * c.height, last = first + c.height < c.rows ? first + c.height : c.rows;
    memcpy(part, c.x.at(first), static_cast<size_t>(c.n) * sizeof(T));
    for (int64_t i = first + 1; i < last; i++) {
        const T *x = c.x.at(i);
        along<T>(c.n, [&](int64_t j, int64_t count) __attribute__((always_inline)) {
            store_part(part + j, load_part(part + j, count) + load_part(x + j, count), count);
        });
    }
}

template <class T> void add_all(const void *context, int64_t, void *workspace) {
    RowSum<T> c = *static_cast<const RowSum<T> *>(context);
    c.parts = static_cast<T *>(workspace);
    parallel_for(c.tasks(), c.threads, 0, add_rows<T>, &c);
    Watch<T> watch;
    along<T>(c.n, [&](int64_t j, int64_t count) __attribute__((always_inline)) {
        Vector<T> sum{};
        for (int64_t task = 0; task < c.tasks(); task++) sum += load_part(c.parts + task * c.n + j, count);
        watch.see(sum);
        store_part(c.total + j, sum, count);
    });
    if (watch.not_finite()) c.flag->raise();
}

template <class T> Status sum(int32_t threads, int64_t rows, int64_t n, const void *x, int64_t x_row, void *total) {
    Flag flag;
    RowSum<T> c = {rows, n, (rows + 63) / 64, {static_cast<const T *>(x), x_row}, static_cast<T *>(total), nullptr,
                   threads_for(10.0 * static_cast<double>(rows * n), threads), &flag};
    const size_t room = sizeof(T) * static_cast<size_t>(c.tasks() * n);
    Status status = parallel_for(1, 1, room, add_all<T>, &c);
    return status == OK ? flag.status() : status;
}

}  // namespace

/// y (m, n), contiguous, = a (m, k) b (k, n) + bias (n), which may be null; a and b have any strides, in elements.
POLYATTN_EXPORT Status polyattn_matmul(int32_t dtype, int32_t threads, int64_t m, int64_t k, int64_t n, const void *a,
                                        int64_t a_row, int64_t a_column, const void *b, int64_t b_row,
                                        int64_t b_column, const void *bias, void *y) {
    return (dtype == FLOAT64 ? product<double> : product<float>)(threads, m, k, n, a, a_row, a_column, b, b_row, b_column,
                                                                 bias, y);
}

/// total (n) = the sum of the rows of x (rows, n), at least one.
POLYATTN_EXPORT Status polyattn_sum_rows(int32_t dtype, int32_t threads, int64_t rows, int64_t n, const void *x,
                                          int64_t x_row, void *total) {
    return (dtype == FLOAT64 ? sum<double> : sum<float>)(threads, rows, n, x, x_row, total);
}
