/* Attention of many queries. Those of a prompt's chunk see the rows of one layer: what was retained before
 * it, and causally the chunk, whose entries are the last ones of each row. Those of a picture's patches see
 * all patches of the picture, or of their window.
 *
 * A stretch of entries is laid out once for all queries of a row, keys with a feature's numbers side by
 * side, so that both products are sums of vectors times one number. The softmax goes on from stretch to
 * stretch (Milakov and Gimelshein, arXiv 1805.02867). What a query gets does not depend, not
 * in one bit, on the queries beside it or on threads. */
#include <math.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#ifdef __AVX512BW__
#include <cpuid.h>
#endif

#include "native.h"
#include "vectors.h"
#include "vmath.h"

#define STRETCH 256         /* entries that are laid out together */
#define WIDE (STRETCH + 16) /* floats from feature to feature: a power of two would share few cache sets */
#define ROWS 6              /* queries that are taken together */
#define PER_THREAD 16384    /* products of a query with a key that are worth a thread */
#if defined(__AVX512F__) || defined(__aarch64__)
#define VECTORS 4 /* of entries or features, beside which their sums fit the registers */
#else
#define VECTORS 2
#endif

/* What one thread works in. */
struct workspace {
    float *keys;   /* [head_dim, WIDE] */
    float *values; /* [STRETCH, filled] */
    float *wide;   /* where entries are decoded; of patches, [queries, dim]: the queries */
    float *scores; /* [ROWS, STRETCH] */
    float *sums;   /* [queries, filled]: of values times shares */
    float *highest, *shares; /* [queries]: the greatest score so far, and the sum of shares */
};

struct call {
    const struct cache *cache;
    const float *query;
    float *out;
    int64_t row, stride, group, kv_heads, asked, filled; /* filled: head_dim, up to whole vectors */
};

static int64_t filled_up(int64_t count, int64_t to)
{
    return (count + to - 1) / to * to;
}

/* sums[r][v] += a[r][i] b[i][v] over `depth` rows of b, `stride` floats apart. */
INLINE void add_products(const float *const *a, const float *b, int64_t stride, int64_t depth,
                         int vectors, lanes (*sums)[VECTORS])
{
    for (int64_t i = 0; i < depth; i++, b += stride)
        for (int v = 0; v < vectors; v++) {
            lanes x = load(b + v * LANES);
            for (int r = 0; r < ROWS; r++)
                sums[r][v] += x * a[r][i];
        }
}

/* scores [ROWS, STRETCH] = queries a times the first `count` keys, and some beyond. */
static void score(const float *const *a, const float *keys, int64_t dim, int64_t count, float *scores)
{
    for (int64_t at = 0; at < count; at += VECTORS * LANES) {
        lanes sums[ROWS][VECTORS];
        UNROLLED for (int r = 0; r < ROWS; r++)
            UNROLLED for (int v = 0; v < VECTORS; v++)
                sums[r][v] = (lanes){0};
        add_products(a, keys + at, WIDE, dim, VECTORS, sums);
        UNROLLED for (int r = 0; r < ROWS; r++)
            UNROLLED for (int v = 0; v < VECTORS; v++)
                memcpy(scores + r * STRETCH + at + v * LANES, &sums[r][v], sizeof(lanes));
    }
}

INLINE void mix_features(const float *const *shares, const float *values, int64_t filled, int64_t count,
                         int vectors, float *const *to)
{
    lanes sums[ROWS][VECTORS];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < vectors; v++)
            sums[r][v] = load(to[r] + v * LANES);
    add_products(shares, values, filled, count, vectors, sums);
    for (int r = 0; r < ROWS; r++)
        memcpy(to[r], sums[r], sizeof(lanes) * (size_t)vectors);
}

/* to[r] [filled] += shares[r] [count] times the values. */
static void mix(const float *const *shares, const float *values, int64_t filled, int64_t count,
                float *const *to)
{
    float *at[ROWS];
    memcpy(at, to, sizeof at);
    for (int64_t left = filled / LANES; left > 0;) {
        int64_t vectors = left >= VECTORS ? VECTORS : left >= 2 ? 2 : 1;
        const float *from = values + filled - left * LANES;
        switch (vectors) {
        case VECTORS: mix_features(shares, from, filled, count, VECTORS, at); break;
#if VECTORS > 2
        case 2: mix_features(shares, from, filled, count, 2, at); break;
#endif
        case 1: mix_features(shares, from, filled, count, 1, at); break;
        }
        for (int r = 0; r < ROWS; r++)
            at[r] += vectors * LANES;
        left -= vectors;
    }
}

