// The one matrix product that all kernels use: a few rows times a few vectors, with the sums in registers.
#pragma once

#include "vector.h"

/// What the sums start from: 0, or the values in c; or they start from 0, and at the end c or factor[row] times c is
/// added, which has smaller rounding errors where c is a sum of many blocks.
enum Start { FROM_ZERO, FROM_C, ADDED_TO_C, ADDED_TO_SCALED };

/// The numbers of rows and vectors for which the sums just fit the registers of the instruction set.
constexpr int ROWS = 6;
constexpr int VECTORS = VECTOR_BYTES == 32 ? 2 : 4;

/// The elements of VECTORS vectors: the keys of a packed panel.
template <class T> constexpr int PANEL = VECTORS * LANES<T>;

/// How one product of the sum is added: by one fused instruction.
struct Products {
    template <class V> static POLYATTN_INLINE V add(V sum, V a, V b) { return sum + a * b; }
};

/// c[r][x] = start + sum over k < n of a[r * a_row + k * a_step] * b[k * b_row + x], r < R, x < V * LANES.
///
/// a (R, n) with any strides; b (n, V * LANES) and c (R, V * LANES) with contiguous rows. Constant strides of a make it
/// faster, so callers give them as literals where they can.
template <class T, int R, int V, Start START, class Add = Products>
POLYATTN_INLINE void multiply_block(const T *a, int64_t a_row, int64_t a_step, const T *b, int64_t b_row, int64_t n,
                                    T *c, int64_t c_row, const T *factor) {
    Vector<T> sums[R][V];
    POLYATTN_UNROLL
    for (int r = 0; r < R; r++) {
        POLYATTN_UNROLL
        for (int v = 0; v < V; v++) {
            if (START == FROM_C) sums[r][v] = load(c + r * c_row + v * LANES<T>);
            else sums[r][v] = Vector<T>{};
        }
    }
    for (int64_t k = 0; k < n; k++) {
        Vector<T> of_b[V];
        POLYATTN_UNROLL
        for (int v = 0; v < V; v++) of_b[v] = load(b + k * b_row + v * LANES<T>);
        POLYATTN_UNROLL
        for (int r = 0; r < R; r++) {
            Vector<T> of_a = broadcast(a[r * a_row + k * a_step]);
            POLYATTN_UNROLL
            for (int v = 0; v < V; v++) sums[r][v] = Add::add(sums[r][v], of_a, of_b[v]);
        }
    }
    POLYATTN_UNROLL
    for (int r = 0; r < R; r++) {
        POLYATTN_UNROLL
        for (int v = 0; v < V; v++) {
            if (START == ADDED_TO_C) sums[r][v] += load(c + r * c_row + v * LANES<T>);
            if (START == ADDED_TO_SCALED) sums[r][v] += broadcast(factor[r]) * load(c + r * c_row + v * LANES<T>);
            store(c + r * c_row + v * LANES<T>, sums[r][v]);
        }
    }
}

/// multiply_block for `vectors` vectors, 1 to V.
template <class T, int R, Start START, class Add = Products, int V = VECTORS>
POLYATTN_INLINE void multiply_vectors(int vectors, const T *a, int64_t a_row, int64_t a_step, const T *b, int64_t b_row,
                                      int64_t n, T *c, int64_t c_row, const T *factor) {
    if (V == 1 || vectors >= V) multiply_block<T, R, V, START, Add>(a, a_row, a_step, b, b_row, n, c, c_row, factor);
    else if constexpr (V > 1)
        multiply_vectors<T, R, START, Add, V - 1>(vectors, a, a_row, a_step, b, b_row, n, c, c_row, factor);
}

/// The number of vectors at a time for R rows: with few rows there are registers for more vectors.
template <int R> constexpr int ACROSS = R == 1 ? 4 * VECTORS : R == 2 ? 2 * VECTORS : VECTORS;

/// multiply_block for any number of vectors: c (R, vectors * LANES).
template <class T, int R, Start START, class Add = Products>
POLYATTN_INLINE void multiply_tile(int64_t vectors, const T *a, int64_t a_row, int64_t a_step, const T *b,
                                   int64_t b_row, int64_t n, T *c, int64_t c_row, const T *factor) {
    for (int64_t first = 0; first < vectors; first += ACROSS<R>) {
        int now = vectors - first < ACROSS<R> ? static_cast<int>(vectors - first) : ACROSS<R>;
        multiply_vectors<T, R, START, Add, ACROSS<R>>(now, a, a_row, a_step, b + first * LANES<T>, b_row, n,
                                                      c + first * LANES<T>, c_row, factor);
    }
}

/// multiply_tile for ROWS rows.
template <class T, Start START>
POLYATTN_INLINE void multiply_rows(int64_t vectors, const T *a, int64_t a_row, int64_t a_step, const T *b,
                                   int64_t b_row, int64_t n, T *c, int64_t c_row, const T *factor) {
    multiply_tile<T, ROWS, START>(vectors, a, a_row, a_step, b, b_row, n, c, c_row, factor);
}
