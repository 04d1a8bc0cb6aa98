// Numbers of the kernels: bf16, rounded where a plain PyTorch model rounds them, on AVX-512 with bf16 products.

using Number = uint16_t;
using Vector = __m512;
constexpr int64_t LANES = 16;

// Bytes of weights that all tokens pass by before the next ones are taken: a third of a first-level cache, as the
// next ones are fetched meanwhile; and the outputs that they come in multiples of.
constexpr int64_t PIECE = 16384, PIECE_OUTPUTS = 8;

// Outputs of a tile, by its tokens: sixteen sums. A token alone takes rows of weights that lie one after another.
constexpr int ALONE = 16, OUTPUTS_OF[] = {0, 8, 8, 4, 4};

// Queries whose values are summed together, of four vectors each.
constexpr int QUERIES = 4;

inline float widen(Number v) {
    uint32_t bits = uint32_t(v) << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}

inline Number narrow(float f) {  // round to nearest, ties to even; NaN stays NaN
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return Number((bits >> 16) | 0x40);
    return Number((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline Vector load(const Number *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}

inline void store(Number *p, Vector v) { _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh(v)); }

inline Vector load_floats(const float *p) { return _mm512_loadu_ps(p); }
inline void store_floats(float *p, Vector v) { _mm512_storeu_ps(p, v); }
inline Vector all(float v) { return _mm512_set1_ps(v); }
inline Vector add(Vector a, Vector b) { return _mm512_add_ps(a, b); }
inline Vector subtract(Vector a, Vector b) { return _mm512_sub_ps(a, b); }
inline Vector multiply(Vector a, Vector b) { return _mm512_mul_ps(a, b); }
inline Vector divide(Vector a, Vector b) { return _mm512_div_ps(a, b); }
inline Vector larger(Vector a, Vector b) { return _mm512_max_ps(a, b); }
inline Vector smaller(Vector a, Vector b) { return _mm512_min_ps(a, b); }
inline Vector fused(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
inline Vector fused_minus(Vector a, Vector b, Vector c) { return _mm512_fnmadd_ps(a, b, c); }
inline Vector nearest(Vector v) { return _mm512_roundscale_ps(v, 0); }
inline Vector times_power(Vector v, Vector n) { return _mm512_scalef_ps(v, n); }  // v 2^n
inline float sum_of(Vector v) { return _mm512_reduce_add_ps(v); }
inline float most_of(Vector v) { return _mm512_reduce_max_ps(v); }

// `v` where `seen` is not minus infinity, else 0.
inline Vector where_seen(Vector seen, Vector v) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(seen, _mm512_set1_ps(-INFINITY), _CMP_NEQ_OQ), v);
}

inline __m512bh load32(const Number *p) { return (__m512bh)_mm512_loadu_si512(p); }

// The sum of products of `width` numbers, by lanes.
inline Vector products(const Number *a, const Number *b, int64_t width) {
    Vector sum = _mm512_setzero_ps();
    for (int64_t k = 0; k < width; k += 32) sum = _mm512_dpbf16_ps(sum, load32(a + k), load32(b + k));
    return sum;
}

// The sums of sixteen vectors, in the order of _mm512_reduce_add_ps: halves, quarters, then pairs. The sum of vector i
// comes to place16(i), which is its own inverse.
inline Vector sums16(const Vector *v) {
    Vector half[8], quarter[4], pair[2];
    for (int i = 0; i < 8; i++)
        half[i] = _mm512_add_ps(_mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0x44),
                                _mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0xee));
    for (int i = 0; i < 4; i++)
        quarter[i] = _mm512_add_ps(_mm512_shuffle_f32x4(half[2 * i], half[2 * i + 1], 0x88),
                                   _mm512_shuffle_f32x4(half[2 * i], half[2 * i + 1], 0xdd));
    for (int i = 0; i < 2; i++)
        pair[i] = _mm512_add_ps(_mm512_shuffle_ps(quarter[2 * i], quarter[2 * i + 1], 0x44),
                                _mm512_shuffle_ps(quarter[2 * i], quarter[2 * i + 1], 0xee));
    return _mm512_add_ps(_mm512_shuffle_ps(pair[0], pair[1], 0x88), _mm512_shuffle_ps(pair[0], pair[1], 0xdd));
}

constexpr int place16(int i) { return i % 4 * 4 + i / 4; }

// OUTS outputs times TOKS tokens, at most sixteen sums, each in the same order whatever the tile.
// Meanwhile the weights `ahead` numbers further on are fetched, those of outputs [from, to) of the tile.
template <int OUTS, int TOKS, class Sink>
inline void tile(const Number *w, int64_t in, const Number *x, int64_t stride, Ahead ahead, Sink sink) {
    static_assert(OUTS * TOKS <= 16, "sixteen sums are reduced together");
    Vector sum[16];
    for (int i = 0; i < 16; i++) sum[i] = _mm512_setzero_ps();
    for (int64_t k = 0; k < in; k += 32) {
        __m512bh state[TOKS];
        for (int t = 0; t < TOKS; t++) state[t] = load32(x + t * stride + k);
        for (int o = 0; o < OUTS; o++) {
            __m512bh weight = load32(w + o * in + k);
            if (o >= ahead.from && o < ahead.to) _mm_prefetch((const char *)(w + o * in + k + ahead.distance), _MM_HINT_T0);
            for (int t = 0; t < TOKS; t++) {
                Vector &mine = sum[place16(t * OUTS + o)];
                mine = _mm512_dpbf16_ps(mine, weight, state[t]);
            }
        }
    }
    if (OUTS * TOKS == 1) {
        sink(0, 0, _mm512_reduce_add_ps(sum[place16(0)]));
        return;
    }
    alignas(64) float found[16];
    _mm512_store_ps(found, sums16(sum));
    for (int t = 0; t < TOKS; t++)
        for (int o = 0; o < OUTS; o++) sink(o, t, found[t * OUTS + o]);
}