/* Turn `count` scores into exp(scale (score - highest)), with those seen before; what is beyond, up to
 * `end`, becomes 0. Returns how much less the sums of before count now. */
static float soften(float *scores, int64_t count, int64_t end, float scale, float *highest, float *shares)
{
    float most = greatest_of(scores, count, *highest);
    lanes sum = {0};
    for (int64_t i = 0; i < count; i += LANES) {
        int64_t some = count - i < LANES ? count - i : LANES;
        lanes share = exp_lanes((load_some(scores + i, some, -INFINITY) - most) * scale);
        store_some(share, some, scores + i);
        sum += share; /* of a last vector: hardly anything beside a sum of 1 or more */
    }
    if (count < end)
        memset(scores + count, 0, sizeof *scores * (size_t)(end - count));
    float less = *highest == -INFINITY ? 0 : exp_float((*highest - most) * scale);
    *highest = most, *shares = *shares * less + total(sum);
    return less;
}

/* Lay out entries from .. from + count - 1 of a row. */
static void lay_out(const struct call *call, int64_t row, int64_t from, int64_t count, struct workspace *work)
{
    const struct cache *cache = call->cache;
    int64_t dim = cache->head_dim, filled = call->filled;
    int64_t bits = cache->key_bits < cache->value_bits ? cache->key_bits : cache->value_bits;
    int64_t end = filled_up(count, VECTORS * LANES);
    for (int64_t at = 0; at < count;) {
        int64_t left = cache->page_size - (from + at) % cache->page_size;
        int64_t some = at_a_time(bits, left < count - at ? left : count - at);
        int64_t slot = slot_of(cache, row, from + at);
        const float *key = keys_at(cache, slot, some, work->wide);
        for (int64_t e = 0; e < some; e++)
            for (int64_t d = 0; d < dim; d++)
                work->keys[d * WIDE + at + e] = key[e * dim + d];
        const float *value = values_at(cache, slot, some, work->wide);
        for (int64_t e = 0; e < some; e++) {
            float *to = work->values + (at + e) * filled;
            memcpy(to, value + e * dim, sizeof *value * (size_t)dim);
            memset(to + dim, 0, sizeof *value * (size_t)(filled - dim));
        }
        at += some;
    }
    for (int64_t d = 0; d < dim; d++)
        memset(work->keys + d * WIDE + count, 0, sizeof *work->keys * (size_t)(end - count));
}

/* The number in bfloat16 that is nearest to x. */
INLINE float in_bf16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits = (bits + 0x7fffu + (bits >> 16 & 1)) & 0xffff0000u;
    float made;
    memcpy(&made, &bits, sizeof made);
    return x == x ? made : x;
}

/* Queries of some tokens and one KV head, token by token; the first one sees `seen` entries. */
struct queries {
    const float *at;
    int64_t stride, group, dim, count, seen;
    float scale;    /* on scores */
    int64_t rounds; /* whether shares are rounded to bfloat16 */
};

static const float *query_at(const struct queries *these, int64_t number)
{
    return these->at + number / these->group * these->stride + number % these->group * these->dim;
}

/* How many of the entries from `from` on a query sees, `most` at most. */
static int64_t seen_by(const struct queries *these, int64_t number, int64_t from, int64_t most)
{
    int64_t count = these->seen + number / these->group - from;
    return count < 0 ? 0 : count < most ? count : most;
}

