// What Python and the library must agree on: version, codes, arrays. `_structures.py` mirrors the structures.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef _WIN32
#define POLYATTN_EXPORT extern "C" __declspec(dllexport)
#else
#define POLYATTN_EXPORT extern "C" __attribute__((visibility("default")))
#endif

/// Raised whenever a structure or the meaning of a field changes.
constexpr int32_t ABI_VERSION = 2;

/// The result of every entry point: OK, DOUBT, or the bytes of a buffer for which there is no memory. After DOUBT the
/// results are not valid, and Python runs the generic kernel.
typedef int64_t Status;
constexpr Status OK = 0, DOUBT = -1;

enum DType : int32_t { FLOAT32 = 0, FLOAT64 = 1, FLOAT16 = 2, BFLOAT16 = 3 };

/// The most axes before the heads that a call may have; Python joins axes where it can.
constexpr int BATCH_AXES = 4;

/// An array (batch..., heads, rows, features), or one of fewer axes. Strides are in elements, 0 where it is broadcast,
/// and may be negative.
struct Array {
    void *data;  // null if absent
    int64_t batch[BATCH_AXES];
    int64_t head;
    int64_t row;
    int64_t feature;
};

/// An integer for each entry of the batch: an int64 array, or one value if data is null.
struct Integers {
    const int64_t *data;
    int64_t batch[BATCH_AXES];
    int64_t value;
};
