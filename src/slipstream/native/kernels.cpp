// Decoder passes over few tokens on a CPU: whole passes, one parallel region each.
//
// Every number that a token gets depends on its row's own tokens alone: sums run in an order that is fixed by the
// model's shape, not by how many tokens share the pass, nor by how many threads there are. So a block of eight
// tokens gives the same bits as eight single steps.
//
// Compiled once for every kind of numbers (`Number`): the header says how they are read, rounded, and multiplied.
// Weights are row-major [out, in], read in place; sums are float32. Widths must be multiples of 32.

#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

// Weights to fetch while others are multiplied: so many numbers further on, of outputs [from, to) of a tile.
struct Ahead {
    int64_t distance;
    int from, to;
};

#ifdef __AVX512BF16__
#include "bf16_avx512.h"
#else
#include "float32_avx2.h"
#endif

extern "C" {

// One layer's weights. Optional pointers are null.
struct Layer {
    const Number *input_norm, *qkv, *qkv_bias, *q_norm, *k_norm, *out, *mlp_norm, *gate_up, *down;
    int64_t window;  // 0: none
    int64_t causal;  // 0: a block's tokens see one another both ways
};

struct Model {
    int64_t layers, width, heads, groups, head_dim, inner;
    float eps;
    const Layer *layer;
    const Number *norm;
    const float *cos, *sin;  // [positions, head_dim]; sin has the minus sign of the first half
};

// Keys and values of one layer, [rows, groups, slots, head_dim].
struct Buffers {
    Number *keys, *values;
    int64_t slots;
};

struct Pass {
    int64_t rows, tokens, threads;
    const int64_t *position;  // [rows, tokens], slots that are written
    const int64_t *rotary;    // [rows, tokens], rows of the tables
    const int64_t *row;       // [rows], rows of the buffers
    const Buffers *buffers;   // per layer
    Number *const *taps;      // per layer a [rows, tokens, width] view or null; null for no taps at all
    int64_t tap_row, tap_token;  // numbers from one row's, one token's tap to the next one's
    Number *x;                // [rows, tokens, width], states in; overwritten
    Number *out;              // [rows, tokens, width], states after the final norm
};

// Features of context tokens on their way to the keys and values of a drafter.
struct Context {
    int64_t rows, tokens, features, threads;
    const Number *x;     // [rows, tokens, features]
    const Number *fuse;  // [width, features]
    const Number *norm;  // [width]
    const int64_t *position, *row;
    const Buffers *buffers;
};
}

