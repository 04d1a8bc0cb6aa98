// Decoder passes over few tokens on a CPU with AVX-512 and bf16: whole passes, one parallel region each.
//
// Every number that a token gets depends on its row's own tokens alone: sums run in an order that is fixed by the
// model's shape, not by how many tokens share the pass, nor by how many threads there are. So a block of eight
// tokens gives the same bits as eight single steps.
//
// Weights are row-major bf16 [out, in], read in place; sums are float32; states are rounded to bf16 where a plain
// PyTorch model rounds them. Widths must be multiples of 32.

#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

using bf16 = uint16_t;

// Bytes of weights that all tokens pass by before the next ones are taken: a third of a first-level cache, as the
// next ones are fetched meanwhile.
constexpr int64_t PIECE = 16384;

extern "C" {

// One layer's weights. Optional pointers are null.
struct Layer {
    const bf16 *input_norm, *qkv, *qkv_bias, *q_norm, *k_norm, *out, *mlp_norm, *gate_up, *down;
    int64_t window;  // 0: none
    int64_t causal;  // 0: a block's tokens see one another both ways
};

struct Model {
    int64_t layers, width, heads, groups, head_dim, inner;
    float eps;
    const Layer *layer;
    const bf16 *norm;
    const float *cos, *sin;  // [positions, head_dim]; sin has the minus sign of the first half
};

// Keys and values of one layer, [rows, groups, slots, head_dim].
struct Buffers {
    bf16 *keys, *values;
    int64_t slots;
};

struct Pass {
    int64_t rows, tokens, threads;
    const int64_t *position;  // [rows, tokens], slots that are written
    const int64_t *rotary;    // [rows, tokens], rows of the tables
    const int64_t *row;       // [rows], rows of the buffers
    const Buffers *buffers;   // per layer
    bf16 *const *taps;        // per layer a [rows, tokens, width] view or null; null for no taps at all
    int64_t tap_row, tap_token;  // numbers from one row's, one token's tap to the next one's
    bf16 *x;                  // [rows, tokens, width], states in; overwritten
    bf16 *out;                // [rows, tokens, width], states after the final norm
};

// Features of context tokens on their way to the keys and values of a drafter.
struct Context {
    int64_t rows, tokens, features, threads;
    const bf16 *x;         // [rows, tokens, features]
    const bf16 *fuse;      // [width, features]
    const bf16 *norm;      // [width]
    const int64_t *position, *row;
    const Buffers *buffers;
};
}

