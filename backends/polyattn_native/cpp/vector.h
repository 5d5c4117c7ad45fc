// Vectors of the widest registers of the instruction set, by the vector extensions of GCC and Clang.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64;
#elif defined(__AVX2__)
constexpr int VECTOR_BYTES = 32;
#else
constexpr int VECTOR_BYTES = 16;
#endif

#define POLYATTN_INLINE inline __attribute__((always_inline))
#define POLYATTN_UNROLL _Pragma("GCC unroll 16")

/// The vector types of an element type. `loose` has the alignment of one element, for loads and stores.
template <class T> struct Lanes;

template <> struct Lanes<float> {
    typedef float vector __attribute__((vector_size(VECTOR_BYTES)));
    typedef float loose __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
    typedef int32_t bits __attribute__((vector_size(VECTOR_BYTES)));
    typedef int32_t integer;
    static constexpr int count = VECTOR_BYTES / 4;
};

template <> struct Lanes<double> {
    typedef double vector __attribute__((vector_size(VECTOR_BYTES)));
    typedef double loose __attribute__((vector_size(VECTOR_BYTES), aligned(8), may_alias));
    typedef int64_t bits __attribute__((vector_size(VECTOR_BYTES)));
    typedef int64_t integer;
    static constexpr int count = VECTOR_BYTES / 8;
};

template <class T> using Vector = typename Lanes<T>::vector;
template <class T> using Bits = typename Lanes<T>::bits;

/// The number of elements of a vector.
template <class T> constexpr int LANES = Lanes<T>::count;

template <class T> POLYATTN_INLINE Vector<T> load(const T *p) {
    return *reinterpret_cast<const typename Lanes<T>::loose *>(p);
}

template <class T> POLYATTN_INLINE void store(T *p, Vector<T> x) {
    *reinterpret_cast<typename Lanes<T>::loose *>(p) = x;
}

/// All lanes equal to x.
template <class T> POLYATTN_INLINE Vector<T> broadcast(T x) { return Vector<T>{} + x; }

/// 0, 1, 2, ... as elements.
template <class T> POLYATTN_INLINE Vector<T> count_up() {
    Vector<T> x{};
    for (int i = 0; i < LANES<T>; i++) x[i] = static_cast<T>(i);
    return x;
}

/// Hide from the compiler that a vector is constant: GCC would exchange the operands of a comparison with a constant,
/// and then it needs two instructions for a maximum.
template <class V> POLYATTN_INLINE void hide(V &x) {
#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__)
    asm("" : "+v"(x));
#else
    static_cast<void>(x);
#endif
}

/// The larger of two vectors; b where either is NaN. One instruction.
template <class V> POLYATTN_INLINE V larger(V a, V b) {
    hide(a);
    return a > b ? a : b;
}

/// The smaller of two vectors; b where either is NaN. One instruction.
template <class V> POLYATTN_INLINE V smaller(V a, V b) {
    hide(a);
    return a < b ? a : b;
}

// ---- shuffles -------------------------------------------------------------------------------------------------------

/// A list of lane numbers 0, 1, ..., N - 1 as template arguments.
template <int... I> struct Numbers {};
template <int N, int... I> struct CountNumbers : CountNumbers<N - 1, N - 1, I...> {};
template <int... I> struct CountNumbers<0, I...> {
    typedef Numbers<I...> type;
};
template <class T> using LaneNumbers = typename CountNumbers<LANES<T>>::type;

/// Lane i of the result is lane i ^ STEP of x.
template <int STEP, class V, int... I> POLYATTN_INLINE V swapped(V x, Numbers<I...>) {
    return __builtin_shufflevector(x, x, (I ^ STEP)...);
}

/// Lane i of the result: lane i of a where bit STEP of i is not set, else lane i - STEP of b.
template <int STEP, class V, int... I> POLYATTN_INLINE V low_halves(V a, V b, Numbers<I...>) {
    return __builtin_shufflevector(a, b, ((I & STEP) ? int(sizeof...(I)) + I - STEP : I)...);
}

/// Lane i of the result: lane i + STEP of a where bit STEP of i is not set, else lane i of b.
template <int STEP, class V, int... I> POLYATTN_INLINE V high_halves(V a, V b, Numbers<I...>) {
    return __builtin_shufflevector(a, b, ((I & STEP) ? int(sizeof...(I)) + I : I + STEP)...);
}

template <class T, int STEP> struct Reduce {
    static POLYATTN_INLINE Vector<T> sum(Vector<T> x) {
        x += swapped<STEP>(x, LaneNumbers<T>());
        return Reduce<T, STEP / 2>::sum(x);
    }
    static POLYATTN_INLINE Vector<T> most(Vector<T> x) {
        x = larger(x, swapped<STEP>(x, LaneNumbers<T>()));
        return Reduce<T, STEP / 2>::most(x);
    }
};
template <class T> struct Reduce<T, 0> {
    static POLYATTN_INLINE Vector<T> sum(Vector<T> x) { return x; }
    static POLYATTN_INLINE Vector<T> most(Vector<T> x) { return x; }
};

/// The sum of all lanes.
template <class T> POLYATTN_INLINE T sum_of(Vector<T> x) { return Reduce<T, LANES<T> / 2>::sum(x)[0]; }

/// The largest of all lanes; NaN may be lost.
template <class T> POLYATTN_INLINE T most_of(Vector<T> x) { return Reduce<T, LANES<T> / 2>::most(x)[0]; }

