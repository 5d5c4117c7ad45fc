// Elementary functions of vectors, accurate to the rounding of float or double also where the result is tiny.
#pragma once

#include "vector.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

/// Constants of exp for a number type.
template <class T> struct Exponential;

template <> struct Exponential<float> {
    static constexpr int MANTISSA = 23, BIAS = 127;
    static constexpr float LEAST = -110.0f;        // from here on exp(x) rounds to 0
    static constexpr float ROUND = 12582912.0f;    // 1.5 · 2²³: adding it rounds to an integer, in the lowest bits
    static constexpr float LN2_HIGH = 0.693359375f, LN2_LOW = -2.12194440e-4f;  // LN2_HIGH · n is exact
};

template <> struct Exponential<double> {
    static constexpr int MANTISSA = 52, BIAS = 1023;
    static constexpr double LEAST = -760.0;
    static constexpr double ROUND = 6755399441055744.0;  // 1.5 · 2⁵²
    static constexpr double LN2_HIGH = 6.93145751953125e-1, LN2_LOW = 1.42860682030941723212e-6;
};

/// The bits of a number type.
template <class T> struct Layout;
template <> struct Layout<float> { static constexpr int32_t MAGNITUDE = 0x7fffffff, INFINITE = 0x7f800000; };
template <> struct Layout<double> {
    static constexpr int64_t MAGNITUDE = 0x7fffffffffffffff, INFINITE = 0x7ff0000000000000;
};

/// Coefficients of (exp(r) − 1 − r) / r² for |r| ≤ log(2) / 2, the highest power first.
template <class T> struct ExponentialSeries;

template <> struct ExponentialSeries<float> {
    static constexpr float TERMS[] = {1.38131445e-3f, 8.36941884e-3f, 4.16684568e-2f, 1.66665148e-1f, 4.99999931e-1f};
};

template <> struct ExponentialSeries<double> {  // 1 / 13! … 1 / 2!
    static constexpr double TERMS[] = {1.6059043836821615e-10, 2.0876756987868099e-9, 2.5052108385441719e-8,
                                       2.7557319223985891e-7,  2.7557319223985893e-6, 2.4801587301587302e-5,
                                       1.9841269841269841e-4,  1.3888888888888889e-3, 8.3333333333333333e-3,
                                       4.1666666666666667e-2,  1.6666666666666667e-1, 5.0e-1};
};

/// The polynomial with these coefficients, the highest power first.
template <class T, int N> POLYATTN_INLINE Vector<T> horner(Vector<T> x, const T (&coefficients)[N]) {
    Vector<T> y = broadcast<T>(coefficients[0]);
    for (int i = 1; i < N; i++) y = y * x + coefficients[i];
    return y;
}

/// The element type of a vector type.
template <class V> struct ElementOf;
template <> struct ElementOf<Vector<float>> { typedef float type; };
template <> struct ElementOf<Vector<double>> { typedef double type; };

/// 2ⁿ for integers n in the range of normal numbers.
template <class T> POLYATTN_INLINE Vector<T> power_of_two(Bits<T> n) {
    return (Vector<T>)((n + Exponential<T>::BIAS) << Exponential<T>::MANTISSA);
}

/// x · 2ⁿ for whole numbers n ≥ −160 (float) or −1100, `shifted` being n + ROUND: exact also where it is subnormal.
#if defined(__AVX512F__)
POLYATTN_INLINE Vector<float> scaled(Vector<float> x, Vector<float> n, Vector<float>) {
    return (Vector<float>)_mm512_maskz_scalef_ps(0xffff, (__m512)x, (__m512)n);
}

POLYATTN_INLINE Vector<double> scaled(Vector<double> x, Vector<double> n, Vector<double>) {
    return (Vector<double>)_mm512_maskz_scalef_pd(0xff, (__m512d)x, (__m512d)n);
}
#else
template <class V> POLYATTN_INLINE V scaled(V x, V, V shifted) {
    using T = typename ElementOf<V>::type;
    Bits<T> n = (Bits<T>)shifted - (Bits<T>)broadcast<T>(Exponential<T>::ROUND), half = n >> 1;
    return x * power_of_two<T>(half) * power_of_two<T>(n - half);  // 2ⁿ alone may be subnormal
}
#endif