namespace {

inline float widen(bf16 v) {
    uint32_t bits = uint32_t(v) << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}

inline bf16 narrow(float f) {  // round to nearest, ties to even; NaN stays NaN
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return bf16((bits >> 16) | 0x40);
    return bf16((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline __m512 widen16(const bf16 *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}

inline void narrow16(bf16 *p, __m512 v) { _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh(v)); }

inline __m512bh load32(const bf16 *p) { return (__m512bh)_mm512_loadu_si512(p); }

// exp with a relative error of about 2e-7: 2^n times a polynomial on [-ln2/2, ln2/2].
inline __m512 exp16(__m512 x) {
    x = _mm512_max_ps(_mm512_min_ps(x, _mm512_set1_ps(88.0f)), _mm512_set1_ps(-87.0f));
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665796e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001e-1f));
    p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(p, n);
}

// The sums of sixteen vectors, in the order of _mm512_reduce_add_ps: halves, quarters, then pairs. Sum i comes to
// place order[i].
inline __m512 sums16(const __m512 *v) {
    __m512 half[8], quarter[4], pair[2];
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

inline int place16(int i) { return i % 4 * 4 + i / 4; }

struct Ahead {
    int64_t distance;
    int from, to;
};

// OUTS outputs times TOKS tokens, at most sixteen sums, each in the same order whatever the tile.
// Meanwhile the weights `ahead` numbers further on are fetched, those of outputs [from, to) of the tile.
template <int OUTS, int TOKS, class Sink>
inline void tile(const bf16 *w, int64_t in, const bf16 *x, int64_t stride, Ahead ahead, Sink sink) {
    static_assert(OUTS * TOKS <= 16, "sixteen sums are reduced together");
    __m512 sum[16];
    for (int i = 0; i < 16; i++) sum[i] = _mm512_setzero_ps();
    for (int64_t k = 0; k < in; k += 32) {
        __m512bh state[TOKS];
        for (int t = 0; t < TOKS; t++) state[t] = load32(x + t * stride + k);
        for (int o = 0; o < OUTS; o++) {
            __m512bh weight = load32(w + o * in + k);
            if (o >= ahead.from && o < ahead.to) _mm_prefetch((const char *)(w + o * in + k + ahead.distance), _MM_HINT_T0);
            for (int t = 0; t < TOKS; t++) sum[o * TOKS + t] = _mm512_dpbf16_ps(sum[o * TOKS + t], weight, state[t]);
        }
    }
    if (OUTS * TOKS == 1) {
        sink(0, 0, _mm512_reduce_add_ps(sum[0]));
        return;
    }
    alignas(64) float all[16];
    _mm512_store_ps(all, sums16(sum));
    for (int o = 0; o < OUTS; o++)
        for (int t = 0; t < TOKS; t++) sink(o, t, all[place16(o * TOKS + t)]);
}

// sink(output, token, sum) for outputs [begin, end) and TOKS tokens.
template <int OUTS, int TOKS, class Sink>
inline void outputs(const bf16 *w, int64_t in, const bf16 *x, int64_t stride, int64_t begin, int64_t end, Ahead ahead,
                    Sink sink) {
    int64_t o = begin;
    for (; o + OUTS <= end; o += OUTS)
        tile<OUTS, TOKS>(w + o * in, in, x, stride, ahead, [&](int i, int t, float v) { sink(o + i, t, v); });
    for (; o < end; o++) tile<1, TOKS>(w + o * in, in, x, stride, ahead, [&](int, int t, float v) { sink(o, t, v); });
}

// sink(output, token, sum) for outputs [begin, end) of a product. Outputs go in pieces whose weights stay in the
// first cache while all tokens pass by.
template <class Sink>
inline void product(const bf16 *w, int64_t in, const bf16 *x, int64_t stride, int64_t tokens, int64_t begin,
                    int64_t end, Sink sink) {
    if (tokens == 1) {
        // Sixteen rows of weights that lie one after another: the hardware fetches ahead by itself.
        outputs<16, 1>(w, in, x, stride, begin, end, {0, 0, 0}, [&](int64_t o, int t, float v) { sink(o, int64_t(t), v); });
        return;
    }
    const int64_t piece = std::max<int64_t>(8, PIECE / (in * 2) / 8 * 8);
    // Three tokens behind others take a whole tile as well, together with one that has its sum already.
    const bool again = tokens > 4 && tokens % 4 == 3;
    const int tiles = int(std::max<int64_t>(1, tokens / 4 + again));
    for (int64_t o = begin; o < end; o += piece) {
        int64_t stop = std::min(end, o + piece), t = 0;
        auto shifted = [&](int64_t out, int s, float v) { sink(out, t + s, v); };
        for (int i = 0; t + 4 <= tokens; t += 4, i++)
            outputs<4, 4>(w, in, x + t * stride, stride, o, stop, {piece * in, 4 * i / tiles, 4 * (i + 1) / tiles}, shifted);
        if (again) {
            const int i = tiles - 1;
            t = tokens - 4;
            auto fresh = [&](int64_t out, int s, float v) { if (s) sink(out, t + s, v); };
            outputs<4, 4>(w, in, x + t * stride, stride, o, stop, {piece * in, 4 * i / tiles, 4}, fresh);
            continue;
        }
        const bf16 *rest = x + t * stride;
        const int last = tokens < 4 ? 0 : 99;  // the tiles of four have fetched everything
        if (tokens - t == 3) outputs<4, 3>(w, in, rest, stride, o, stop, {piece * in, last, 4}, shifted);
        if (tokens - t == 2) outputs<8, 2>(w, in, rest, stride, o, stop, {piece * in, last, 8}, shifted);
        if (tokens - t == 1) outputs<8, 1>(w, in, rest, stride, o, stop, {piece * in, last, 8}, shifted);
    }
}

struct Share {
    int64_t begin, end;
};

// This thread's part of `count` things in pieces of `piece`.
inline Share share(int64_t count, int64_t piece, int thread, int threads) {
    int64_t pieces = (count + piece - 1) / piece;
    return {std::min(count, pieces * thread / threads * piece), std::min(count, pieces * (thread + 1) / threads * piece)};
}

inline void norm(const bf16 *x, const bf16 *gain, bf16 *y, int64_t width, float eps) {
    __m512 squares = _mm512_setzero_ps();
    for (int64_t k = 0; k < width; k += 16) {
        __m512 v = widen16(x + k);
        squares = _mm512_fmadd_ps(v, v, squares);
    }
    __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / float(width) + eps));
    for (int64_t k = 0; k < width; k += 16)
        narrow16(y + k, _mm512_mul_ps(_mm512_mul_ps(widen16(x + k), scale), widen16(gain + k)));
}