template <class T, int STEP> struct Transpose {
    /// Exchange the blocks of STEP x STEP off the diagonal, of all pairs of rows whose numbers differ by STEP.
    static POLYATTN_INLINE void run(Vector<T> *rows) {
        POLYATTN_UNROLL
        for (int i = 0; i < LANES<T>; i++) {
            if (i & STEP) continue;
            Vector<T> a = rows[i], b = rows[i + STEP];
            rows[i] = low_halves<STEP>(a, b, LaneNumbers<T>());
            rows[i + STEP] = high_halves<STEP>(a, b, LaneNumbers<T>());
        }
        Transpose<T, STEP / 2>::run(rows);
    }
};
template <class T> struct Transpose<T, 0> {
    static POLYATTN_INLINE void run(Vector<T> *) {}
};

/// Transpose a square of LANES x LANES elements in registers.
template <class T> POLYATTN_INLINE void transpose(Vector<T> *rows) { Transpose<T, LANES<T> / 2>::run(rows); }

template <class T, int STEP> struct Fold {
    /// Halve the number of vectors: each result holds sums of two of its neighbours' lanes.
    static POLYATTN_INLINE void run(Vector<T> *rows) {
        POLYATTN_UNROLL
        for (int i = 0; i < STEP; i++)
            rows[i] = low_halves<STEP>(rows[i], rows[i + STEP], LaneNumbers<T>()) +
                      high_halves<STEP>(rows[i], rows[i + STEP], LaneNumbers<T>());
        Fold<T, STEP / 2>::run(rows);
    }
};
template <class T> struct Fold<T, 0> {
    static POLYATTN_INLINE void run(Vector<T> *) {}
};

/// Lane i of the result is the sum of the lanes of rows[i], for LANES vectors, which are overwritten.
template <class T> POLYATTN_INLINE Vector<T> sums_of(Vector<T> *rows) {
    Fold<T, LANES<T> / 2>::run(rows);
    return rows[0];
}

// ---- exp2 -----------------------------------------------------------------------------------------------------------

/// The polynomial of 2^f for |f| <= 1/2; relative error 2e-9.
POLYATTN_INLINE Vector<float> exp2_series(Vector<float> f) {
    Vector<float> p = broadcast(1.535336188319500e-4f);
    p = p * f + 1.339887440266574e-3f;
    p = p * f + 9.618437357674640e-3f;
    p = p * f + 5.550332471162809e-2f;
    p = p * f + 2.402264791363012e-1f;
    p = p * f + 6.931472028550421e-1f;
    return p * f + 1.0f;
}

/// 2^x for float: 0 below 2^-126, NaN for NaN, infinity from 2^128; relative error below 1e-7.
POLYATTN_INLINE Vector<float> exp2_of(Vector<float> x) {
    const Vector<float> least = broadcast(-126.0f);
    const float shift = 12582912.0f + 127;                                  // 1.5 * 2^23, plus the bias of the exponent
    Vector<float> at_least = larger(least, smaller(broadcast(128.0f), x));  // keeps NaN
    Vector<float> moved = at_least + shift;  // its low bits are the rounded number plus 127
    Vector<float> p = exp2_series(at_least - (moved - shift));
    p *= reinterpret_cast<Vector<float>>(reinterpret_cast<Bits<float>>(moved) << 23);
    return x < least ? Vector<float>{} : p;
}

/// 2^x for double: 0 below 2^-1022, NaN for NaN, infinity from 2^1024. The polynomial is the Taylor series.
POLYATTN_INLINE Vector<double> exp2_of(Vector<double> x) {
    const Vector<double> least = broadcast(-1022.0);
    const double shift = 6755399441055744.0 + 1023;  // 1.5 * 2^52, plus the bias of the exponent
    Vector<double> at_least = larger(least, smaller(broadcast(1024.0), x));
    Vector<double> moved = at_least + shift;
    Vector<double> f = (at_least - (moved - shift)) * 0.693147180559945309417;
    Vector<double> p = broadcast(1.6059043836821614599e-10);
    p = p * f + 2.0876756987868098979e-9;
    p = p * f + 2.5052108385441718775e-8;
    p = p * f + 2.7557319223985890653e-7;
    p = p * f + 2.7557319223985890653e-6;
    p = p * f + 2.4801587301587301566e-5;
    p = p * f + 1.9841269841269841253e-4;
    p = p * f + 1.3888888888888889419e-3;
    p = p * f + 8.3333333333333332177e-3;
    p = p * f + 4.1666666666666664354e-2;
    p = p * f + 1.6666666666666665741e-1;
    p = p * f + 0.5;
    p = p * f + 1.0;
    p = p * f + 1.0;
    p *= reinterpret_cast<Vector<double>>(reinterpret_cast<Bits<double>>(moved) << 52);
    return x < least ? Vector<double>{} : p;
}

/// exp2_of for x <= 0 or NaN, with fewer instructions; 0 from far below.
POLYATTN_INLINE Vector<double> exp2_below(Vector<double> x) { return exp2_of(x); }

#if defined(__AVX512F__)
POLYATTN_INLINE Vector<float> exp2_below(Vector<float> x) {
    const __mmask16 ALL = 0xFFFF;                            // without a mask, GCC warns of its own header
    Vector<float> at_least = larger(broadcast(-200.0f), x);  // 2^-200 is 0 in float
    __m512 whole = _mm512_maskz_roundscale_ps(ALL, reinterpret_cast<__m512>(at_least), 0);
    Vector<float> p = exp2_series(at_least - reinterpret_cast<Vector<float>>(whole));
    return reinterpret_cast<Vector<float>>(_mm512_maskz_scalef_ps(ALL, reinterpret_cast<__m512>(p), whole));
}
#else
POLYATTN_INLINE Vector<float> exp2_below(Vector<float> x) { return exp2_of(x); }
#endif

/// 2^x of one number, by the same steps.
template <class T> POLYATTN_INLINE T exp2_of(T x) { return exp2_of(broadcast(x))[0]; }
