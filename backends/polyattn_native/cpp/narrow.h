// Vectors of elements of 16 bits: they are computed with as float, and rounded when they are stored.
#pragma once

#include "convert.h"
#include "math.h"

/// The bits of a vector of elements.
typedef uint16_t NarrowBits __attribute__((vector_size(VECTOR_BYTES / 2)));

POLYATTN_INLINE Vector<float> widened(NarrowBits x, Bfloat) {
    return reinterpret_cast<Vector<float>>(__builtin_convertvector(x, Bits<float>) << 16);
}

POLYATTN_INLINE NarrowBits narrowed(Vector<float> x, Bfloat) {
    typedef uint32_t Unsigned __attribute__((vector_size(VECTOR_BYTES)));
    Unsigned bits = reinterpret_cast<Unsigned>(x), rounded = bits + 0x7FFFu + (bits >> 16 & 1);
    rounded = (bits & 0x7FFFFFFFu) > 0x7F800000u ? bits | 0x400000u : rounded;  // NaN stays NaN
    return __builtin_convertvector(rounded >> 16, NarrowBits);
}

POLYATTN_INLINE Vector<float> widened(NarrowBits x, Half) {
#if defined(__AVX512F__)
    return reinterpret_cast<Vector<float>>(_mm512_maskz_cvtph_ps(0xFFFF, reinterpret_cast<__m256i>(x)));
#elif defined(__F16C__)
    return reinterpret_cast<Vector<float>>(_mm256_cvtph_ps(reinterpret_cast<__m128i>(x)));
#else
    Vector<float> wide{};
    for (int i = 0; i < LANES<float>; i++) wide[i] = widened(Half{x[i]});
    return wide;
#endif
}

POLYATTN_INLINE NarrowBits narrowed(Vector<float> x, Half) {
#if defined(__AVX512F__)
    return reinterpret_cast<NarrowBits>(_mm512_maskz_cvtps_ph(0xFFFF, reinterpret_cast<__m512>(x), 0));
#elif defined(__F16C__)
    return reinterpret_cast<NarrowBits>(_mm256_cvtps_ph(reinterpret_cast<__m256>(x), 0));
#else
    NarrowBits bits{};
    for (int i = 0; i < LANES<float>; i++) {
        Half element;
        narrow(x[i], &element);
        bits[i] = element.bits;
    }
    return bits;
#endif
}

template <class Element>
POLYATTN_INLINE Vector<float> load_narrow(const Element *p, int64_t count, float rest) {
    NarrowBits bits{};
    if (count >= LANES<float>) {
        memcpy(&bits, p, sizeof bits);
        return widened(bits, Element{});
    }
    memcpy(&bits, p, static_cast<size_t>(count) * sizeof(Element));
    Vector<float> x = widened(bits, Element{});
    return count_up<float>() < static_cast<float>(count) ? x : broadcast(rest);
}

template <class Element> POLYATTN_INLINE void store_narrow(Element *p, Vector<float> x, int64_t count) {
    NarrowBits bits = narrowed(x, Element{});
    if (count >= LANES<float>) memcpy(p, &bits, sizeof bits);
    else memcpy(p, &bits, static_cast<size_t>(count) * sizeof(Element));
}

/// As load_part and store_part of numbers.
POLYATTN_INLINE Vector<float> load_part(const Half *p, int64_t n, float rest = 0) { return load_narrow(p, n, rest); }
POLYATTN_INLINE Vector<float> load_part(const Bfloat *p, int64_t n, float rest = 0) { return load_narrow(p, n, rest); }
POLYATTN_INLINE void store_part(Half *p, Vector<float> x, int64_t count) { store_narrow(p, x, count); }
POLYATTN_INLINE void store_part(Bfloat *p, Vector<float> x, int64_t count) { store_narrow(p, x, count); }