// Rotate one head in place.
inline void rotate(bf16 *head, const float *cos, const float *sin, int64_t width) {
    int64_t half = width / 2;
    for (int64_t k = 0; k < half; k += 16) {
        __m512 a = widen16(head + k), b = widen16(head + half + k);
        __m512 first = _mm512_fmadd_ps(b, _mm512_loadu_ps(sin + k), _mm512_mul_ps(a, _mm512_loadu_ps(cos + k)));
        __m512 second =
            _mm512_fmadd_ps(a, _mm512_loadu_ps(sin + half + k), _mm512_mul_ps(b, _mm512_loadu_ps(cos + half + k)));
        narrow16(head + k, first);
        narrow16(head + half + k, second);
    }
}

// Attention of `count` queries of one key/value head over slots [begin[q], end[q]); scores is [count, padded].
// Scores of all queries against one key are made together, so that the key is read once.
void attend(const bf16 *const *query, bf16 *const *mixed, const int64_t *begin, const int64_t *end, int64_t count,
            const bf16 *keys, const bf16 *values, int64_t width, float scale, float *scores, int64_t padded) {
    for (int64_t q = 0; q < count; q++) {
        float *line = scores + q * padded;
        const bf16 *ask = query[q];
        for (int64_t s = begin[q]; s < end[q]; s++) {
            const bf16 *key = keys + s * width;
            __m512 sum = _mm512_setzero_ps();
            for (int64_t k = 0; k < width; k += 32) sum = _mm512_dpbf16_ps(sum, load32(key + k), load32(ask + k));
            line[s] = _mm512_reduce_add_ps(sum) * scale;
        }
    }
    for (int64_t q = 0; q < count; q++) {
        float *line = scores + q * padded;
        // Lanes are the slots' numbers modulo 16, so the sum's order does not depend on what is visible.
        int64_t first = begin[q] / 16 * 16, last = (end[q] + 15) / 16 * 16;
        for (int64_t s = first; s < begin[q]; s++) line[s] = -INFINITY;
        for (int64_t s = end[q]; s < last; s++) line[s] = -INFINITY;
        __m512 most = _mm512_set1_ps(-INFINITY), total = _mm512_setzero_ps();
        for (int64_t s = first; s < last; s += 16) most = _mm512_max_ps(most, _mm512_loadu_ps(line + s));
        __m512 top = _mm512_set1_ps(_mm512_reduce_max_ps(most));
        for (int64_t s = first; s < last; s += 16) {
            __m512 v = _mm512_loadu_ps(line + s);
            __mmask16 real = _mm512_cmp_ps_mask(v, _mm512_set1_ps(-INFINITY), _CMP_NEQ_OQ);
            __m512 e = _mm512_maskz_mov_ps(real, exp16(_mm512_sub_ps(v, top)));
            _mm512_storeu_ps(line + s, e);
            total = _mm512_add_ps(total, e);
        }
        __m512 share = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(total));
        for (int64_t s = first; s < last; s += 16)
            _mm512_storeu_ps(line + s, _mm512_mul_ps(_mm512_loadu_ps(line + s), share));
    }
    for (int64_t q = 0; q < count; q++) {
        const float *line = scores + q * padded;
        for (int64_t k = 0; k < width; k += 64) {
            __m512 sum[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
            int64_t lanes = std::min<int64_t>(4, (width - k) / 16);
            for (int64_t s = begin[q]; s < end[q]; s++) {
                __m512 weight = _mm512_set1_ps(line[s]);
                const bf16 *value = values + s * width + k;
                for (int64_t l = 0; l < lanes; l++) sum[l] = _mm512_fmadd_ps(weight, widen16(value + 16 * l), sum[l]);
            }
            for (int64_t l = 0; l < lanes; l++) narrow16(mixed[q] + k + 16 * l, sum[l]);
        }
    }
}

// Where a head of a row's key or value at some position lies.
inline int64_t place(const Buffers &b, int64_t row, int64_t groups, int64_t g, int64_t position, int64_t width) {
    return ((row * groups + g) * b.slots + position) * width;
}

std::vector<bf16> &scratch(int which, size_t size) {
    static thread_local std::vector<bf16> held[8];
    if (held[which].size() < size) held[which].resize(size);
    return held[which];
}

}  // namespace

