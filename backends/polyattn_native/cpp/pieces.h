// Rows of elements, cut into pieces that fit the first-level cache: the tasks of the pointwise operations.
#pragma once

#include "narrow.h"
#include "threads.h"

/// rows x n elements, where `row` is the distance between the first elements of neighbouring rows.
template <class T> struct Lines {
    T *data;  // null if absent
    int64_t row;

    T *at(int64_t i, int64_t column = 0) const { return data + i * row + column; }
};

/// A grid of pieces: each has at most `height` rows and `width` columns.
struct Pieces {
    int64_t rows, n, height, width;

    Pieces(int64_t rows, int64_t n) : rows(rows), n(n) {
        constexpr int64_t ELEMENTS = 4096;
        width = n < ELEMENTS ? n : ELEMENTS;
        height = ELEMENTS / width;
    }

    int64_t across() const { return (n + width - 1) / width; }
    int64_t count() const { return (rows + height - 1) / height * across(); }

    /// Call body(row, column, number of columns) for each row of a piece.
    template <class Body> POLYATTN_INLINE void for_each(int64_t piece, Body body) const {
        int64_t first = piece / across() * height, column = piece % across() * width;
        int64_t last = first + height < rows ? first + height : rows;
        int64_t columns = column + width < n ? width : n - column;
        for (int64_t i = first; i < last; i++) body(i, column, columns);
    }
};

/// A flag that several threads may raise.
struct Flag {
    int32_t raised = 0;

    void raise() { __atomic_store_n(&raised, 1, __ATOMIC_RELAXED); }
    Status status() const { return raised ? DOUBT : OK; }
};

/// The function among the instances of a template for the elements of a dtype.
#define FOR_DTYPE(dtype, function)           \
    ((dtype) == FLOAT64    ? function<double> \
     : (dtype) == FLOAT16  ? function<Half>   \
     : (dtype) == BFLOAT16 ? function<Bfloat> \
                           : function<float>)

/// The number of threads for a loop over so many elements with functions like exp.
inline int threads_for_elements(int64_t elements, int threads) {
    return threads_for(40.0 * static_cast<double>(elements), threads);
}