/* ROWS queries from `number` on and the entries that are laid out, those from `from` on. */
static void attend_tile(const struct queries *these, int64_t number, int64_t from, int64_t filled,
                        const struct workspace *work)
{
    int64_t left = these->count - number, last = left < ROWS ? left - 1 : ROWS - 1;
    int64_t end = seen_by(these, number + last, from, STRETCH);
    if (!end)
        return;
    const float *asked[ROWS], *shares[ROWS];
    float *sums[ROWS], none[filled];
    memset(none, 0, sizeof none);
    for (int r = 0; r < ROWS; r++) /* beyond the last query it is taken again, for nothing */
        asked[r] = query_at(these, number + (r < last ? r : last));
    score(asked, work->keys, these->dim, end, work->scores);
    for (int r = 0; r < ROWS; r++) {
        float *scores = work->scores + r * STRETCH;
        shares[r] = scores;
        if (r > last) {
            sums[r] = none;
            memset(scores, 0, sizeof *scores * (size_t)end);
            continue;
        }
        int64_t mine = number + r;
        sums[r] = work->sums + mine * filled;
        float less = soften(scores, seen_by(these, mine, from, end), end, these->scale,
                            work->highest + mine, work->shares + mine);
        if (less != 1)
            for (int64_t d = 0; d < filled; d++)
                sums[r][d] *= less;
        for (int64_t i = 0; these->rounds && i < end; i++)
            scores[i] = in_bf16(scores[i]);
    }
    mix(shares, work->values, filled, end, sums);
}

/* Forget what was summed up before. */
static void start_sums(int64_t queries, int64_t filled, const struct workspace *work)
{
    memset(work->sums, 0, sizeof *work->sums * (size_t)(queries * filled));
    memset(work->shares, 0, sizeof *work->shares * (size_t)queries);
    for (int64_t q = 0; q < queries; q++)
        work->highest[q] = -INFINITY;
}

/* Queries of tokens `first` .. `after` - 1 and one KV head. */
static void attend(const struct call *call, int64_t head, int64_t first, int64_t after, struct workspace work)
{
    int64_t dim = call->cache->head_dim, group = call->group, row = call->row + head, filled = call->filled;
    struct queries these = {.at = call->query + first * call->stride + head * group * dim,
                            .stride = call->stride, .group = group, .dim = dim,
                            .count = (after - first) * group,
                            .seen = call->cache->length[row] - call->asked + first + 1,
                            .scale = 1.0f / sqrtf((float)dim)};
    start_sums(these.count, filled, &work);
    int64_t entries = these.seen + after - first - 1;
    for (int64_t from = 0; from < entries; from += STRETCH) {
        lay_out(call, row, from, entries - from < STRETCH ? entries - from : STRETCH, &work);
        for (int64_t q = 0; q < these.count; q += ROWS)
            attend_tile(&these, q, from, filled, &work);
    }
    for (int64_t q = 0; q < these.count; q++) {
        float *to = call->out + ((first + q / group) * call->kv_heads + head) * group * dim + q % group * dim;
        for (int64_t d = 0; d < dim; d++)
            to[d] = work.sums[q * filled + d] / work.shares[q];
    }
}

/* Cut a thread's workspace from `base`, for `queries` of one KV head; returns its size in floats. */
static int64_t carve(int64_t dim, int64_t wide, int64_t queries, float *base, struct workspace *work)
{
    int64_t filled = filled_up(dim, LANES), size = 0;
    int64_t sizes[] = {dim * WIDE, STRETCH * filled, wide, ROWS * STRETCH,
                       queries * filled, queries, queries};
    float **parts[] = {&work->keys, &work->values, &work->wide, &work->scores,
                       &work->sums, &work->highest, &work->shares};
    for (int i = 0; i < 7; i++) {
        if (base)
            *parts[i] = base + size;
        size += filled_up(sizes[i], 16); /* a cache line */
    }
    return size;
}

static int64_t common_divisor(int64_t a, int64_t b)
{
    return b ? common_divisor(b, a % b) : a;
}

/* Parts of the queries of each KV head, so that all threads have as much to do; each lays out the
 * entries for itself, which few queries are not worth. */
static int64_t parts_of(int64_t kv_heads, int64_t group, int64_t asked, int64_t threads)
{
    int64_t parts = threads / common_divisor(threads, kv_heads);
    return asked * group >= 4 * ROWS * parts ? parts : 1;
}