// The finaliser of splitmix64 (Steele, Lea, Flood, OOPSLA 2014), as in decode/noise.py.
static inline uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

static inline uint64_t digits(uint64_t key, int64_t id) { return mix(key + uint64_t(id + 1) * 0x9E3779B97F4A7C15ull) >> 12; }

// The places of one row that could be its choice; -1 if there are more than `most`.
static int64_t contenders(const float *scores, int64_t size, uint64_t key, const int64_t *ids, int64_t most,
                          int64_t *places) {
    constexpr int64_t PART = 1024;
    constexpr double HALF_DIGIT = 0.5, DIGITS = 4503599627370496.0;  // 2^52
    constexpr float LOG_2 = 0.69314718f;
    static thread_local std::vector<std::pair<int64_t, double>> near;
    near.clear();
    const int64_t top = std::max_element(scores, scores + size) - scores;
    // Rounding of scores and sums to float32 may not lose a contender.
    auto slack = [](double score) { return 1e-4 + 1e-6 * std::fabs(score); };
    auto exact = [&](int64_t v) {
        const double u = (double(digits(key, ids ? ids[v] : v)) + HALF_DIGIT) / DIGITS;
        return scores[v] - std::log(-std::log(u));
    };
    double best = exact(top);
    float most_noise[PART];
    for (int64_t begin = 0; begin < size; begin += PART) {
        const int64_t count = std::min(PART, size - begin);
        for (int64_t i = 0; i < count; i++) {
            // 1 - u = (rest + 1/2) / 2^52 >= 2^(floor(log2(rest + 1)) - 53)
            const int64_t rest = (1ll << 52) - 1 - int64_t(digits(key, ids ? ids[begin + i] : begin + i));
            const double whole = double(rest + 1);
            int64_t bits;
            std::memcpy(&bits, &whole, sizeof bits);
            most_noise[i] = float(1023 + 53 - int32_t(bits >> 52)) * LOG_2 + scores[begin + i];
        }
        float least = float(best - slack(best));
        for (int64_t i = 0; i < count; i++) {
            if (!(most_noise[i] >= least)) continue;
            const double score = exact(begin + i);
            if (!(score >= best - slack(best))) continue;
            near.emplace_back(begin + i, score);
            best = std::max(best, score);
            least = float(best - slack(best));
        }
    }
    int64_t found = 0;
    for (const auto &[place, score] : near) {
        if (score < best - slack(best)) continue;
        if (found == most) return -1;
        places[found++] = place;
    }
    return found;
}

