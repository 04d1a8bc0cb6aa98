// How many bf16 products the cores make from registers alone: no memory, no loop over weights. What a pass over
// many tokens cannot beat. Compiled and called by rounds.py.
#include <immintrin.h>
#include <omp.h>

extern "C" double slipstream_peak(int threads, long turns) {
    // Sixteen sums at a time, more than the instruction takes cycles.
    double seconds = 0;
#pragma omp parallel num_threads(threads)
    {
        __m512 sums[16];
        for (auto &sum : sums) sum = _mm512_setzero_ps();
        const __m512bh left = (__m512bh)_mm512_set1_epi32(0x3f803f80);
        const __m512bh right = (__m512bh)_mm512_set1_epi32(0x3f803f81);
#pragma omp barrier
        const double begun = omp_get_wtime();
        for (long turn = 0; turn < turns; turn++) {
            // By number: sums that are walked over by reference are kept in memory, at three quarters of the rate.
#pragma GCC unroll 16
            for (int number = 0; number < 16; number++) {
                sums[number] = _mm512_dpbf16_ps(sums[number], left, right);
                asm volatile("" : "+v"(sums[number]));  // keeps the compiler from folding the loop
            }
        }
#pragma omp barrier
#pragma omp master
        seconds = omp_get_wtime() - begun;
    }
    return 64.0 * 16.0 * turns * threads / seconds;  // 32 products and 32 sums each
}