/* Say how many threads to take, of `most`; returns the floats that each of them works in. */
EXPORT int64_t mmkv_attend_chunk_plan(const struct cache *cache, int64_t row, int64_t kv_heads,
                                      int64_t group, int64_t asked, int64_t most, int64_t *threads)
{
    int64_t longest = 0;
    for (int64_t head = 0; head < kv_heads; head++)
        longest = cache->length[row + head] > longest ? cache->length[row + head] : longest;
    int64_t worth = 1 + kv_heads * group * asked * longest / PER_THREAD;
    *threads = most < worth ? most : worth;
    if (asked == 1)
        return 0;
    int64_t parts = parts_of(kv_heads, group, asked, *threads);
    struct workspace none;
    return carve(cache->head_dim, decoded_room(cache), (asked + parts - 1) / parts * group, NULL, &none);
}

/* out [asked, heads, D]: what the queries [asked, heads, D], `stride` floats from token to token, of the
 * last tokens get from rows row .. row + kv_heads - 1, which hold the chunk's entries already. scratch:
 * `size` floats for each of the threads, both as mmkv_attend_chunk_plan says. */
EXPORT void mmkv_attend_chunk(const struct cache *cache, int64_t row, int64_t kv_heads, int64_t group,
                              const float *query, int64_t stride, int64_t asked, int64_t threads,
                              int64_t size, float *scratch, float *out)
{
    struct call call = {.cache = cache, .query = query, .out = out, .row = row, .stride = stride,
                        .group = group, .kv_heads = kv_heads, .asked = asked,
                        .filled = filled_up(cache->head_dim, LANES)};
    int64_t parts = asked == 1 ? 1 : parts_of(kv_heads, group, asked, threads);
#pragma omp parallel for num_threads((int)threads) schedule(static, 1) if (threads > 1)
    for (int64_t item = 0; item < kv_heads * parts; item++) {
        int64_t head = item / parts, part = item % parts, thread = 0;
#ifdef _OPENMP
        thread = omp_get_thread_num();
#endif
        float *own = scratch + thread * size;
        if (asked == 1) { /* nothing is laid out for one query: it reads each entry once */
            int64_t first = head * group * cache->head_dim;
            mmkv_attend(cache, row + head, query + first, group, 0, 0, NULL, out + first);
            continue;
        }
        struct workspace work = {0};
        int64_t first = asked * part / parts, after = asked * (part + 1) / parts;
        carve(cache->head_dim, decoded_room(cache), (after - first) * group, own, &work);
        attend(&call, head, first, after, work);
    }
}

#define BLOCK (80 * ROWS) /* queries of patches that stay in the second cache with a stretch of keys */

static const float *patch_at(const struct patches *all, int which, int64_t batch, int64_t head, int64_t token)
{
    const float *from[] = {all->query, all->key, all->value};
    const int64_t *stride = all->stride[which];
    return from[which] + batch * stride[0] + head * stride[1] + token * stride[2];
}

/* to [count] = from, in bfloat16 if `rounds`. */
static void take(const float *from, int64_t count, int64_t rounds, float *to)
{
    for (int64_t i = 0; i < count; i++)
        to[i] = rounds ? in_bf16(from[i]) : from[i];
}

/* Lay out the keys and values of `count` patches from `first` on. */
static void lay_out_patches(const struct patches *all, int64_t batch, int64_t head, int64_t first,
                            int64_t count, const struct workspace *work)
{
    int64_t dim = all->dim, filled = filled_up(dim, LANES), end = filled_up(count, VECTORS * LANES);
    for (int64_t e = 0; e < count; e++) {
        float *row = work->values + e * filled;
        take(patch_at(all, 1, batch, head, first + e), dim, all->rounds, row);
        for (int64_t d = 0; d < dim; d++)
            work->keys[d * WIDE + e] = row[d];
        take(patch_at(all, 2, batch, head, first + e), dim, all->rounds, row);
        memset(row + dim, 0, sizeof *row * (size_t)(filled - dim));
    }
    for (int64_t d = 0; d < dim; d++)
        memset(work->keys + d * WIDE + count, 0, sizeof *work->keys * (size_t)(end - count));
}

#ifdef __AVX512BW__
#define DOTS
#define TARGET_DOTS __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))
#define PARTS 4 /* vectors of keys or features that are taken together */

/* What is in bfloat16 lies in pairs, each a word: two features of a query or key, two keys' shares or values
 * of a feature. A product of two words, and its sum with a float, is one instruction. */

