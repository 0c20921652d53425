/* Attention that the last queries of a sequence pay to its entries, for scorers that read it.
 *
 * All queries of a KV head are turned so that they lie side by side: a key's features are then
 * multiplied with all of them at once, and softmax runs over vectors of queries. No sum goes across
 * a vector. */
#include <math.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "native.h"
#include "vmath.h"

#define LANES 8 /* queries are padded to whole vectors of this many */

static int64_t padded(const struct window *what)
{
    return (what->group * what->size + LANES - 1) / LANES * LANES;
}

/* Floats of scratch for `threads` threads and rows of up to `longest` entries. */
EXPORT int64_t mmkv_window_scratch(const struct window *what, int64_t head_dim, int64_t longest,
                                   int64_t threads)
{
    return threads * padded(what) * (head_dim + longest + 3);
}

/* Queries [group * size, dim] as [dim, queries], scaled; what lies beyond the last is zero. */
static void turn(const float *query, int64_t count, int64_t dim, int64_t queries, float *turned)
{
    float scale = 1.0f / sqrtf((float)dim);
    for (int64_t i = 0; i < dim; i++)
        for (int64_t q = 0; q < queries; q++)
            turned[i * queries + q] = q < count ? query[q * dim + i] * scale : 0;
}

typedef float lanes __attribute__((vector_size(4 * LANES)));

/* Scores of KEYS keys and WIDE vectors of queries, all sums in registers. */
#define TILE(KEYS, WIDE)                                                                     \
    static inline void tile_##KEYS##_##WIDE(const float *key, int64_t dim, const float *turned,  \
                                            int64_t queries, float *score)                    \
    {                                                                                        \
        lanes sum[KEYS][WIDE] = {0};                                                         \
        for (int64_t i = 0; i < dim; i++, turned += queries)                                 \
            for (int w = 0; w < WIDE; w++) {                                                 \
                lanes x;                                                                     \
                memcpy(&x, turned + w * LANES, sizeof x);                                    \
                for (int k = 0; k < KEYS; k++)                                               \
                    sum[k][w] += key[k * dim + i] * x;                                       \
            }                                                                                \
        for (int k = 0; k < KEYS; k++)                                                       \
            memcpy(score + k * queries, sum[k], sizeof sum[k]);                              \
    }
TILE(4, 2)
TILE(4, 1)
TILE(1, 2)
TILE(1, 1)

/* score[count, queries] = key[count, dim] turned[dim, queries]. */
static void multiply(const float *key, int64_t count, int64_t dim, const float *turned,
                     int64_t queries, float *score)
{
    for (int64_t from = 0; from < queries;) {
        int wide = queries - from >= 2 * LANES;
        const float *part = turned + from;
        float *to = score + from;
        int64_t e = 0;
        for (; e + 4 <= count; e += 4)
            (wide ? tile_4_2 : tile_4_1)(key + e * dim, dim, part, queries, to + e * queries);
        for (; e < count; e++)
            (wide ? tile_1_2 : tile_1_1)(key + e * dim, dim, part, queries, to + e * queries);
        from += wide ? 2 * LANES : LANES;
    }
}

/* Token index of the query in slot `slot` of the ring, -1 where there is none. */
static int64_t position_of(const struct window *what, int64_t slot)
{
    int64_t last = what->seen - 1, back = (last - slot) % what->size;
    int64_t at = last - (back < 0 ? back + what->size : back);
    return at < 0 ? -1 : at;
}

/* Entries of a query's future count nothing. Only entries of the window itself can be that. */
static void mask_future(const struct window *what, int64_t position, float *score)
{
    if (position < what->seen - what->size)
        return;
    for (int64_t q = 0; q < what->group * what->size; q++)
        if (position > position_of(what, q % what->size))
            score[q] = -INFINITY;
}

