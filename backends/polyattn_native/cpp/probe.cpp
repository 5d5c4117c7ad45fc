// Which x86-64 instruction sets this machine can run. The file is compiled for the baseline, so that any CPU can run it.
#include <stdint.h>

#include "abi.h"

#if defined(__x86_64__)
#include <cpuid.h>

namespace {

struct Registers {
    unsigned a = 0, b = 0, c = 0, d = 0;
};

/// The answer of CPUID; all 0 if the CPU does not have the leaf.
Registers cpuid(unsigned leaf, unsigned subleaf) {
    Registers r;
    if (!__get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d)) return Registers();
    return r;
}

/// The register states that the operating system saves, or 0 if it does not say.
unsigned saved_states(const Registers &leaf1) {
    constexpr unsigned OSXSAVE = 1u << 27;
    if (!(leaf1.c & OSXSAVE)) return 0;
    unsigned low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

bool has(unsigned value, unsigned bits) { return (value & bits) == bits; }

}  // namespace

/// Bit 0: x86-64-v3 can run here, bit 1: x86-64-v4, bit 2: x86-64-v4 with AVX512-BF16.
POLYATTN_EXPORT int32_t polyattn_cpu() {
    constexpr unsigned VECTORS_OF_256 = 0x6, VECTORS_OF_512 = 0xe6;                    // bits of XCR0
    constexpr unsigned FMA_MOVBE_AVX_F16C = 1u << 12 | 1u << 22 | 1u << 28 | 1u << 29;  // leaf 1, ECX
    constexpr unsigned BMI1_AVX2_BMI2 = 1u << 3 | 1u << 5 | 1u << 8;                    // leaf 7, EBX
    constexpr unsigned AVX512_F_DQ_CD_BW_VL = 1u << 16 | 1u << 17 | 1u << 28 | 1u << 30 | 1u << 31;
    constexpr unsigned LZCNT = 1u << 5;        // leaf 0x80000001, ECX
    constexpr unsigned AVX512_BF16 = 1u << 5;  // leaf 7, subleaf 1, EAX
    const Registers leaf1 = cpuid(1, 0), leaf7 = cpuid(7, 0), extended = cpuid(0x80000001, 0);
    const unsigned states = saved_states(leaf1);
    const bool v3 = has(states, VECTORS_OF_256) && has(leaf1.c, FMA_MOVBE_AVX_F16C) &&
                    has(leaf7.b, BMI1_AVX2_BMI2) && has(extended.c, LZCNT);
    const bool v4 = v3 && has(states, VECTORS_OF_512) && has(leaf7.b, AVX512_F_DQ_CD_BW_VL);
    const bool bf16 = v4 && leaf7.a >= 1 && has(cpuid(7, 1).a, AVX512_BF16);
    return v3 | v4 << 1 | bf16 << 2;
}
#endif