/// exp(x) for x ≤ 0, within one unit in the last place; exact zeros and subnormal numbers; NaN stays NaN.
template <class T> POLYATTN_INLINE Vector<T> exp_below(Vector<T> x) {
    using E = Exponential<T>;
    x = larger(broadcast<T>(E::LEAST), x);  // NaN stays
    Vector<T> shifted = x * static_cast<T>(1.44269504088896340736) + E::ROUND, whole = shifted - E::ROUND;
    Vector<T> r = x - whole * E::LN2_HIGH - whole * E::LN2_LOW;
    Vector<T> y = (horner<T>(r, ExponentialSeries<T>::TERMS) * r + 1) * r + 1;
    return scaled(y, whole, shifted);
}

/// Quotient of two polynomials.
template <int N, int M>
POLYATTN_INLINE Vector<double> ratio(Vector<double> x, const double (&above)[N], const double (&below)[M]) {
    return horner<double>(x, above) / horner<double>(x, below);
}

/// Φ(−x) · exp(x² / 2) for x ≥ 0, Φ the normal distribution function: a polynomial in 1 / (1 + 0.35 x), fitted to a
/// relative error of 6e-8 for x up to 20; beyond, the exponential is 0.
POLYATTN_INLINE Vector<float> normal_tail(Vector<float> x) {
    static constexpr float TERMS[] = {-2.85311100e-2f, 1.41272323e-1f, -2.50737585e-1f, 1.54166232e-1f, -2.01176694e-2f,
                                      1.04427477e-1f,  1.20061720e-1f, 1.39836045e-1f,  1.39622586e-1f};
    Vector<float> t = 1 / (1 + x * 0.35f);
    return t * horner<float>(t, TERMS);
}

/// The same for double: see functional/_erfc.py for the source.
POLYATTN_INLINE Vector<double> normal_tail(Vector<double> z) {
    static constexpr double SMALL_ABOVE[] = {1.85777706184603153e-1, 3.16112374387056560e0, 1.13864154151050156e2,
                                             3.77485237685302021e2, 3.20937758913846947e3};
    static constexpr double SMALL_BELOW[] = {1.0, 2.36012909523441209e1, 2.44024637934444173e2, 1.28261652607737228e3,
                                             2.84423683343917062e3};
    static constexpr double MIDDLE_ABOVE[] = {2.15311535474403846e-8, 5.64188496988670089e-1, 8.88314979438837594e0,
                                              6.61191906371416295e1,  2.98635138197400131e2,  8.81952221241769090e2,
                                              1.71204761263407058e3,  2.05107837782607147e3,  1.23033935479799725e3};
    static constexpr double MIDDLE_BELOW[] = {1.0,                   1.57449261107098347e1, 1.17693950891312499e2,
                                              5.37181101862009858e2, 1.62138957456669019e3, 3.29079923573345963e3,
                                              4.36261909014324716e3, 3.43936767414372164e3, 1.23033935480374942e3};
    static constexpr double LARGE_ABOVE[] = {1.63153871373020978e-2, 3.05326634961232344e-1, 3.60344899949804439e-1,
                                             1.25781726111229246e-1, 1.60837851487422766e-2, 6.58749161529837803e-4};
    static constexpr double LARGE_BELOW[] = {1.0,                    2.56852019228982242e0,  1.87295284992346725e0,
                                             5.27905102951428412e-1, 6.05183413124413191e-2, 2.33520497626869185e-3};
    constexpr double ROOT_HALF = 0.70710678118654752440, INVERSE_ROOT_OF_PI = 0.56418958354775628695;
    const Vector<double> four = broadcast<double>(4.0);
    Vector<double> x = z * ROOT_HALF, near = x > 4.0 ? four : x, far = x > 4.0 ? x : four;
    Vector<double> square = x * x;
    square = square > 1.0 ? broadcast<double>(1.0) : square;
    // exp(square) for square ≤ 1 as 1 / exp(−square)
    Vector<double> small = (1 - x * ratio(square, SMALL_ABOVE, SMALL_BELOW)) / exp_below<double>(-square);
    Vector<double> inverse = 1 / (far * far);
    Vector<double> large = (INVERSE_ROOT_OF_PI - inverse * ratio(inverse, LARGE_ABOVE, LARGE_BELOW)) / far;
    Vector<double> middle = ratio(near, MIDDLE_ABOVE, MIDDLE_BELOW);
    return (x > 4.0 ? large : x > 0.46875 ? middle : small) * 0.5;
}