extern "C" {

// One pass of a decoder over rows x tokens, keys and values written into the buffers.
void slipstream_decode(const Model *m, const Pass *p) {
    const int64_t tokens = p->rows * p->tokens, width = m->width, dim = m->head_dim;
    const int64_t heads = m->heads, groups = m->groups, fused = (heads + 2 * groups) * dim, inner = m->inner;
    const int64_t per_group = heads / groups;
    bf16 *qkv = scratch(0, tokens * fused).data(), *mixed = scratch(1, tokens * heads * dim).data();
    bf16 *gated = scratch(2, tokens * inner).data();
    bf16 *x = p->x;
    const float scale = 1.0f / std::sqrt(float(dim));
#pragma omp parallel num_threads(p->threads)
    {
        const int thread = omp_get_thread_num(), threads = omp_get_num_threads();
        bf16 *normed = scratch(3, tokens * width).data();
        std::vector<float> scores;
        std::vector<const bf16 *> query;
        std::vector<bf16 *> result;
        std::vector<int64_t> begin, end;
        for (int64_t n = 0; n < m->layers; n++) {
            const Layer &layer = m->layer[n];
            const Buffers &buffers = p->buffers[n];
            for (int64_t t = 0; t < tokens; t++) norm(x + t * width, layer.input_norm, normed + t * width, width, m->eps);
            Share mine = share(fused, 16, thread, threads);
            product(layer.qkv, width, normed, width, tokens, mine.begin, mine.end, [&](int64_t o, int64_t t, float v) {
                if (layer.qkv_bias) v += widen(layer.qkv_bias[o]);
                qkv[t * fused + o] = narrow(v);
            });
#pragma omp barrier
            // Norm and rotate queries and keys; put keys and values where they belong.
            mine = share(tokens * (heads + groups), 1, thread, threads);
            for (int64_t i = mine.begin; i < mine.end; i++) {
                int64_t t = i / (heads + groups), h = i % (heads + groups);
                bf16 *head = qkv + t * fused + h * dim;
                const bf16 *gain = h < heads ? layer.q_norm : layer.k_norm;
                if (gain) norm(head, gain, head, dim, m->eps);
                rotate(head, m->cos + p->rotary[t] * dim, m->sin + p->rotary[t] * dim, dim);
                if (h < heads) continue;
                int64_t g = h - heads;
                int64_t at = place(buffers, p->row[t / p->tokens], groups, g, p->position[t], dim);
                std::memcpy(buffers.keys + at, head, dim * sizeof(bf16));
                std::memcpy(buffers.values + at, qkv + t * fused + (heads + groups + g) * dim, dim * sizeof(bf16));
            }
#pragma omp barrier
            // Queries of one row and key/value head, in as many parts as keep all threads busy.
            int64_t units = p->rows * groups, parts = units % threads == 0 ? 1 : threads;
            int64_t asked = p->tokens * per_group;
            parts = std::min(parts, asked);
            mine = share(units * parts, 1, thread, threads);
            for (int64_t i = mine.begin; i < mine.end; i++) {
                int64_t unit = i / parts, b = unit / groups, g = unit % groups;
                Share some = share(asked, 1, int(i % parts), int(parts));
                query.clear(), result.clear(), begin.clear(), end.clear();
                int64_t anchor = p->position[b * p->tokens], longest = 0;
                for (int64_t j = some.begin; j < some.end; j++) {
                    int64_t t = b * p->tokens + j / per_group, h = g * per_group + j % per_group;
                    int64_t at = p->position[t];
                    int64_t stop = layer.causal ? at + 1 : anchor + p->tokens;
                    int64_t start = layer.window ? std::max<int64_t>(0, at - layer.window + 1) : 0;
                    if (layer.window) stop = std::min(stop, at + layer.window);
                    query.push_back(qkv + t * fused + h * dim);
                    result.push_back(mixed + t * heads * dim + h * dim);
                    begin.push_back(start), end.push_back(stop);
                    longest = std::max(longest, stop);
                }
                int64_t padded = (longest + 15) / 16 * 16;
                if ((int64_t)scores.size() < padded * (some.end - some.begin)) scores.resize(padded * (some.end - some.begin));
                int64_t at = place(buffers, p->row[b], groups, g, 0, dim);
                attend(query.data(), result.data(), begin.data(), end.data(), some.end - some.begin,
                       buffers.keys + at, buffers.values + at, dim, scale, scores.data(), padded);
            }
#pragma omp barrier
            mine = share(width, 16, thread, threads);
            product(layer.out, heads * dim, mixed, heads * dim, tokens, mine.begin, mine.end,
                    [&](int64_t o, int64_t t, float v) {
                        bf16 *at = x + t * width + o;
                        *at = narrow(widen(*at) + widen(narrow(v)));
                    });
#pragma omp barrier
            for (int64_t t = 0; t < tokens; t++) norm(x + t * width, layer.mlp_norm, normed + t * width, width, m->eps);
            mine = share(inner, 16, thread, threads);
            // Gates first, kept in `gated`; then the other half meets them.
            product(layer.gate_up, width, normed, width, tokens, mine.begin, mine.end,
                    [&](int64_t o, int64_t t, float v) { gated[t * inner + o] = narrow(v); });
            for (int64_t t = 0; t < tokens; t++)
                for (int64_t o = mine.begin; o < mine.end; o += 16) {
                    __mmask16 in = __mmask16(mine.end - o >= 16 ? 0xffff : (1u << (mine.end - o)) - 1);
                    __m512 v = _mm512_maskz_mov_ps(in, widen16(gated + t * inner + o));
                    __m512 e = exp16(_mm512_sub_ps(_mm512_setzero_ps(), v));
                    narrow16(gated + t * inner + o, _mm512_div_ps(v, _mm512_add_ps(e, _mm512_set1_ps(1.0f))));
                }
            product(layer.gate_up + inner * width, width, normed, width, tokens, mine.begin, mine.end,
                    [&](int64_t o, int64_t t, float v) {
                        bf16 *at = gated + t * inner + o;
                        *at = narrow(widen(*at) * widen(narrow(v)));
                    });
#pragma omp barrier
            mine = share(width, 16, thread, threads);
            bf16 *tap = p->taps ? p->taps[n] : nullptr;
            product(layer.down, inner, gated, inner, tokens, mine.begin, mine.end, [&](int64_t o, int64_t t, float v) {
                bf16 *at = x + t * width + o;
                *at = narrow(widen(*at) + widen(narrow(v)));
                if (tap) tap[t / p->tokens * p->tap_row + t % p->tokens * p->tap_token + o] = *at;
            });
#pragma omp barrier
        }
        Share mine = share(tokens, 1, thread, threads);
        for (int64_t t = mine.begin; t < mine.end; t++) norm(x + t * width, m->norm, p->out + t * width, width, m->eps);
    }
}

// Keys and values of context tokens for every layer: fuse, norm, project, norm and rotate the keys, store.
void slipstream_context(const Model *m, const Context *c) {
    const int64_t tokens = c->rows * c->tokens, width = m->width, dim = m->head_dim, groups = m->groups;
    const int64_t both = 2 * groups * dim;
    bf16 *fused = scratch(4, tokens * width).data(), *kv = scratch(5, m->layers * tokens * both).data();
#pragma omp parallel num_threads(c->threads)
    {
        const int thread = omp_get_thread_num(), threads = omp_get_num_threads();
        Share mine = share(width, 16, thread, threads);
        product(c->fuse, c->features, c->x, c->features, tokens, mine.begin, mine.end,
                [&](int64_t o, int64_t t, float v) { fused[t * width + o] = narrow(v); });
#pragma omp barrier
        mine = share(tokens, 1, thread, threads);
        for (int64_t t = mine.begin; t < mine.end; t++) norm(fused + t * width, c->norm, fused + t * width, width, m->eps);
#pragma omp barrier
        for (int64_t n = 0; n < m->layers; n++) {
            mine = share(both, 16, thread, threads);
            product(m->layer[n].qkv + m->heads * dim * width, width, fused, width, tokens, mine.begin, mine.end,
                    [&](int64_t o, int64_t t, float v) { kv[(n * tokens + t) * both + o] = narrow(v); });
        }
#pragma omp barrier
        mine = share(m->layers * tokens, 1, thread, threads);
        for (int64_t i = mine.begin; i < mine.end; i++) {
            int64_t n = i / tokens, t = i % tokens, position = c->position[t];
            const Buffers &buffers = c->buffers[n];
            for (int64_t g = 0; g < groups; g++) {
                bf16 *key = kv + i * both + g * dim, *value = key + groups * dim;
                if (m->layer[n].k_norm) norm(key, m->layer[n].k_norm, key, dim, m->eps);
                rotate(key, m->cos + position * dim, m->sin + position * dim, dim);
                int64_t at = place(buffers, c->row[t / c->tokens], groups, g, position, dim);
                std::memcpy(buffers.keys + at, key, dim * sizeof(bf16));
                std::memcpy(buffers.values + at, value, dim * sizeof(bf16));
            }
        }
    }
}

// out[t, o] = sum_k x[t, k] w[o, k] in float32, for outputs [0, outs).
void slipstream_product(const bf16 *w, int64_t outs, int64_t in, const bf16 *x, int64_t tokens, int64_t threads,
                        float *out) {
#pragma omp parallel num_threads(threads)
    {
        Share mine = share(outs, 16, omp_get_thread_num(), omp_get_num_threads());
        product(w, in, x, in, tokens, mine.begin, mine.end, [&](int64_t o, int64_t t, float v) { out[t * outs + o] = v; });
    }
}

// Tokens whose noise could make them the choice: places in [0, size) of scores[t], in ascending order, `most` per
// row, the last one repeated. Noise is -log(-log(u)) of the uniform number u that decode/noise.py makes of a row's
// key and a token's id. The exact choice is left to the caller, so that it has the bits of a choice among all.
//
// -log(u) >= 1 - u, so noise is at most -log(1 - u), whose whole binary digits are those of an integer: no logarithm is
// taken of a token that cannot win.
//
// Returns how many rows had more than `most`, or none at all; their first place is -1.
int64_t slipstream_contenders(const float *scores, int64_t rows, int64_t size, const uint64_t *key, const int64_t *ids,
                              int64_t most, int64_t threads, int64_t *places) {
    int64_t failed = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : failed)
    for (int64_t t = 0; t < rows; t++) {
        const int64_t found = contenders(scores + t * size, size, key[t], ids, most, places + t * most);
        if (found < 1) places[t * most] = -1, failed++;
        for (int64_t n = std::max<int64_t>(found, 1); n < most; n++) places[t * most + n] = places[t * most + n - 1];
    }
    return failed;
}
}