namespace {

// exp with a relative error of about 2e-7: 2^n times a polynomial on [-ln2/2, ln2/2].
inline Vector exponential(Vector x) {
    x = larger(smaller(x, all(88.0f)), all(-87.0f));
    Vector n = nearest(multiply(x, all(1.44269504f)));
    Vector r = fused_minus(n, all(0.693359375f), x);
    r = fused_minus(n, all(-2.12194440e-4f), r);
    Vector p = all(1.9875691e-4f);
    p = fused(p, r, all(1.3981999e-3f));
    p = fused(p, r, all(8.3334519e-3f));
    p = fused(p, r, all(4.1665796e-2f));
    p = fused(p, r, all(1.6666665e-1f));
    p = fused(p, r, all(5.0000001e-1f));
    p = fused(p, multiply(r, r), add(r, all(1.0f)));
    return times_power(p, n);
}

// sink(output, token, sum) for outputs [begin, end) and TOKS tokens.
template <int OUTS, int TOKS, class Sink>
inline void outputs(const Number *w, int64_t in, const Number *x, int64_t stride, int64_t begin, int64_t end, Ahead ahead,
                    Sink sink) {
    int64_t o = begin;
    for (; o + OUTS <= end; o += OUTS)
        tile<OUTS, TOKS>(w + o * in, in, x, stride, ahead, [&](int i, int t, float v) { sink(o + i, t, v); });
    for (; o < end; o++) tile<1, TOKS>(w + o * in, in, x, stride, ahead, [&](int, int t, float v) { sink(o, t, v); });
}

// sink(output, token, sum) for outputs [begin, end) of a product. Outputs go in pieces whose weights stay in the
// first cache while all tokens pass by.
template <class Sink>
inline void product(const Number *w, int64_t in, const Number *x, int64_t stride, int64_t tokens, int64_t begin,
                    int64_t end, Sink sink) {
    if (tokens == 1) {
        // Rows of weights that lie one after another: the hardware fetches ahead by itself.
        outputs<ALONE, 1>(w, in, x, stride, begin, end, {0, 0, 0}, [&](int64_t o, int t, float v) { sink(o, int64_t(t), v); });
        return;
    }
    const int64_t piece = std::max(PIECE_OUTPUTS, PIECE / (in * int64_t(sizeof(Number))) / PIECE_OUTPUTS * PIECE_OUTPUTS);
    // Three tokens behind others take a whole tile as well, together with one that has its sum already.
    const bool again = tokens > 4 && tokens % 4 == 3;
    const int tiles = int(std::max<int64_t>(1, tokens / 4 + again));
    constexpr int FOUR = OUTPUTS_OF[4];
    for (int64_t o = begin; o < end; o += piece) {
        int64_t stop = std::min(end, o + piece), t = 0;
        auto shifted = [&](int64_t out, int s, float v) { sink(out, t + s, v); };
        for (int i = 0; t + 4 <= tokens; t += 4, i++)
            outputs<FOUR, 4>(w, in, x + t * stride, stride, o, stop, {piece * in, FOUR * i / tiles, FOUR * (i + 1) / tiles},
                             shifted);
        if (again) {
            const int i = tiles - 1;
            t = tokens - 4;
            auto fresh = [&](int64_t out, int s, float v) { if (s) sink(out, t + s, v); };
            outputs<FOUR, 4>(w, in, x + t * stride, stride, o, stop, {piece * in, FOUR * i / tiles, FOUR}, fresh);
            continue;
        }
        const Number *rest = x + t * stride;
        const int last = tokens < 4 ? 0 : 99;  // the tiles of four have fetched everything
        const auto part = [&](auto toks) {
            constexpr int TOKS = decltype(toks)::value, OUTS = OUTPUTS_OF[TOKS];
            outputs<OUTS, TOKS>(w, in, rest, stride, o, stop, {piece * in, last, OUTS}, shifted);
        };
        if (tokens - t == 3) part(std::integral_constant<int, 3>());
        if (tokens - t == 2) part(std::integral_constant<int, 2>());
        if (tokens - t == 1) part(std::integral_constant<int, 1>());
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

inline void norm(const Number *x, const Number *gain, Number *y, int64_t width, float eps) {
    Vector squares = all(0.0f);
    for (int64_t k = 0; k < width; k += LANES) {
        Vector v = load(x + k);
        squares = fused(v, v, squares);
    }
    Vector scale = all(1.0f / std::sqrt(sum_of(squares) / float(width) + eps));
    for (int64_t k = 0; k < width; k += LANES) store(y + k, multiply(multiply(load(x + k), scale), load(gain + k)));
}

// Rotate one head in place.
inline void rotate(Number *head, const float *cos, const float *sin, int64_t width) {
    int64_t half = width / 2;
    for (int64_t k = 0; k < half; k += LANES) {
        Vector a = load(head + k), b = load(head + half + k);
        Vector first = fused(b, load_floats(sin + k), multiply(a, load_floats(cos + k)));
        Vector second = fused(a, load_floats(sin + half + k), multiply(b, load_floats(cos + half + k)));
        store(head + k, first);
        store(head + half + k, second);
    }
}

// The attention of one key/value head of a row: its queries, what they see, and where what they find goes.
struct Asked {
    std::vector<Number> queries;  // [count, width]
    std::vector<Number *> mixed;
    std::vector<int64_t> begin, end;  // slots that a query sees
    std::vector<float> scores, sums;  // [count, padded], [count, width]

    void clear() { queries.clear(), mixed.clear(), begin.clear(), end.clear(); }

    void add(const Number *query, int64_t width, Number *to, int64_t first, int64_t last) {
        queries.insert(queries.end(), query, query + width);
        mixed.push_back(to), begin.push_back(first), end.push_back(last);
    }
};

// Turn scores of slots [begin, end) into shares of one.
inline void soften(float *line, int64_t begin, int64_t end) {
    // Lanes are the slots' numbers modulo their count, so the sum's order does not depend on what is visible.
    const int64_t first = begin / LANES * LANES, last = (end + LANES - 1) / LANES * LANES;
    for (int64_t s = first; s < begin; s++) line[s] = -INFINITY;
    for (int64_t s = end; s < last; s++) line[s] = -INFINITY;
    Vector most = all(-INFINITY), total = all(0.0f);
    for (int64_t s = first; s < last; s += LANES) most = larger(most, load_floats(line + s));
    const Vector top = all(most_of(most));
    for (int64_t s = first; s < last; s += LANES) {
        Vector v = load_floats(line + s);
        Vector e = where_seen(v, exponential(subtract(v, top)));
        store_floats(line + s, e);
        total = add(total, e);
    }
    const Vector share = all(1.0f / sum_of(total));
    for (int64_t s = first; s < last; s += LANES) store_floats(line + s, multiply(load_floats(line + s), share));
}

// Add the values of slots [begin, end) to the sums of COUNT queries, by their shares; each sum in the order of slots.
template <int COUNT>
inline void mix(const float *shares, int64_t padded, const Number *values, int64_t width, int64_t begin, int64_t end,
                float *sums) {
    if (begin >= end) return;
    const auto columns = [&](auto vectors, int64_t k) {
        Vector sum[COUNT][vectors];
        for (int q = 0; q < COUNT; q++)
            for (int l = 0; l < vectors; l++) sum[q][l] = load_floats(sums + q * width + k + LANES * l);
        for (int64_t s = begin; s < end; s++) {
            Vector share[COUNT];
            for (int q = 0; q < COUNT; q++) share[q] = all(shares[q * padded + s]);
            for (int l = 0; l < vectors; l++) {
                const Vector value = load(values + s * width + k + LANES * l);
                for (int q = 0; q < COUNT; q++) sum[q][l] = fused(share[q], value, sum[q][l]);
            }
        }
        for (int q = 0; q < COUNT; q++)
            for (int l = 0; l < vectors; l++) store_floats(sums + q * width + k + LANES * l, sum[q][l]);
    };
    int64_t k = 0;
    for (; k + 4 * LANES <= width; k += 4 * LANES) columns(std::integral_constant<int, 4>(), k);
    for (; k < width; k += LANES) columns(std::integral_constant<int, 1>(), k);
}

// Attention of all that is asked, over the keys and values of one row and head.
void attend(Asked &asked, const Number *keys, const Number *values, int64_t width, float scale) {
    const int64_t count = int64_t(asked.mixed.size());
    const int64_t *begin = asked.begin.data(), *end = asked.end.data();
    const int64_t first = *std::min_element(begin, begin + count), last = *std::max_element(end, end + count);
    const int64_t padded = (last + LANES - 1) / LANES * LANES;
    if (int64_t(asked.scores.size()) < count * padded) asked.scores.resize(count * padded);
    asked.sums.assign(count * width, 0.0f);
    float *scores = asked.scores.data(), *sums = asked.sums.data();
    // Keys are to queries as weights are to states. A score that its query does not see is written over.
    product(keys, width, asked.queries.data(), width, count, first, last,
            [&](int64_t s, int64_t q, float v) { scores[q * padded + s] = v * scale; });
    for (int64_t q = 0; q < count; q++) soften(scores + q * padded, begin[q], end[q]);
    const auto part = [&](auto queries, int64_t q, int64_t from, int64_t to) {
        mix<queries>(scores + q * padded, padded, values, width, from, to, sums + q * width);
    };
    constexpr std::integral_constant<int, 1> ONE;
    // Slots come in pieces whose values stay in the first cache while all queries pass by.
    const int64_t piece = std::max<int64_t>(1, PIECE / (width * int64_t(sizeof(Number))));
    for (int64_t slot = first; slot < last; slot += piece) {
        int64_t q = 0;
        const auto from = [&](int64_t i) { return std::max(begin[i], slot); };
        const auto to = [&](int64_t i) { return std::min(end[i], slot + piece); };
        const auto together = [&](auto some) {
            for (; q + some <= count; q += some) {
                // What all of them see is read once for all; what some see, for each.
                int64_t all_from = from(q), all_to = to(q);
                for (int64_t i = q + 1; i < q + some; i++) all_from = std::max(all_from, from(i)), all_to = std::min(all_to, to(i));
                for (int64_t i = q; i < q + some; i++) part(ONE, i, from(i), std::min(all_from, to(i)));
                part(some, q, all_from, all_to);
                for (int64_t i = q; i < q + some; i++) part(ONE, i, std::max(all_from, all_to), to(i));
            }
        };
        together(std::integral_constant<int, QUERIES>());
        together(std::integral_constant<int, 2>());
        together(ONE);
    }
    for (int64_t q = 0; q < count; q++)
        for (int64_t k = 0; k < width; k += LANES) store(asked.mixed[q] + k, load_floats(sums + q * width + k));
}

// Where a head of a row's key or value at some position lies.
inline int64_t place(const Buffers &b, int64_t row, int64_t groups, int64_t g, int64_t position, int64_t width) {
    return ((row * groups + g) * b.slots + position) * width;
}

std::vector<Number> &scratch(int which, size_t size) {
    static thread_local std::vector<Number> held[8];
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
    Number *qkv = scratch(0, tokens * fused).data(), *mixed = scratch(1, tokens * heads * dim).data();
    Number *gated = scratch(2, tokens * inner).data();
    Number *x = p->x;
    const float scale = 1.0f / std::sqrt(float(dim));
#pragma omp parallel num_threads(p->threads)
    {
        const int thread = omp_get_thread_num(), threads = omp_get_num_threads();
        Number *normed = scratch(3, tokens * width).data();
        Asked questions;
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
                Number *head = qkv + t * fused + h * dim;
                const Number *gain = h < heads ? layer.q_norm : layer.k_norm;
                if (gain) norm(head, gain, head, dim, m->eps);
                rotate(head, m->cos + p->rotary[t] * dim, m->sin + p->rotary[t] * dim, dim);
                if (h < heads) continue;
                int64_t g = h - heads;
                int64_t at = place(buffers, p->row[t / p->tokens], groups, g, p->position[t], dim);
                std::memcpy(buffers.keys + at, head, dim * sizeof(Number));
                std::memcpy(buffers.values + at, qkv + t * fused + (heads + groups + g) * dim, dim * sizeof(Number));
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
                questions.clear();
                int64_t anchor = p->position[b * p->tokens];
                for (int64_t j = some.begin; j < some.end; j++) {
                    int64_t t = b * p->tokens + j / per_group, h = g * per_group + j % per_group;
                    int64_t at = p->position[t];
                    int64_t stop = layer.causal ? at + 1 : anchor + p->tokens;
                    int64_t start = layer.window ? std::max<int64_t>(0, at - layer.window + 1) : 0;
                    if (layer.window) stop = std::min(stop, at + layer.window);
                    questions.add(qkv + t * fused + h * dim, dim, mixed + t * heads * dim + h * dim, start, stop);
                }
                int64_t at = place(buffers, p->row[b], groups, g, 0, dim);
                attend(questions, buffers.keys + at, buffers.values + at, dim, scale);
            }
#pragma omp barrier
            mine = share(width, 16, thread, threads);
            product(layer.out, heads * dim, mixed, heads * dim, tokens, mine.begin, mine.end,
                    [&](int64_t o, int64_t t, float v) {
                        Number *at = x + t * width + o;
                        *at = narrow(widen(*at) + widen(narrow(v)));
                    });
#pragma omp barrier
            for (int64_t t = 0; t < tokens; t++) norm(x + t * width, layer.mlp_norm, normed + t * width, width, m->eps);
            mine = share(inner, 16, thread, threads);
            // Gates first, kept in `gated`; then the other half meets them.
            product(layer.gate_up, width, normed, width, tokens, mine.begin, mine.end,
                    [&](int64_t o, int64_t t, float v) { gated[t * inner + o] = narrow(v); });
            for (int64_t t = 0; t < tokens; t++)
                for (int64_t o = mine.begin; o < mine.end; o += LANES) {
                    Vector v = load(gated + t * inner + o);
                    Vector e = exponential(subtract(all(0.0f), v));
                    store(gated + t * inner + o, divide(v, add(e, all(1.0f))));
                }
            product(layer.gate_up + inner * width, width, normed, width, tokens, mine.begin, mine.end,
                    [&](int64_t o, int64_t t, float v) {
                        Number *at = gated + t * inner + o;
                        *at = narrow(widen(*at) * widen(narrow(v)));
                    });
#pragma omp barrier
            mine = share(width, 16, thread, threads);
            Number *tap = p->taps ? p->taps[n] : nullptr;
            product(layer.down, inner, gated, inner, tokens, mine.begin, mine.end, [&](int64_t o, int64_t t, float v) {
                Number *at = x + t * width + o;
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
    Number *fused = scratch(4, tokens * width).data(), *kv = scratch(5, m->layers * tokens * both).data();
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
                Number *key = kv + i * both + g * dim, *value = key + groups * dim;
                if (m->layer[n].k_norm) norm(key, m->layer[n].k_norm, key, dim, m->eps);
                rotate(key, m->cos + position * dim, m->sin + position * dim, dim);
                int64_t at = place(buffers, c->row[t / c->tokens], groups, g, position, dim);
                std::memcpy(buffers.keys + at, key, dim * sizeof(Number));
                std::memcpy(buffers.values + at, value, dim * sizeof(Number));
            }
        }
    }
}

// out[t, o] = sum_k x[t, k] w[o, k] in float32, for outputs [0, outs).
void slipstream_product(const Number *w, int64_t outs, int64_t in, const Number *x, int64_t tokens, int64_t threads,
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