static int runs_dots(void)
{
    unsigned a, b, c, d; /* asked of the CPU, as not all compilers have a name for it */
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && a >> 5 & 1;
}

/* Word pairs of `dim` numbers; what is missing to whole pairs, and up to 16 words, is zeros. */
INLINE TARGET_DOTS __m512i words_at(const float *from, int64_t dim)
{
    int64_t low = dim < 16 ? dim : 16, high = dim < 16 ? 0 : dim < 32 ? dim - 16 : 16;
    __m512 first = _mm512_maskz_loadu_ps((__mmask16)((1u << low) - 1), from);
    __m512 second = _mm512_maskz_loadu_ps((__mmask16)((1u << high) - 1), from + low);
    return (__m512i)_mm512_cvtne2ps_pbh(second, first);
}

static TARGET_DOTS void lay_out_queries(const struct patches *all, int64_t batch, int64_t head, int64_t first,
                                        int64_t count, uint32_t *to)
{
    int64_t pairs = (all->dim + 1) / 2;
    for (int64_t q = 0; q < count; q++, to += pairs) {
        const float *from = patch_at(all, 0, batch, head, first + q);
        for (int64_t at = 0; at < pairs; at += 16) {
            int64_t some = pairs - at < 16 ? pairs - at : 16;
            __m512i words = words_at(from + 2 * at, all->dim - 2 * at);
            _mm512_mask_storeu_epi32(to + at, (__mmask16)((1u << some) - 1), words);
        }
    }
}

/* Keys [pairs of features, WIDE] and values [pairs of keys, filled]. */
static TARGET_DOTS void lay_out_pairs(const struct patches *all, int64_t batch, int64_t head, int64_t first,
                                      int64_t count, uint32_t *keys, uint32_t *values)
{
    int64_t dim = all->dim, filled = filled_up(dim, 16), end = filled_up(count, PARTS * 16);
    for (int64_t e = 0; e < count; e++) {
        const float *key = patch_at(all, 1, batch, head, first + e);
        for (int64_t at = 0; at < dim; at += 32) {
            uint32_t words[16];
            _mm512_storeu_si512(words, words_at(key + at, dim - at));
            for (int64_t p = 0; p < 16 && at + 2 * p < dim; p++)
                keys[(at / 2 + p) * WIDE + e] = words[p];
        }
    }
    for (int64_t p = 0; 2 * p < dim; p++)
        memset(keys + p * WIDE + count, 0, sizeof *keys * (size_t)(end - count));
    for (int64_t e = 0; e < count; e += 2) {
        const float *one = patch_at(all, 2, batch, head, first + e);
        const float *other = e + 1 < count ? patch_at(all, 2, batch, head, first + e + 1) : 0;
        for (int64_t at = 0; at < dim; at += 16) {
            __mmask16 some = (__mmask16)((1u << (dim - at < 16 ? dim - at : 16)) - 1);
            __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(some, one + at)));
            __m512i high = _mm512_setzero_si512();
            if (other)
                high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(some, other + at)));
            _mm512_storeu_si512(values + e / 2 * filled + at, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
        }
    }
}

/* sums[r][v] += a[r][i] b[i][v] over `depth` rows of words b, `stride` of them apart. */
INLINE TARGET_DOTS void add_dots(const uint32_t *const *a, const uint32_t *b, int64_t stride, int64_t depth,
                                 int parts, __m512 (*sums)[PARTS])
{
    for (int64_t i = 0; i < depth; i++, b += stride)
        for (int v = 0; v < parts; v++) {
            __m512bh x = (__m512bh)_mm512_loadu_si512(b + 16 * v);
            for (int r = 0; r < ROWS; r++)
                sums[r][v] = _mm512_dpbf16_ps(sums[r][v], x, (__m512bh)_mm512_set1_epi32((int)a[r][i]));
        }
}

static TARGET_DOTS void score_dots(const uint32_t *const *a, const uint32_t *keys, int64_t pairs, int64_t count,
                                   float *scores)
{
    for (int64_t at = 0; at < count; at += PARTS * 16) {
        __m512 sums[ROWS][PARTS];
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < PARTS; v++)
                sums[r][v] = _mm512_setzero_ps();
        add_dots(a, keys + at, WIDE, pairs, PARTS, sums);
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < PARTS; v++)
                _mm512_storeu_ps(scores + r * STRETCH + at + 16 * v, sums[r][v]);
    }
}

