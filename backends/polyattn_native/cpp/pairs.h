// Products of bfloat16 numbers by the instruction that adds two products to a float: rows as pairs of neighbours.
//
// A pair is 32 bits, which stand in arrays of float for their size only: they are copied, and never computed with.
#pragma once

#include "pack.h"

/// Whether the elements are multiplied in pairs.
template <class Element> constexpr bool PAIRS = false;

#if defined(__AVX512BF16__)
template <> inline constexpr bool PAIRS<Bfloat> = true;

/// Adds the two products of a pair.
struct PairProducts {
    static POLYATTN_INLINE Vector<float> add(Vector<float> sum, Vector<float> a, Vector<float> b) {
        return reinterpret_cast<Vector<float>>(_mm512_dpbf16_ps(
            reinterpret_cast<__m512>(sum), reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b)));
    }
};

/// Replace `vectors` vectors of a row by half as many of pairs, with a zero after an odd number.
inline void round_row(float *row, int64_t vectors) {
    constexpr int L = LANES<float>;
    for (int64_t v = 0; v < vectors; v += 2) {
        Vector<float> low = load(row + v * L), high = v + 1 < vectors ? load(row + (v + 1) * L) : Vector<float>{};
        __m512bh both = _mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(high), reinterpret_cast<__m512>(low));
        store(row + v / 2 * L, reinterpret_cast<Vector<float>>(both));
    }
}
#else
typedef Products PairProducts;

inline void round_row(float *, int64_t) {}
#endif

template <class Element> struct ProductsFor {
    typedef Products type;
};
template <> struct ProductsFor<Bfloat> {
    typedef PairProducts type;
};
/// How the products of elements are added: in pairs, if PAIRS.
template <class Element> using ProductsOf = typename ProductsFor<Element>::type;

/// out: row i of n features as (n + 1) / 2 pairs. Returns the bits of the largest magnitude.
inline uint16_t pack_pairs(Rows<Bfloat> rows, int64_t i, int64_t n, float *out) {
    const Bfloat *row = rows.at(i);
    uint16_t *to = reinterpret_cast<uint16_t *>(out), most = 0;
    if (rows.feature == 1) memcpy(to, row, static_cast<size_t>(n) * sizeof(Bfloat));
    else
        for (int64_t f = 0; f < n; f++) to[f] = row[f * rows.feature].bits;
    if (n % 2) to[n] = 0;
    for (int64_t f = 0; f < n; f++) {
        uint16_t magnitude = to[f] & 0x7FFF;
        most = magnitude > most ? magnitude : most;
    }
    return most;
}

/// panel[f][x]: pair f of the features of row i + x, f < (n + 1) / 2; 0 for x >= count. buffer: LANES rows of pairs.
inline uint16_t pack_pair_panel(Rows<Bfloat> rows, int64_t i, int64_t count, int64_t n, float *panel, float *buffer) {
    constexpr int L = LANES<float>;
    int64_t pairs = (n + 1) / 2;
    uint16_t most = 0;
    Magnitude<float> unused;
    for (int first = 0; first < PANEL<float>; first += L) {
        int there = static_cast<int>(count - first < 0 ? 0 : count - first < L ? count - first : L);
        for (int x = 0; x < there; x++) {
            uint16_t of_row = pack_pairs(rows, i + first + x, n, buffer + x * pairs);
            most = of_row > most ? of_row : most;
        }
        if (there == L) transpose_rows<float, true>(buffer, pairs, L, pairs, panel + first, &unused);
        else transpose_rows<float, false>(buffer, pairs, there, pairs, panel + first, &unused);
    }
    return most;
}

/// out[y][f]: feature f of rows i + 2 y and i + 2 y + 1 as a pair; 0 for rows from `count` on and n <= f < padded.
inline void pack_pair_rows(Rows<Bfloat> rows, int64_t i, int64_t count, int64_t n, int64_t padded, float *out) {
    const Bfloat zero = {0};
    for (int64_t y = 0; y < count; y += 2) {
        uint32_t *to = reinterpret_cast<uint32_t *>(out + y / 2 * padded);
        const Bfloat *low = rows.at(i + y), *high = y + 1 < count ? rows.at(i + y + 1) : &zero;
        int64_t step = rows.feature, high_step = y + 1 < count ? step : 0;
        if (step == 1 && high_step == 1)
            for (int64_t f = 0; f < n; f++) to[f] = low[f].bits | static_cast<uint32_t>(high[f].bits) << 16;
        else
            for (int64_t f = 0; f < n; f++)
                to[f] = low[f * step].bits | static_cast<uint32_t>(high[f * high_step].bits) << 16;
        for (int64_t f = n; f < padded; f++) to[f] = 0;
    }
}
