/* Attention of one new query per head to the retained entries of one row. */
#include <math.h>

#include "native.h"
#include "vmath.h"

/* out[D] += sum over entries of weight[e] * value[e, D]; four entries share one pass over out. */
static inline void mix(const float *value, const float *weight, int64_t count, int64_t dim,
                       float *restrict out)
{
    int64_t e = 0;
    for (; e + 4 <= count; e += 4, value += 4 * dim) {
        float p = weight[e], q = weight[e + 1], r = weight[e + 2], s = weight[e + 3];
#pragma omp simd
        for (int64_t i = 0; i < dim; i++)
            out[i] += (p * value[i] + q * value[dim + i]) +
                      (r * value[2 * dim + i] + s * value[3 * dim + i]);
    }
    for (; e < count; e++, value += dim) {
#pragma omp simd
        for (int64_t i = 0; i < dim; i++)
            out[i] += weight[e] * value[i];
    }
}

static void mix_rows(const float *value, const float *weight, int64_t count, int64_t dim, float *out)
{
    switch (dim) {
    case 32: mix(value, weight, count, 32, out); break;
    case 64: mix(value, weight, count, 64, out); break;
    case 128: mix(value, weight, count, 128, out); break;
    default: mix(value, weight, count, dim, out);
    }
}

/* Turn scores into exp(scale * (score - highest)) and return their sum. */
static float soften(float *scores, int64_t count, float scale)
{
    float highest = -INFINITY, sum = 0;
#pragma omp simd reduction(max : highest)
    for (int64_t i = 0; i < count; i++)
        highest = scores[i] > highest ? scores[i] : highest;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; i++) {
        scores[i] = exp_float((scores[i] - highest) * scale);
        sum += scores[i];
    }
    return sum;
}

/* Add what each entry is paid to its state 0; scores [group, length] are probabilities by now. */
static void add_mass(const struct cache *cache, int64_t row, int64_t group, int64_t join,
                     const float *scores)
{
    int64_t length = cache->length[row];
    for (int64_t i = 0; i < length; i++) {
        float all = scores[i];
        for (int64_t g = 1; g < group; g++) {
            float other = scores[g * length + i];
            all = join != JOIN_MAX ? all + other : other > all ? other : all;
        }
        cache->state[slot_of(cache, row, i) * cache->state_size] +=
            join == JOIN_MEAN ? all / (float)group : all;
    }
}

/* query, out: [group, D], the heads that share this row; scores: room for group * length. A page
 * is read from memory once for the whole group. The row holds at least the entry of this step. */
void attend_row(const struct cache *cache, int64_t row, const float *query, int64_t group,
                int64_t mass, float *scores, float *out)
{
    const int64_t *page = cache->table + row * cache->width;
    int64_t length = cache->length[row], size = cache->page_size, dim = cache->head_dim;
    float scale = 1.0f / sqrtf((float)dim), wide[decoded_room(cache)];
    for (int64_t at = 0; at < length; at += size) {
        int64_t live = length - at < size ? length - at : size, slot = page[at / size] * size;
        for (int64_t from = 0, count; from < live; from += count) {
            count = at_a_time(cache->key_bits, live - from);
            const float *key = keys_at(cache, slot + from, count, wide);
            for (int64_t g = 0; g < group; g++)
                dot_rows(key, count, dim, query + g * dim, scores + g * length + at + from);
        }
    }
    for (int64_t g = 0; g < group; g++) {
        float share = 1.0f / soften(scores + g * length, length, scale);
        for (int64_t i = 0; i < length; i++)
            scores[g * length + i] *= share;
        for (int64_t i = 0; i < dim; i++)
            out[g * dim + i] = 0;
    }
    if (mass)
        add_mass(cache, row, group, mass - 1, scores);
    for (int64_t at = 0; at < length; at += size) {
        int64_t live = length - at < size ? length - at : size, slot = page[at / size] * size;
        for (int64_t from = 0, count; from < live; from += count) {
            count = at_a_time(cache->value_bits, live - from);
            const float *value = values_at(cache, slot + from, count, wide);
            for (int64_t g = 0; g < group; g++)
                mix_rows(value, scores + g * length + at + from, count, dim, out + g * dim);
        }
    }
}
