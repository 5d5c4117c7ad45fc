// Activations, gated or not, and AdamW's update, element by element.
//
// The formulas are those of functional/_gelu.py and functional/_silu.py: an activation f(x) = factor · decay has the
// derivative slope · decay², and neither factor underflows where the product with a large number does not.
// A result that is not finite raises the flag: Python then computes the formula, which keeps products in range.
#include "pieces.h"

namespace {

enum Activation : int32_t { GELU = 0, GELU_TANH = 1, SILU = 2 };

/// σ(x) = decay² / total and 1 − σ(x) = rest / total.
template <class T> struct Sigmoid {
    Vector<T> decay, rest, total;

    POLYATTN_INLINE explicit Sigmoid(Vector<T> x) {
        Vector<T> e = exp_below<T>(magnitude<T>(x) * static_cast<T>(-0.5)), square = e * e;
        decay = x < 0 ? e : broadcast<T>(1);
        rest = x < 0 ? broadcast<T>(1) : square;
        total = 1 + square;
    }
};

/// x · σ(x).
template <class T> struct Silu {
    Vector<T> x;
    Sigmoid<T> sigmoid;
    Vector<T> decay;

    POLYATTN_INLINE explicit Silu(Vector<T> x) : x(x), sigmoid(x), decay(sigmoid.decay) {}
    static POLYATTN_INLINE Vector<T> value(Vector<T> x) { return Silu(x).factor() * Silu(x).decay; }
    POLYATTN_INLINE Vector<T> factor() const { return x * decay / sigmoid.total; }
    POLYATTN_INLINE Vector<T> slope() const {
        Vector<T> inverse = 1 / sigmoid.total;
        return (1 + x * (sigmoid.rest * inverse)) * inverse;
    }
};

/// x · Φ(x) = max(x, 0) − |x| · Φ(−|x|).
template <class T> struct Gelu {
    Vector<T> x, size, tail, bell_root, decay;
    Bits<T> negative;

    POLYATTN_INLINE explicit Gelu(Vector<T> x) : x(x), size(magnitude<T>(x)), negative(x < 0) {
        tail = normal_tail(size);
        bell_root = exp_below<T>(size * size * static_cast<T>(-0.25));
        decay = negative ? bell_root : broadcast<T>(1);
    }
    static POLYATTN_INLINE Vector<T> value(Vector<T> x) {
        Vector<T> size = magnitude<T>(x);
        Vector<T> bell = exp_below<T>(size * size * static_cast<T>(-0.5));
        return larger(Vector<T>{}, x) - size * normal_tail(size) * bell;  // |x| · tail is below 0.5
    }
    POLYATTN_INLINE Vector<T> factor() const {
        Vector<T> below = size * tail * bell_root;
        return negative ? -below : x - below * bell_root;
    }
    POLYATTN_INLINE Vector<T> slope() const {
        Vector<T> below = rounded<T>(tail) - size * static_cast<T>(0.39894228040143267794);  // 1 / √2π
        return negative ? below : 1 - bell_root * bell_root * below;
    }
};

/// x · σ(2u) with u = √(2 / π) · (x + 0.044715 x³).
template <class T> struct GeluTanh {
    static constexpr T TWO_ROOT = static_cast<T>(1.59576912160573071176), CUBIC = static_cast<T>(0.07135481627260025);
    Vector<T> x, square;
    Sigmoid<T> sigmoid;
    Vector<T> decay;

    POLYATTN_INLINE explicit GeluTanh(Vector<T> x)
        : x(x), square(x * x), sigmoid(x * (square * CUBIC + TWO_ROOT)), decay(sigmoid.decay) {}
    static POLYATTN_INLINE Vector<T> value(Vector<T> x) { return GeluTanh(x).factor() * GeluTanh(x).decay; }
    POLYATTN_INLINE Vector<T> factor() const { return x * decay / sigmoid.total; }
    POLYATTN_INLINE Vector<T> slope() const {
        Vector<T> inverse = 1 / sigmoid.total, grown = x * (square * (3 * CUBIC) + TWO_ROOT);  // x · 2u′
        return (1 + grown * (sigmoid.rest * inverse)) * inverse;
    }
};

template <class Element> struct Forward {
    Pieces pieces;
    Lines<const Element> x, up;
    Lines<Element> y;
    Flag *flag;
};

/// y = f(x), or f(x) · up, for one piece.
template <class Element, class F, bool GATED> void forward_piece(const void *context, int64_t piece, void *) {
    typedef Wide<Element> T;
    const auto &c = *static_cast<const Forward<Element> *>(context);
    Watch<T> watch;
    c.pieces.for_each(piece, [&](int64_t i, int64_t column, int64_t columns) {
        const Element *x = c.x.at(i, column), *up = GATED ? c.up.at(i, column) : nullptr;
        Element *y = c.y.at(i, column);
        along<T>(columns, [&](int64_t j, int64_t count) __attribute__((always_inline)) {
            Vector<T> x_ = load_part(x + j, count), result;
            if (GATED) {
                F f(x_);
                result = f.factor() * load_part(up + j, count) * f.decay;
            } else {
                result = F::value(x_);
            }
            watch.see(result);
            store_part(y + j, result, count);
        });
    });
    if (watch.not_finite()) c.flag->raise();
}

template <class Element> struct Backward {
    Pieces pieces;
    Lines<const Element> dy, x, up;
    Lines<Element> dx, dup;
    Flag *flag;
};

/// dx = dy · f′(x); with a gate dx = dy · up · f′(x) and dup = dy · f(x).
template <class Element, class F, bool GATED> void backward_piece(const void *context, int64_t piece, void *) {
    typedef Wide<Element> T;
    const auto &c = *static_cast<const Backward<Element> *>(context);
    Watch<T> watch;
    c.pieces.for_each(piece, [&](int64_t i, int64_t column, int64_t columns) {
        const Element *dy = c.dy.at(i, column), *x = c.x.at(i, column), *up = GATED ? c.up.at(i, column) : nullptr;
        Element *dx = c.dx.at(i, column), *dup = GATED ? c.dup.at(i, column) : nullptr;
        along<T>(columns, [&](int64_t j, int64_t count) __attribute__((always_inline)) {
            F f(load_part(x + j, count));
            Vector<T> dy_ = load_part(dy + j, count), product = dy_;
            if (GATED) {
                product *= load_part(up + j, count);
                Vector<T> dup_ = dy_ * f.factor() * f.decay;
                watch.see(dup_);
                store_part(dup + j, dup_, count);
            }
            Vector<T> dx_ = product * f.decay * f.slope() * f.decay;
            watch.see(dx_);
            store_part(dx + j, dx_, count);
        });
    });
    if (watch.not_finite()) c.flag->raise();
}

/// Run the body that is made for an activation.
template <class Element, template <class, class, bool> class Body, bool GATED, class Context>
Status run(int32_t activation, int32_t threads, const Context &c) {
    typedef Wide<Element> T;
    TaskBody body = activation == GELU        ? Body<Element, Gelu<T>, GATED>::run
                    : activation == GELU_TANH ? Body<Element, GeluTanh<T>, GATED>::run
                                              : Body<Element, Silu<T>, GATED>::run;
    threads = threads_for_elements(c.pieces.rows * c.pieces.n, threads);
    Status status = parallel_for(c.pieces.count(), threads, 0, body, &c);
    return status == OK ? c.flag->status() : status;
}

template <class Element, class F, bool GATED> struct ForwardBody {
    static void run(const void *c, int64_t piece, void *w) { forward_piece<Element, F, GATED>(c, piece, w); }
};

template <class Element, class F, bool GATED> struct BackwardBody {
    static void run(const void *c, int64_t piece, void *w) { backward_piece<Element, F, GATED>(c, piece, w); }
};

template <class Element>
Status forward(int32_t activation, int32_t threads, int64_t rows, int64_t n, const void *x, int64_t x_row,
               const void *up, int64_t up_row, void *y) {
    Flag flag;
    Forward<Element> c = {Pieces(rows, n),
                          {static_cast<const Element *>(x), x_row},
                          {static_cast<const Element *>(up), up_row},
                          {static_cast<Element *>(y), n},
                          &flag};
    return up ? run<Element, ForwardBody, true>(activation, threads, c)
              : run<Element, ForwardBody, false>(activation, threads, c);
}

template <class Element>
Status backward(int32_t activation, int32_t threads, int64_t rows, int64_t n, const void *dy, int64_t dy_row,
                const void *x, int64_t x_row, const void *up, int64_t up_row, void *dx, void *dup) {
    Flag flag;
    Backward<Element> c = {Pieces(rows, n),
                           {static_cast<const Element *>(dy), dy_row},
                           {static_cast<const Element *>(x), x_row},
                           {static_cast<const Element *>(up), up_row},
                           {static_cast<Element *>(dx), n},
                           {static_cast<Element *>(dup), n},
                           &flag};
    return up ? run<Element, BackwardBody, true>(activation, threads, c)
              : run<Element, BackwardBody, false>(activation, threads, c);
}

}  // namespace

/// y (rows, n), contiguous, = f(x), or f(x) · up if up is not null. x and up have rows at a distance, in elements.
POLYATTN_EXPORT Status polyattn_activation(int32_t dtype, int32_t activation, int32_t threads, int64_t rows, int64_t n,
                                            const void *x, int64_t x_row, const void *up, int64_t up_row, void *y) {
    return FOR_DTYPE(dtype, forward)(activation, threads, rows, n, x, x_row, up, up_row, y);
}

/// dx (rows, n) = dy · f′(x), or dx = dy · up · f′(x) and dup = dy · f(x) if up is not null.
POLYATTN_EXPORT Status polyattn_activation_backward(int32_t dtype, int32_t activation, int32_t threads, int64_t rows,
                                                     int64_t n, const void *dy, int64_t dy_row, const void *x,
                                                     int64_t x_row, const void *up, int64_t up_row, void *dx,
                                                     void *dup) {
    return FOR_DTYPE(dtype, backward)(activation, threads, rows, n, dy, dy_row, x, x_row, up, up_row, dx, dup);
}
