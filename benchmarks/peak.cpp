// How many products the cores make from registers alone: no memory, no loop over weights. What a pass over
// many tokens cannot beat. Compiled and called by rounds.py, for the numbers that the kernels work in.
#include <immintrin.h>
#include <omp.h>

#ifdef __AVX512BF16__
// Sixteen sums at a time, more than the instruction takes cycles.
constexpr int SUMS = 16, OPERATIONS = 64;  // 32 products and 32 sums each
using Vector = __m512;
static inline Vector zero() { return _mm512_setzero_ps(); }
static inline Vector turned(Vector sum) {
    const __m512bh left = (__m512bh)_mm512_set1_epi32(0x3f803f80);
    const __m512bh right = (__m512bh)_mm512_set1_epi32(0x3f803f81);
    sum = _mm512_dpbf16_ps(sum, left, right);
    asm volatile("" : "+v"(sum));  // keeps the compiler from folding the loop
    return sum;
}
#else
constexpr int SUMS = 12, OPERATIONS = 16;
using Vector = __m256;
static inline Vector zero() { return _mm256_setzero_ps(); }
static inline Vector turned(Vector sum) {
    sum = _mm256_fmadd_ps(_mm256_set1_ps(1.0f), _mm256_set1_ps(1.0001f), sum);
    asm volatile("" : "+x"(sum));
    return sum;
}
#endif

extern "C" double slipstream_peak(int threads, long turns) {
    double seconds = 0;
#pragma omp parallel num_threads(threads)
    {
        Vector sums[SUMS];
        for (auto &sum : sums) sum = zero();
#pragma omp barrier
        const double begun = omp_get_wtime();
        for (long turn = 0; turn < turns; turn++) {
            // By number: sums that are walked over by reference are kept in memory, at three quarters of the rate.
#pragma GCC unroll 16
            for (int number = 0; number < SUMS; number++) sums[number] = turned(sums[number]);
        }
#pragma omp barrier
#pragma omp master
        seconds = omp_get_wtime() - begun;
    }
    return double(OPERATIONS) * SUMS * turns * threads / seconds;
}
