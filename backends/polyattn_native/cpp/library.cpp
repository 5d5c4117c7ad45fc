// What the library says of itself, for the check in _library.py before any other call.
#include "adamw.h"
#include "attention.h"

#ifndef POLYATTN_INSTRUCTION_SET
#error "the build defines POLYATTN_INSTRUCTION_SET, the name of the instruction set"
#endif

namespace {

/// The size of an argument structure, by its name in Python.
struct AbiSize {
    const char *name;
    int64_t size;
};

struct Abi {
    uint64_t magic;
    int32_t version;
    int32_t count;
    const char *instruction_set;
    const AbiSize *sizes;
};

constexpr AbiSize SIZES[] = {
    {"Array", sizeof(Array)},
    {"Integers", sizeof(Integers)},
    {"Attention", sizeof(Attention)},
    {"AttentionBackward", sizeof(AttentionBackward)},
    {"AdamWStep", sizeof(AdamWStep)},
};

constexpr uint64_t MAGIC = 0x6e747461796c6f70;  // "polyattn", little endian

constexpr Abi ABI = {MAGIC, ABI_VERSION, sizeof(SIZES) / sizeof(SIZES[0]), POLYATTN_INSTRUCTION_SET, SIZES};

}  // namespace

POLYATTN_EXPORT const void *polyattn_abi() { return &ABI; }