/* As `soften`; shares take the place of scores in pairs of bfloat16, an odd one with 0. */
static TARGET_DOTS float soften_dots(float *scores, int64_t count, float scale, float *highest, float *shares)
{
    __m512 most = _mm512_set1_ps(*highest), sum = _mm512_setzero_ps();
    int64_t left = count % 16;
    __mmask16 some = (__mmask16)((1u << left) - 1);
    for (int64_t i = 0; i + 16 <= count; i += 16)
        most = _mm512_max_ps(most, _mm512_loadu_ps(scores + i));
    if (left)
        most = _mm512_mask_max_ps(most, some, most, _mm512_loadu_ps(scores + count - left));
    float top = _mm512_reduce_max_ps(most), binary = scale * 1.44269504f;
    __m512 by = _mm512_set1_ps(binary), from = _mm512_set1_ps(top * binary);
    for (int64_t i = 0; i < count; i += 16) {
        __m512 x = _mm512_fmsub_ps(_mm512_loadu_ps(scores + i), by, from);
        x = _mm512_max_ps(_mm512_set1_ps(-126.0f), x); /* of what is no number, the second one */
        __m512 n = _mm512_roundscale_ps(x, 8), r = _mm512_sub_ps(x, n);
        __m512 p = _mm512_set1_ps(0.00133335581f); /* (ln 2)^i / i! */
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.00961812911f));
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.0555041087f));
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.240226507f));
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.693147181f));
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
        p = _mm512_maskz_scalef_ps(i + 16 <= count ? 0xffff : some, p, n);
        sum = _mm512_add_ps(sum, p);
        __m256bh half = _mm512_cvtneps_pbh(p);
        memcpy((char *)scores + 2 * i, &half, sizeof half); /* behind what is read */
    }
    float less = *highest == -INFINITY ? 0 : exp_float((*highest - top) * scale);
    *highest = top, *shares = *shares * less + _mm512_reduce_add_ps(sum);
    return less;
}

INLINE TARGET_DOTS void mix_parts(const uint32_t *const *shares, const uint32_t *values, int64_t filled,
                                  int64_t pairs, int parts, float *const *to)
{
    __m512 sums[ROWS][PARTS];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < parts; v++)
            sums[r][v] = _mm512_loadu_ps(to[r] + 16 * v);
    add_dots(shares, values, filled, pairs, parts, sums);
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < parts; v++)
            _mm512_storeu_ps(to[r] + 16 * v, sums[r][v]);
}

static TARGET_DOTS void mix_dots(const uint32_t *const *shares, const uint32_t *values, int64_t filled,
                                 int64_t pairs, float *const *to)
{
    float *at[ROWS];
    memcpy(at, to, sizeof at);
    for (int64_t left = filled / 16; left > 0;) {
        int64_t parts = left == 5 ? 3 : left >= PARTS ? PARTS : left;
        const uint32_t *from = values + filled - left * 16;
        switch (parts) {
        case 1: mix_parts(shares, from, filled, pairs, 1, at); break;
        case 2: mix_parts(shares, from, filled, pairs, 2, at); break;
        case 3: mix_parts(shares, from, filled, pairs, 3, at); break;
        case 4: mix_parts(shares, from, filled, pairs, 4, at); break;
        }
        for (int r = 0; r < ROWS; r++)
            at[r] += parts * 16;
        left -= parts;
    }
}

/* As `attend_tile`, of queries that see all that is laid out. */
static void dot_tile(const struct queries *these, int64_t number, int64_t filled, const struct workspace *work)
{
    int64_t left = these->count - number, last = left < ROWS ? left - 1 : ROWS - 1;
    int64_t pairs = (these->dim + 1) / 2;
    const uint32_t *asked[ROWS], *shares[ROWS];
    float *sums[ROWS], none[filled];
    memset(none, 0, sizeof none);
    for (int r = 0; r < ROWS; r++)
        asked[r] = (const uint32_t *)these->at + (number + (r < last ? r : last)) * pairs;
    score_dots(asked, (const uint32_t *)work->keys, pairs, these->seen, work->scores);
    for (int r = 0; r < ROWS; r++) {
        float *scores = work->scores + r * STRETCH;
        shares[r] = (const uint32_t *)scores;
        sums[r] = none;
        if (r > last)
            continue;
        int64_t mine = number + r;
        sums[r] = work->sums + mine * filled;
        float less = soften_dots(scores, these->seen, these->scale, work->highest + mine, work->shares + mine);
        for (int64_t d = 0; less != 1 && d < filled; d++)
            sums[r][d] *= less;
    }
    mix_dots(shares, (const uint32_t *)work->values, filled, (these->seen + 1) / 2, sums);
}
#endif

