// AdamW's update of one parameter: the formula of optim/_adamw.py where no square leaves the range of the dtype.
// Products and sums are rounded one by one: a training goes on bit for bit with NumPy or with this.
#include "unfused.h"

#include "adamw.h"
#include "pieces.h"

namespace {

template <class T> struct Context {
    Pieces pieces;
    AdamWStep step;
    const T *theta, *grad, *mean, *square;
    T *new_theta, *new_mean, *new_square;
    Flag *flag;
};

template <class T> void update_piece(const void *context, int64_t piece, void *) {
    const auto &c = *static_cast<const Context<T> *>(context);
    const T beta1 = static_cast<T>(c.step.mean_decay), rest1 = static_cast<T>(1 - c.step.mean_decay);
    const T beta2 = static_cast<T>(c.step.square_decay), rest2 = static_cast<T>(1 - c.step.square_decay);
    const T factor = static_cast<T>(c.step.factor), decay = static_cast<T>(c.step.decay);
    const T inside = static_cast<T>(c.step.inside), outside = static_cast<T>(c.step.outside);
    const T least = static_cast<T>(c.step.least), most = static_cast<T>(c.step.most);
    Bits<T> outlying{};
    c.pieces.for_each(piece, [&](int64_t, int64_t first, int64_t size) {
        along<T>(size, [&](int64_t offset, int64_t count) __attribute__((always_inline)) {
            const int64_t j = first + offset;
            Vector<T> theta = load_part(c.theta + j, count), grad = load_part(c.grad + j, count);
            Vector<T> mean = load_part(c.mean + j, count) * beta1 + grad * rest1;
            Vector<T> old = load_part(c.square + j, count), square = old * beta2 + grad * grad * rest2;
            // Comparisons are false for NaN; a negative old one is a root (see optim/_adamw.py).
            outlying |= ~((old >= 0) & (old <= most) & (square <= most) &
                          ((square >= least) | ((square == 0) & (grad == 0))));
            Vector<T> denominator = square_root<T>(square + inside) + outside;
            Vector<T> change = mean / denominator * factor;
            change = denominator == 0 ? Vector<T>{} : change;
            store_part(c.new_theta + j, theta - (change + theta * decay), count);
            store_part(c.new_mean + j, mean, count);
            store_part(c.new_square + j, square, count);
        });
    });
    typename Lanes<T>::integer any = 0;
    for (int i = 0; i < LANES<T>; i++) any |= outlying[i];
    if (any) c.flag->raise();
}

template <class T>
Status update(int32_t threads, int64_t n, const AdamWStep *step, const void *const *inputs, void *const *outputs) {
    Flag flag;
    auto in = [&](int i) { return static_cast<const T *>(inputs[i]); };
    auto out = [&](int i) { return static_cast<T *>(outputs[i]); };
    Context<T> c = {Pieces(1, n), *step, in(0), in(1), in(2), in(3), out(0), out(1), out(2), &flag};
    Status status = parallel_for(c.pieces.count(), threads_for_elements(n, threads), 0, update_piece<T>, &c);
    return status == OK ? flag.status() : status;
}

}  // namespace

/// New parameter, mean and square (outputs) of n elements from parameter, gradient, mean and square (inputs).
POLYATTN_EXPORT Status polyattn_adamw(int32_t dtype, int32_t threads, int64_t n, const AdamWStep *step,
                                       const void *const *inputs, void *const *outputs) {
    return (dtype == FLOAT64 ? update<double> : update<float>)(threads, n, step, inputs, outputs);
}
