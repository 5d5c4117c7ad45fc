// tanh of vectors, for the softcap: c * tanh(score / c).
#pragma once

#include "math.h"

/// Coefficients of (tanh(x) - x) / x^3 as a quotient of polynomials in x^2, for |x| < 0.625 (Cephes, 1989).
template <class T> struct TanhSeries;

template <> struct TanhSeries<float> {
    static constexpr float ABOVE[] = {-5.70498872745e-3f, 2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f,
                                      -3.33332819422e-1f};
    static constexpr float BELOW[] = {1.0f};
};

template <> struct TanhSeries<double> {
    static constexpr double ABOVE[] = {-9.64399179425052238628e-1, -9.92877231001918586564e1,
                                       -1.61468768441708447952e3};
    static constexpr double BELOW[] = {1.0, 1.12811678491632931402e2, 2.23548839060100448583e3,
                                       4.84406305325125486048e3};
};

/// tanh(x) within two units in the last place; NaN stays NaN.
template <class T> POLYATTN_INLINE Vector<T> tanh_of(Vector<T> x) {
    using Series = TanhSeries<T>;
    Vector<T> size = x < 0 ? -x : x, square = x * x;
    Vector<T> correction = horner<T>(square, Series::ABOVE);
    if (sizeof(T) == 8) correction /= horner<T>(square, Series::BELOW);
    Vector<T> near = x + x * square * correction;
    Vector<T> e = exp_below<T>(size * T(-2));
    Vector<T> far = (1 - e) / (1 + e);
    return size < T(0.625) ? near : x < 0 ? -far : far;
}
