// Copies of rows in the layouts of the micro-kernel, read through any strides, with a bound of their magnitude.
#pragma once

#include "convert.h"
#include "micro_kernel.h"

/// The largest magnitude of all packed elements, as bits of a number without sign: those of NaN are above infinity's.
template <class T> struct Magnitude {
    Bits<T> bits{};

    POLYATTN_INLINE void add(Vector<T> x) {
        const Bits<T> unsigned_part =
            Bits<T>{} + static_cast<typename Lanes<T>::integer>(~(1ull << (sizeof(T) * 8 - 1)));
        bits = larger(reinterpret_cast<Bits<T>>(x) & unsigned_part, bits);
    }
    void add(T x) {
        Vector<T> vector{};
        vector[0] = x;
        add(vector);
    }
    T value() const {
        typename Lanes<T>::integer most = bits[0];
        for (int i = 1; i < LANES<T>; i++) most = bits[i] > most ? bits[i] : most;
        T x;
        memcpy(&x, &most, sizeof x);
        return x;
    }
};

/// Rows of elements with a stride between rows and between features.
template <class Element> struct Rows {
    const Element *start;
    int64_t row, feature;  // strides

    const Element *at(int64_t i) const { return start + i * row; }
    /// Whether a row is an array of T that can be read as it is.
    template <class T> bool plain() const { return sizeof(Element) == sizeof(T) && feature == 1; }
};

/// out[x] = factor * row[x], x < n.
template <class Element>
inline void pack_scaled(Rows<Element> rows, int64_t i, int64_t n, Wide<Element> factor, Wide<Element> *out,
                        Magnitude<Wide<Element>> *most) {
    typedef Wide<Element> T;
    const T *row = out;
    if (rows.template plain<T>()) row = reinterpret_cast<const T *>(rows.at(i));
    else read_row(rows.at(i), rows.feature, n, out);
    int64_t x = 0;
    for (; x + LANES<T> <= n; x += LANES<T>) {
        Vector<T> scaled = load(row + x) * factor;
        store(out + x, scaled);
        most->add(scaled);
    }
    for (; x < n; x++) most->add(out[x] = row[x] * factor);
}

/// to[f][x] = from[x][f] for f < n and x < LANES, 0 for x >= count; rows of `to` have PANEL elements.
template <class T, bool FULL>
POLYATTN_INLINE void transpose_rows(const T *from, int64_t step, int count, int64_t n, T *to, Magnitude<T> *most) {
    constexpr int L = LANES<T>;
    int64_t f = 0;
    for (; f + L <= n; f += L) {
        Vector<T> square[L];
        POLYATTN_UNROLL
        for (int x = 0; x < L; x++) square[x] = FULL || x < count ? load(from + x * step + f) : Vector<T>{};
        transpose<T>(square);
        POLYATTN_UNROLL
        for (int x = 0; x < L; x++) {
            store(to + (f + x) * PANEL<T>, square[x]);
            most->add(square[x]);
        }
    }
    for (; f < n; f++) {
        Vector<T> column{};
        for (int x = 0; x < count; x++) column[x] = from[x * step + f];
        store(to + f * PANEL<T>, column);
        most->add(column);
    }
}

/// panel[f][x] = feature f of row i + x, f < n, x < PANEL; 0 for x >= count. buffer: LANES * n elements.
template <class Element>
inline void pack_panel(Rows<Element> rows, int64_t i, int64_t count, int64_t n, Wide<Element> *panel,
                       Wide<Element> *buffer, Magnitude<Wide<Element>> *most) {
    typedef Wide<Element> T;
    constexpr int L = LANES<T>;
    Magnitude<T> magnitude = *most;  // in a register
    for (int first = 0; first < PANEL<T>; first += L) {
        int there = count - first < L ? static_cast<int>(count - first) : L;
        if (there <= 0) {
            for (int64_t f = 0; f < n; f++) store(panel + f * PANEL<T> + first, Vector<T>{});
            continue;
        }
        const T *from = reinterpret_cast<const T *>(rows.at(i + first));
        int64_t step = rows.row;
        if (!rows.template plain<T>()) {
            for (int x = 0; x < there; x++) read_row(rows.at(i + first + x), rows.feature, n, buffer + x * n);
            from = buffer, step = n;
        }
        if (there == L) transpose_rows<T, true>(from, step, L, n, panel + first, &magnitude);
        else transpose_rows<T, false>(from, step, there, n, panel + first, &magnitude);
    }
    *most = magnitude;
}

/// out[x][f] = feature f of row i + x, x < count; 0 for n <= f < padded.
template <class Element>
inline void pack_rows(Rows<Element> rows, int64_t i, int64_t count, int64_t n, int64_t padded, Wide<Element> *out) {
    for (int64_t x = 0; x < count; x++) {
        Wide<Element> *to = out + x * padded;
        read_row(rows.at(i + x), rows.feature, n, to);
        for (int64_t f = n; f < padded; f++) to[f] = 0;
    }
}
