// Numbers of the kernels: float32, on AVX2 with fused products.

using Number = float;
using Vector = __m256;
constexpr int64_t LANES = 8, LINE = 16;  // numbers of a line of the cache

// Bytes of weights that all tokens pass by before the next ones are taken: half of a first-level cache, as the states
// pass by as well; and the outputs that they come in multiples of.
constexpr int64_t PIECE = 8192, PIECE_OUTPUTS = 3;

// Outputs of a tile, by its tokens: at most twelve sums, which leaves four registers for states and a weight. A token alone
// takes rows of weights that lie one after another.
constexpr int ALONE = 8, OUTPUTS_OF[] = {0, 3, 3, 3, 3};

// Queries whose values are summed together, of four vectors each.
constexpr int QUERIES = 3;

inline float widen(Number v) { return v; }
inline Number narrow(float v) { return v; }
inline Vector load(const Number *p) { return _mm256_loadu_ps(p); }
inline void store(Number *p, Vector v) { _mm256_storeu_ps(p, v); }
inline Vector load_floats(const float *p) { return _mm256_loadu_ps(p); }
inline void store_floats(float *p, Vector v) { _mm256_storeu_ps(p, v); }
inline Vector all(float v) { return _mm256_set1_ps(v); }
inline Vector add(Vector a, Vector b) { return _mm256_add_ps(a, b); }
inline Vector subtract(Vector a, Vector b) { return _mm256_sub_ps(a, b); }
inline Vector multiply(Vector a, Vector b) { return _mm256_mul_ps(a, b); }
inline Vector divide(Vector a, Vector b) { return _mm256_div_ps(a, b); }
inline Vector larger(Vector a, Vector b) { return _mm256_max_ps(a, b); }
inline Vector smaller(Vector a, Vector b) { return _mm256_min_ps(a, b); }
inline Vector fused(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
inline Vector fused_minus(Vector a, Vector b, Vector c) { return _mm256_fnmadd_ps(a, b, c); }
inline Vector nearest(Vector v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

// v 2^n, for whole n that are exponents of normal numbers.
inline Vector times_power(Vector v, Vector n) {
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_mul_ps(v, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}

// The sums of four vectors, each in the same order: neighbours, pairs of neighbours, then the halves.
inline __m128 sums4(Vector a, Vector b, Vector c, Vector d) {
    const Vector pairs = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    return _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1));
}

inline float sum_of(Vector v) { return _mm_cvtss_f32(sums4(v, v, v, v)); }

inline float most_of(Vector v) {
    float lanes[LANES];
    _mm256_storeu_ps(lanes, v);
    return *std::max_element(lanes, lanes + LANES);
}

// `v` where `seen` is not minus infinity, else 0.
inline Vector where_seen(Vector seen, Vector v) {
    return _mm256_and_ps(_mm256_cmp_ps(seen, _mm256_set1_ps(-INFINITY), _CMP_NEQ_OQ), v);
}

// The sum of products of `width` numbers, by lanes.
inline Vector products(const Number *a, const Number *b, int64_t width) {
    Vector sum = _mm256_setzero_ps();
    for (int64_t k = 0; k < width; k += LANES) sum = _mm256_fmadd_ps(load(a + k), load(b + k), sum);
    return sum;
}

// OUTS outputs times TOKS tokens, at most twelve sums, each in the same order whatever the tile.
// Meanwhile weights `ahead` numbers further on are fetched.
template <int OUTS, int TOKS, class Sink>
inline void tile(const Number *w, int64_t in, const Number *x, int64_t stride, Ahead ahead, Sink sink) {
    static_assert(OUTS * TOKS <= 12, "more sums than registers");
    Vector sum[12];
    for (int i = 0; i < 12; i++) sum[i] = _mm256_setzero_ps();
    // Compiled for every number of outputs whose weights are fetched, so that nothing is asked in the loop.
    const auto steps = [&](auto fetched) {
        const Number *next = w + ahead.from * in + ahead.distance;
        for (int64_t k = 0; k < in; k += LINE) {
            for (int o = 0; o < fetched; o++) _mm_prefetch((const char *)(next + o * in + k), _MM_HINT_T0);
            for (int64_t part = k; part < k + LINE; part += LANES) {
                Vector weight[OUTS];
                for (int o = 0; o < OUTS; o++) weight[o] = load(w + o * in + part);
                for (int t = 0; t < TOKS; t++) {
                    const Vector state = load(x + t * stride + part);
                    for (int o = 0; o < OUTS; o++)
                        sum[t * OUTS + o] = _mm256_fmadd_ps(weight[o], state, sum[t * OUTS + o]);
                }
            }
        }
    };
    const int fetched = std::min(ahead.to, OUTS) - ahead.from;
    if (fetched <= 0) steps(std::integral_constant<int, 0>());
    if (fetched == 1) steps(std::integral_constant<int, 1>());
    if (fetched == 2) steps(std::integral_constant<int, 2>());
    if (fetched >= 3) steps(std::integral_constant<int, 3>());
    float found[12];
    for (int i = 0; i < OUTS * TOKS; i += 4) _mm_storeu_ps(found + i, sums4(sum[i], sum[i + 1], sum[i + 2], sum[i + 3]));
    for (int t = 0; t < TOKS; t++)
        for (int o = 0; o < OUTS; o++) sink(o, t, found[t * OUTS + o]);
}