/* From scores to probabilities, query by query; `weight` becomes 1 / sum, 0 for unknown queries. */
static void soften(const struct window *what, float *score, int64_t length, int64_t queries,
                   float *highest, float *weight)
{
    for (int64_t q = 0; q < queries; q++)
        highest[q] = -INFINITY, weight[q] = 0;
    for (int64_t e = 0; e < length; e++)
#pragma omp simd
        for (int64_t q = 0; q < queries; q++)
            highest[q] = score[e * queries + q] > highest[q] ? score[e * queries + q] : highest[q];
    for (int64_t q = 0; q < queries; q++)
        highest[q] = isinf(highest[q]) ? 0 : highest[q]; /* sees no entry: all shares are 0 */
    for (int64_t e = 0; e < length; e++)
#pragma omp simd
        for (int64_t q = 0; q < queries; q++) {
            float x = score[e * queries + q];
            float share = x == -INFINITY ? 0.0f : exp_float(x - highest[q]);
            score[e * queries + q] = share;
            weight[q] += share;
        }
    for (int64_t q = 0; q < queries; q++) {
        int known = q < what->group * what->size && position_of(what, q % what->size) >= 0;
        weight[q] = known && weight[q] > 0 ? 1.0f / weight[q] : 0;
    }
}

/* One number of the heads of a group: their values lie `size` apart. */
static float of_group(const struct window *what, const float *value)
{
    float all = value[0];
    for (int64_t g = 1; g < what->group; g++) {
        float other = value[g * what->size];
        all = what->join != JOIN_MAX ? all + other : other > all ? other : all;
    }
    return what->join == JOIN_MEAN ? all / (float)what->group : all;
}

/* Join the heads of the group, query by query, and then the queries, of which `known` are there. */
static float joined(const struct window *what, float *share, const float *weight, int64_t known)
{
    int64_t count = what->group * what->size;
    float sum = 0, best = 0;
    if (what->join != JOIN_MAX && !what->greatest) { /* all sums: no matter in which order */
#pragma omp simd reduction(+ : sum)
        for (int64_t q = 0; q < count; q++)
            sum += share[q] * weight[q];
        sum /= (float)(known > 0 ? known : 1);
        return what->join == JOIN_MEAN ? sum / (float)what->group : sum;
    }
#pragma omp simd
    for (int64_t q = 0; q < count; q++)
        share[q] *= weight[q];
    for (int64_t slot = 0; slot < what->size; slot++) {
        float one = of_group(what, share + slot);
        sum += one;
        best = one > best ? one : best;
    }
    return what->greatest ? best : sum / (float)(known > 0 ? known : 1);
}

static void attend(const struct cache *cache, const struct window *what, int64_t row, float *scratch,
                   float *out)
{
    int64_t dim = cache->head_dim, size = cache->page_size, length = cache->length[row];
    int64_t queries = padded(what), count = what->group * what->size;
    float *turned = scratch, *highest = turned + dim * queries, *weight = highest + queries;
    float *score = weight + queries;
    int64_t known = what->seen < what->size ? what->seen : what->size;
    struct window left = *what; /* what is left to be joined after the softmax */
    if (what->logits)
        left.group = 1;
    turn(what->queries + row * count * dim, count, dim, queries, turned);
    const int64_t *page = cache->table + row * cache->width;
    float wide[decoded_room(cache)];
    for (int64_t at = 0, live; at < length; at += live) {
        int64_t left_over = length - at, inside = size - at % size;
        int64_t slot = page[at / size] * size + at % size;
        live = at_a_time(cache->key_bits, left_over < inside ? left_over : inside);
        multiply(keys_at(cache, slot, live, wide), live, dim, turned, queries,
                 score + at * queries);
        for (int64_t i = 0; i < live; i++) {
            float *mine = score + (at + i) * queries;
            for (int64_t q = 0; what->logits && q < what->size; q++)
                mine[q] = of_group(what, mine + q);
            mask_future(&left, cache->position[slot + i], mine);
        }
    }
    soften(&left, score, length, queries, highest, weight);
    for (int64_t e = 0; e < length; e++)
        out[e] = joined(&left, score + e * queries, weight, known);
}

/* out [N]: of every entry of the sequence, row after row. */
EXPORT void mmkv_window(const struct cache *cache, const struct window *what, int64_t threads)
{
    int64_t longest = 0;
    for (int64_t row = 0; row < cache->rows; row++)
        longest = cache->length[row] > longest ? cache->length[row] : longest;
    int64_t each = mmkv_window_scratch(what, cache->head_dim, longest, 1);
#pragma omp parallel num_threads((int)threads) if (threads > 1)
    {
        int64_t thread = 0;
#ifdef _OPENMP
        thread = omp_get_thread_num();
#endif
#pragma omp for schedule(dynamic, 1)
        for (int64_t row = 0; row < cache->rows; row++) {
            int64_t start = 0;
            for (int64_t before = 0; before < row; before++)
                start += cache->length[before];
            attend(cache, what, row, what->scratch + thread * each, what->out + start);
        }
    }
}