/* Queries of patches `first` .. `after` - 1, which see the patches `from` .. `to` - 1. */
static void attend_patches(const struct patches *all, int64_t batch, int64_t head, int64_t first,
                           int64_t after, int64_t from, int64_t to, int dots, const struct workspace *work)
{
    int64_t dim = all->dim, filled = filled_up(dim, LANES), count = after - first;
    /* one group of queries, which see the same */
    struct queries these = {.at = work->wide, .group = count, .dim = dim, .count = count,
                            .scale = (float)all->scale, .rounds = all->rounds};
    for (int64_t q = 0; !dots && q < count; q++)
        take(patch_at(all, 0, batch, head, first + q), dim, all->rounds, work->wide + q * dim);
#ifdef DOTS
    if (dots)
        lay_out_queries(all, batch, head, first, count, (uint32_t *)work->wide);
#endif
    start_sums(count, filled, work);
    for (int64_t at = from; at < to; at += STRETCH) {
        these.seen = to - at < STRETCH ? to - at : STRETCH;
#ifdef DOTS
        if (dots) {
            lay_out_pairs(all, batch, head, at, these.seen, (uint32_t *)work->keys, (uint32_t *)work->values);
            for (int64_t q = 0; q < count; q += ROWS)
                dot_tile(&these, q, filled, work);
            continue;
        }
#endif
        lay_out_patches(all, batch, head, at, these.seen, work);
        for (int64_t q = 0; q < count; q += ROWS)
            attend_tile(&these, q, 0, filled, work);
    }
    for (int64_t q = 0; q < count; q++) {
        float *out = all->out + ((batch * all->tokens + first + q) * all->heads + head) * dim;
        for (int64_t d = 0; d < dim; d++)
            out[d] = work->sums[q * filled + d] / work->shares[q];
    }
}

static int64_t blocks_of(const struct patches *all, int64_t part)
{
    return (all->start[part + 1] - all->start[part] + BLOCK - 1) / BLOCK;
}

/* Floats that each thread of mmkv_attend_patches works in. */
EXPORT int64_t mmkv_attend_patches_scratch(const struct patches *all)
{
    struct workspace none;
    return carve(all->dim, BLOCK * all->dim, BLOCK, NULL, &none);
}

/* Attend from all patches to those of their part; scratch: as said above, for each of the threads. */
EXPORT void mmkv_attend_patches(const struct patches *all, int64_t threads, float *scratch)
{
    int64_t blocks = 0, size = mmkv_attend_patches_scratch(all);
    int dots = 0;
#ifdef DOTS
    dots = all->rounds && runs_dots();
#endif
    for (int64_t part = 0; part < all->parts; part++)
        blocks += blocks_of(all, part);
#pragma omp parallel for num_threads((int)threads) schedule(dynamic) if (threads > 1)
    for (int64_t item = 0; item < all->batch * all->heads * blocks; item++) {
        /* heads of a token lie side by side */
        int64_t head = item % all->heads, batch = item / all->heads / blocks;
        int64_t block = item / all->heads % blocks, part = 0, thread = 0;
#ifdef _OPENMP
        thread = omp_get_thread_num();
#endif
        for (; block >= blocks_of(all, part); part++)
            block -= blocks_of(all, part);
        struct workspace work = {0};
        carve(all->dim, BLOCK * all->dim, BLOCK, scratch + thread * size, &work);
        int64_t from = all->start[part], to = all->start[part + 1], own = blocks_of(all, part);
        int64_t first = from + (to - from) * block / own, after = from + (to - from) * (block + 1) / own;
        attend_patches(all, batch, head, first, after, from, to, dots, &work);
    }
}
