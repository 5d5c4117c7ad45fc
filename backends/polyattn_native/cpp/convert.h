// Elements of the four dtypes: conversion of single values and of rows, to and from the type of the sums.
#pragma once

#include "abi.h"
#include "vector.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

/// The bits of a float16 and of a bfloat16 number.
struct Half {
    uint16_t bits;
};
struct Bfloat {
    uint16_t bits;
};

/// The size of an element in bytes.
inline int64_t bytes_of(int32_t dtype) { return dtype == FLOAT64 ? 8 : dtype == FLOAT32 ? 4 : 2; }

inline float float_of_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

inline uint32_t bits_of_float(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

inline float widened(float x) { return x; }
inline double widened(double x) { return x; }
inline float widened(Bfloat x) { return float_of_bits(static_cast<uint32_t>(x.bits) << 16); }

inline float widened(Half x) {
#if defined(__F16C__)
    return _cvtsh_ss(x.bits);
#else
    uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16, rest = x.bits & 0x7FFF;
    if (rest >= 0x7C00) return float_of_bits(sign | 0x7F800000u | (rest & 0x3FF) << 13);  // infinity or NaN
    // As a float with the exponent of a float16, times 2^(127 - 15): right for subnormal numbers too.
    float magnitude = float_of_bits(rest << 13) * 5.192296858534828e33f;
    return float_of_bits(sign | bits_of_float(magnitude));
#endif
}

/// The type in which an element is computed with: float for the types of 16 bits.
template <class Element> struct WideOf {
    typedef Element type;
};
template <> struct WideOf<Half> {
    typedef float type;
};
template <> struct WideOf<Bfloat> {
    typedef float type;
};
template <class Element> using Wide = typename WideOf<Element>::type;

/// A number as an element, rounded to nearest, ties to even.
inline void narrow(float x, float *to) { *to = x; }
inline void narrow(double x, double *to) { *to = x; }

inline void narrow(float x, Bfloat *to) {
    uint32_t bits = bits_of_float(x);
    bool is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
    uint32_t rounded = is_nan ? bits | 0x400000u : bits + 0x7FFFu + (bits >> 16 & 1);
    to->bits = static_cast<uint16_t>(rounded >> 16);
}

inline void narrow(float x, Half *to) {
#if defined(__F16C__)
    to->bits = static_cast<uint16_t>(_cvtss_sh(x, 0));
#else
    uint32_t bits = bits_of_float(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7FFFFFFFu;
    if (rest > 0x7F800000u) {
        to->bits = static_cast<uint16_t>(sign | 0x7E00u);
    } else if (rest >= 0x477FF000u) {  // rounds to 2^16 or more
        to->bits = static_cast<uint16_t>(sign | 0x7C00u);
    } else if (rest < 0x38800000u) {  // subnormal: the sum with 0.5 rounds at the last bit, 2^-24
        to->bits = static_cast<uint16_t>(sign | (bits_of_float(float_of_bits(rest) + 0.5f) - 0x3F000000u));
    } else {
        to->bits = static_cast<uint16_t>(sign | ((rest + 0xFFFu + (rest >> 13 & 1) - 0x38000000u) >> 13));
    }
#endif
}

/// out[x] = p[x * step], x < n.
template <class Element> inline void read_row(const Element *p, int64_t step, int64_t n, Wide<Element> *out) {
    if (step == 1)
        for (int64_t x = 0; x < n; x++) out[x] = widened(p[x]);
    else
        for (int64_t x = 0; x < n; x++) out[x] = widened(p[x * step]);
}

/// p[x * step] = row[x], x < n.
template <class Element> inline void write_row(const Wide<Element> *row, int64_t n, Element *p, int64_t step) {
    if (step == 1)
        for (int64_t x = 0; x < n; x++) narrow(row[x], p + x);
    else
        for (int64_t x = 0; x < n; x++) narrow(row[x], p + x * step);
}

#if defined(__F16C__)
/// The same for contiguous float16 rows, eight elements at a time.
inline void read_contiguous(const Half *p, int64_t n, float *out) {
    int64_t x = 0;
    for (; x + 8 <= n; x += 8)
        _mm256_storeu_ps(out + x, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p + x))));
    for (; x < n; x++) out[x] = widened(p[x]);
}

inline void write_contiguous(const float *row, int64_t n, Half *p) {
    int64_t x = 0;
    for (; x + 8 <= n; x += 8)
        _mm_storeu_si128(reinterpret_cast<__m128i *>(p + x), _mm256_cvtps_ph(_mm256_loadu_ps(row + x), 0));
    for (; x < n; x++) narrow(row[x], p + x);
}

template <> inline void read_row<Half>(const Half *p, int64_t step, int64_t n, float *out) {
    if (step == 1) return read_contiguous(p, n, out);
    for (int64_t x = 0; x < n; x++) out[x] = widened(p[x * step]);
}

template <> inline void write_row<Half>(const float *row, int64_t n, Half *p, int64_t step) {
    if (step == 1) return write_contiguous(row, n, p);
    for (int64_t x = 0; x < n; x++) narrow(row[x], p + x * step);
}
#endif