/// x, rounded: no multiplication before it is joined with an addition after it. Where a difference of two products has
/// the choice, compilers choose differently for the last elements of a row.
template <class T> POLYATTN_INLINE Vector<T> rounded(Vector<T> x) {
#if defined(__x86_64__)
    asm("" : "+v"(x));
#elif defined(__aarch64__)
    asm("" : "+w"(x));
#endif
    return x;
}

/// |x|.
template <class T> POLYATTN_INLINE Vector<T> magnitude(Vector<T> x) {
    return (Vector<T>)((Bits<T>)x & Layout<T>::MAGNITUDE);
}

template <class T> POLYATTN_INLINE T magnitude(T x) { return x < 0 ? -x : x; }

/// √x, lane by lane; compilers make one instruction of it.
template <class T> POLYATTN_INLINE Vector<T> square_root(Vector<T> x) {
    Vector<T> y = x;
    for (int i = 0; i < LANES<T>; i++) y[i] = sizeof(T) == 4 ? __builtin_sqrtf(x[i]) : __builtin_sqrt(x[i]);
    return y;
}

/// log(x) of one normal number, or NaN, within two units in the last place; the maths library may not be linked.
inline double log_of(double x) {
    if (!(x == x)) return x;
    int64_t bits;
    memcpy(&bits, &x, sizeof(bits));
    const int64_t exponent = (bits - 0x3fe6a09e667f3bcd) >> 52;  // x = m · 2^exponent with m from √½ to √2
    bits -= exponent << 52;
    double m;
    memcpy(&m, &bits, sizeof(m));
    const double s = (m - 1) / (m + 1), square = s * s;  // log m = 2 · (s + s³ / 3 + s⁵ / 5 …)
    double series = 0;
    for (int power = 21; power > 1; power -= 2) series = (series + 1.0 / power) * square;
    const double e = static_cast<double>(exponent), high = 6.93147180369123816490e-01, low = 1.90821492927058770002e-10;
    return e * high + (2 * s + (2 * s * series + e * low));
}

// ---- rows whose length is no multiple of a vector ------------------------------------------------------------------

/// The first `count` elements at p, and `rest` in the other lanes.
template <class T> POLYATTN_INLINE Vector<T> load_part(const T *p, int64_t count, T rest = 0) {
    if (count >= LANES<T>) return load(p);
    Vector<T> x = broadcast(rest);
    memcpy(&x, p, static_cast<size_t>(count) * sizeof(T));
    return x;
}

/// Store the first `count` lanes.
template <class T> POLYATTN_INLINE void store_part(T *p, Vector<T> x, int64_t count) {
    if (count >= LANES<T>)
        store(p, x);
    else
        memcpy(p, &x, static_cast<size_t>(count) * sizeof(T));
}

/// Call body(j, count) for each vector of a row of n elements: `count` is a constant for all but the last one, so that
/// load_part and store_part have no branch there.
template <class T, class Body> POLYATTN_INLINE void along(int64_t n, Body body) {
    int64_t j = 0;
    for (; j + LANES<T> <= n; j += LANES<T>) body(j, static_cast<int64_t>(LANES<T>));
    if (j < n) body(j, n - j);
}

/// Watches for infinity and NaN among the vectors that pass by. Sums of x · 0 would do with fewer instructions, but
/// compilers replace them by 0.
template <class T> struct Watch {
    Bits<T> peak{};  // the largest magnitude so far; bits of floating-point numbers have their order

    POLYATTN_INLINE void see(Vector<T> x) { peak = larger(peak, (Bits<T>)x & Layout<T>::MAGNITUDE); }
    POLYATTN_INLINE bool not_finite() const {
        for (int i = 0; i < LANES<T>; i++)
            if (peak[i] >= Layout<T>::INFINITE) return true;
        return false;
    }
};
