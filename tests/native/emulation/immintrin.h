// The AVX-512 instructions that the bf16 kernels use, in plain C++: so that the kernels' logic is tested on processors
// without them. Put before the compiler's own header; the numbers are those of Intel's manual up to the rounding inside
// a product of pairs, the speed is not.
#pragma once
#include_next <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

// Apart from the functions, which argument-dependent lookup would find beside the kernels' own.
namespace vectors {

struct Floats {
    float of[16];
};
struct Bf16s {
    uint16_t of[32];
};
struct Words {
    uint32_t of[16];
    explicit operator Bf16s() const {
        Bf16s same;
        std::memcpy(&same, of, sizeof same);
        return same;
    }
};
struct Narrowed {
    uint16_t of[16];
    explicit operator __m256i() const { return _mm256_loadu_si256((const __m256i *)of); }
};

}  // namespace vectors

namespace emulated {

using namespace vectors;

template <class Function>
inline Floats each(Function function) {
    Floats out;
    for (int i = 0; i < 16; i++) out.of[i] = function(i);
    return out;
}

inline Floats set1(float v) { return each([&](int) { return v; }); }
inline Floats add(Floats a, Floats b) { return each([&](int i) { return a.of[i] + b.of[i]; }); }
inline Floats sub(Floats a, Floats b) { return each([&](int i) { return a.of[i] - b.of[i]; }); }
inline Floats mul(Floats a, Floats b) { return each([&](int i) { return a.of[i] * b.of[i]; }); }
inline Floats div(Floats a, Floats b) { return each([&](int i) { return a.of[i] / b.of[i]; }); }
inline Floats max(Floats a, Floats b) { return each([&](int i) { return a.of[i] > b.of[i] ? a.of[i] : b.of[i]; }); }
inline Floats min(Floats a, Floats b) { return each([&](int i) { return a.of[i] < b.of[i] ? a.of[i] : b.of[i]; }); }
inline Floats fmadd(Floats a, Floats b, Floats c) { return each([&](int i) { return std::fmaf(a.of[i], b.of[i], c.of[i]); }); }
inline Floats fnmadd(Floats a, Floats b, Floats c) { return each([&](int i) { return std::fmaf(-a.of[i], b.of[i], c.of[i]); }); }
inline Floats roundscale(Floats v, int) { return each([&](int i) { return std::nearbyintf(v.of[i]); }); }
inline Floats scalef(Floats v, Floats n) { return each([&](int i) { return std::ldexp(v.of[i], int(n.of[i])); }); }

template <class Vector>
inline Vector load(const void *p) {
    Vector out;
    std::memcpy(&out, p, sizeof out);
    return out;
}

inline void store(float *p, Floats v) { std::memcpy(p, v.of, sizeof v); }

inline Words from_u16(__m256i v) {
    uint16_t halves[16];
    _mm256_storeu_si256((__m256i *)halves, v);
    Words out;
    std::copy(halves, halves + 16, out.of);
    return out;
}

inline Words shifted(Words v, int by) {
    for (uint32_t &word : v.of) word <<= by;
    return v;
}

inline Floats as_floats(Words v) { return load<Floats>(v.of); }

inline Narrowed to_bf16(Floats v) {  // nearest, ties to even; NaN stays NaN
    Narrowed out;
    for (int i = 0; i < 16; i++) {
        const uint32_t bits = load<uint32_t>(v.of + i);
        const bool nan = (bits & 0x7fffffff) > 0x7f800000;
        out.of[i] = uint16_t(nan ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
    return out;
}

inline float to_float(uint16_t v) {
    const uint32_t bits = uint32_t(v) << 16;
    return load<float>(&bits);
}

inline Floats pairs(Floats sum, Bf16s a, Bf16s b) {
    return each([&](int i) {
        const float odd = std::fmaf(to_float(a.of[2 * i + 1]), to_float(b.of[2 * i + 1]), sum.of[i]);
        return std::fmaf(to_float(a.of[2 * i]), to_float(b.of[2 * i]), odd);
    });
}

inline uint32_t unequal(Floats a, Floats b) {  // ordered: false where one is NaN
    uint32_t mask = 0;
    for (int i = 0; i < 16; i++) mask |= uint32_t(a.of[i] < b.of[i] || a.of[i] > b.of[i]) << i;
    return mask;
}

inline Floats where(uint32_t mask, Floats v) { return each([&](int i) { return mask >> i & 1 ? v.of[i] : 0.0f; }); }

inline Floats quarters(Floats a, Floats b, int choice) {
    return each([&](int i) { return (i < 8 ? a : b).of[(choice >> i / 4 * 2 & 3) * 4 + i % 4]; });
}

inline Floats in_quarters(Floats a, Floats b, int choice) {
    return each([&](int i) { return (i % 4 < 2 ? a : b).of[i / 4 * 4 + (choice >> i % 4 * 2 & 3)]; });
}

inline float sum(Floats v) {  // halves, quarters, then pairs
    for (int width = 8; width >= 1; width /= 2)
        for (int i = 0; i < width; i++) v.of[i] += v.of[i + width];
    return v.of[0];
}

inline float most(Floats v) { return *std::max_element(v.of, v.of + 16); }

}  // namespace emulated

#define __AVX512BF16__ 1
#define __m512 vectors::Floats
#define __m512bh vectors::Bf16s
#define _mm512_set1_ps emulated::set1
#define _mm512_setzero_ps() emulated::set1(0.0f)
#define _mm512_add_ps emulated::add
#define _mm512_sub_ps emulated::sub
#define _mm512_mul_ps emulated::mul
#define _mm512_div_ps emulated::div
#define _mm512_max_ps emulated::max
#define _mm512_min_ps emulated::min
#define _mm512_fmadd_ps emulated::fmadd
#define _mm512_fnmadd_ps emulated::fnmadd
#define _mm512_roundscale_ps emulated::roundscale
#define _mm512_scalef_ps emulated::scalef
#define _mm512_loadu_ps emulated::load<vectors::Floats>
#define _mm512_loadu_si512 emulated::load<vectors::Words>
#define _mm512_storeu_ps emulated::store
#define _mm512_store_ps emulated::store
#define _mm512_cvtepu16_epi32 emulated::from_u16
#define _mm512_slli_epi32 emulated::shifted
#define _mm512_castsi512_ps emulated::as_floats
#define _mm512_cvtneps_pbh emulated::to_bf16
#define _mm512_dpbf16_ps emulated::pairs
#define _mm512_cmp_ps_mask(a, b, kind) emulated::unequal(a, b)
#define _mm512_maskz_mov_ps emulated::where
#define _mm512_shuffle_f32x4 emulated::quarters
#define _mm512_shuffle_ps emulated::in_quarters
#define _mm512_reduce_add_ps emulated::sum
#define _mm512_reduce_max_ps emulated::most
