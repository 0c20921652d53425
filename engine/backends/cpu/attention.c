/* Attention of one new query per head to the retained entries of one row.
 *
 * Codes become numbers in registers and serve all heads of the group there. Features are taken as
 * pairs of vectors, one of each half of head_dim, since codes of 4 bits share bytes so. The scale and zero
 * point of a key in fewer bits are left out of the sum over features and put to the score, those of a
 * value to the entry's share. */
#include <math.h>

#include "native.h"
#include "vectors.h"
#include "vmath.h"

#define HEADS 4 /* of a group that are taken together, at most */
#if defined(__AVX512F__) || defined(__aarch64__)
#define KEYS 4  /* whose sums are in registers together */
#define STEPS 2 /* pairs of vectors of a value, likewise */
#else
#define KEYS 2
#define STEPS 1
#endif

/* Up to LANES entries of a page, their keys or their values. */
struct block {
    const uint8_t *codes;
    int64_t bits, count;
    int64_t dim, stride;             /* dim: whole pairs of vectors; stride: bytes from entry to entry */
    float scale[LANES], zero[LANES]; /* zero: of 4 bits; beyond `count`: 0 */
};

struct pair {
    lanes low, high;
};

/* Features at .. of both halves of one key or value, but for scale and zero point. */
INLINE struct pair pair_at(const uint8_t *codes, int bits, int64_t at, int64_t half)
{
    if (bits == 32) {
        const float *from = (const float *)codes + at;
        return (struct pair){load(from), load(from + half)};
    }
    if (bits == 16) {
        const uint16_t *from = (const uint16_t *)codes + at;
        return (struct pair){bf16_at(from), bf16_at(from + half)};
    }
    if (bits == 8) {
        const int8_t *from = (const int8_t *)codes + at;
        return (struct pair){__builtin_convertvector(signed_bytes_at(from), lanes),
                             __builtin_convertvector(signed_bytes_at(from + half), lanes)};
    }
    lanes_int both = bytes_at(codes + at);
    return (struct pair){__builtin_convertvector(both & 15, lanes),
                         __builtin_convertvector(both >> 4, lanes)};
}

/* Vectors of sums of `keys` keys times `heads` queries; that of key k and head h to sums[h][k]. */
INLINE void tile(const struct block *block, int bits, int64_t first, int keys, int heads,
                 const float *query, lanes (*sums)[LANES])
{
    lanes sum[KEYS][HEADS] = {0};
    int64_t dim = block->dim, half = dim / 2;
    const uint8_t *codes = block->codes + first * block->stride;
    for (int64_t at = 0; at < half; at += LANES)
        for (int k = 0; k < keys; k++) {
            struct pair key = pair_at(codes + k * block->stride, bits, at, half);
            for (int h = 0; h < heads; h++) {
                sum[k][h] += key.low * load(query + h * dim + at);
                sum[k][h] += key.high * load(query + h * dim + at + half);
            }
        }
    for (int k = 0; k < keys; k++)
        for (int h = 0; h < heads; h++)
            sums[h][first + k] = sum[k][h];
}

/* Sum of the features of a query. */
static float features_of(const float *query, int64_t dim)
{
    lanes sum = {0};
    for (int64_t at = 0; at < dim; at += LANES)
        sum += load(query + at);
    return total(sum);
}

/* score[h][entry] = key query[h]; heads are `apart` floats from each other. */
INLINE void score_heads(const struct block *block, int bits, int heads, const float *query,
                        int64_t apart, float *score)
{
    lanes sums[HEADS][LANES];
    int64_t key = 0, count = block->count;
    for (; key + KEYS <= count; key += KEYS)
        tile(block, bits, key, KEYS, heads, query, sums);
    for (; key < count; key++)
        tile(block, bits, key, 1, heads, query, sums);
    for (int h = 0; h < heads; h++) {
        for (int64_t none = count; none < LANES; none++)
            sums[h][none] = (lanes){0};
        lanes found = totals(sums[h]);
        if (bits < 16)
            found *= load(block->scale);
        if (bits == 4)
            found += load(block->zero) * features_of(query + h * block->dim, block->dim);
        memcpy(score + h * apart, &found, sizeof(float) * (size_t)count);
    }
}

/* out[h] += share[h][entry] value for features at .. of both halves, `steps` pairs of vectors. */
INLINE void mix_features(const struct block *block, int bits, int steps, int heads,
                         const float (*share)[LANES], const float *shift, int64_t at, float *out)
{
    int64_t dim = block->dim, half = dim / 2;
    lanes low[STEPS][HEADS], high[STEPS][HEADS];
    for (int s = 0; s < steps; s++)
        for (int h = 0; h < heads; h++) {
            low[s][h] = load(out + h * dim + at + s * LANES) + shift[h];
            high[s][h] = load(out + h * dim + at + s * LANES + half) + shift[h];
        }
    for (int64_t e = 0; e < block->count; e++)
        for (int s = 0; s < steps; s++) {
            struct pair value = pair_at(block->codes + e * block->stride, bits, at + s * LANES, half);
            for (int h = 0; h < heads; h++) {
                low[s][h] += value.low * share[h][e];
                high[s][h] += value.high * share[h][e];
            }
        }
    for (int s = 0; s < steps; s++)
        for (int h = 0; h < heads; h++) {
            memcpy(out + h * dim + at + s * LANES, &low[s][h], sizeof(lanes));
            memcpy(out + h * dim + at + s * LANES + half, &high[s][h], sizeof(lanes));
        }
}

INLINE void mix_heads(const struct block *block, int bits, int heads, const float *score,
                      int64_t apart, float *out)
{
    float share[HEADS][LANES] = {{0}}, shift[HEADS] = {0};
    for (int h = 0; h < heads; h++) {
        lanes mine = {0};
        memcpy(&mine, score + h * apart, sizeof(float) * (size_t)block->count);
        if (bits == 4)
            shift[h] = total(mine * load(block->zero));
        if (bits < 16)
            mine *= load(block->scale);
        memcpy(share[h], &mine, sizeof mine);
    }
    int64_t at = 0, half = block->dim / 2;
    for (; at + STEPS * LANES <= half; at += STEPS * LANES)
        mix_features(block, bits, STEPS, heads, share, shift, at, out);
    for (; at < half; at += LANES)
        mix_features(block, bits, 1, heads, share, shift, at, out);
}

INLINE void score_form(const struct block *block, int bits, int heads, const float *query,
                       int64_t apart, float *score)
{
    switch (heads) {
    case 1: score_heads(block, bits, 1, query, apart, score); break;
    case 2: score_heads(block, bits, 2, query, apart, score); break;
    case 3: score_heads(block, bits, 3, query, apart, score); break;
    case 4: score_heads(block, bits, 4, query, apart, score); break;
    }
}

INLINE void mix_form(const struct block *block, int bits, int heads, const float *score,
                     int64_t apart, float *out)
{
    switch (heads) {
    case 1: mix_heads(block, bits, 1, score, apart, out); break;
    case 2: mix_heads(block, bits, 2, score, apart, out); break;
    case 3: mix_heads(block, bits, 3, score, apart, out); break;
    case 4: mix_heads(block, bits, 4, score, apart, out); break;
    }
}

static void score_block(const struct block *block, int heads, const float *query, int64_t apart,
                        float *score)
{
    switch (block->bits) {
    case 32: score_form(block, 32, heads, query, apart, score); break;
    case 16: score_form(block, 16, heads, query, apart, score); break;
    case 8: score_form(block, 8, heads, query, apart, score); break;
    case 4: score_form(block, 4, heads, query, apart, score); break;
    }
}

static void mix_block(const struct block *block, int heads, const float *score, int64_t apart,
                      float *out)
{
    switch (block->bits) {
    case 32: mix_form(block, 32, heads, score, apart, out); break;
    case 16: mix_form(block, 16, heads, score, apart, out); break;
    case 8: mix_form(block, 8, heads, score, apart, out); break;
    case 4: mix_form(block, 4, heads, score, apart, out); break;
    }
}

/* A row of the cache, and what its keys or values are read from. */
struct column {
    const struct cache *cache;
    const int64_t *page;
    int64_t length, bits, dim; /* dim: head_dim, filled up to whole pairs of vectors */
    const uint8_t *codes;
    const uint16_t *scales;
    const float *(*at)(const struct cache *, int64_t, int64_t, float *); /* decodes */
    float *wide; /* where head_dim is filled up: [LANES, dim + head_dim] */
};

/* `count` entries from `slot` on. Where no vector divides head_dim they are widened first. */
static void take(const struct column *column, int64_t slot, int64_t count, struct block *block)
{
    int64_t dim = column->cache->head_dim, bits = column->bits;
    *block = (struct block){.count = count, .bits = 32, .dim = column->dim, .stride = 4 * column->dim};
    if (dim == column->dim) {
        block->bits = bits, block->stride = dim * bits / 8;
        block->codes = column->codes + slot * block->stride;
        scales_at(column->scales, bits, slot, count, block->scale, block->zero);
        return;
    }
    const float *from = column->at(column->cache, slot, count, column->wide + LANES * column->dim);
    for (int64_t e = 0; e < count; e++)
        memcpy(column->wide + e * column->dim, from + e * dim, sizeof *from * (size_t)dim);
    block->codes = (const uint8_t *)column->wide;
}

/* Ask for the codes of page `number`, which are read while the page before it is computed. */
static void ask_for(const struct column *column, int64_t number)
{
    int64_t size = column->cache->page_size, left = column->length - number * size;
    int64_t bytes = column->cache->head_dim * column->bits / 8;
    if (left <= 0)
        return;
    const uint8_t *from = column->codes + column->page[number] * size * bytes;
    for (int64_t at = 0; at < (left < size ? left : size) * bytes; at += 64)
        __builtin_prefetch(from + at);
}

/* Heads of a group in so many parts, each of HEADS at most. */
static int64_t parts_of(int64_t group)
{
    return (group + HEADS - 1) / HEADS;
}

/* score [group, length] = keys query[group, dim]. */
static void score_row(const struct column *keys, const float *query, int64_t group, float *score)
{
    int64_t size = keys->cache->page_size, parts = parts_of(group);
    for (int64_t number = 0, at = 0; at < keys->length; number++, at += size) {
        int64_t live = keys->length - at < size ? keys->length - at : size;
        ask_for(keys, number + 1);
        for (int64_t from = 0; from < live; from += LANES) {
            struct block block;
            take(keys, keys->page[number] * size + from, live - from < LANES ? live - from : LANES, &block);
            for (int64_t part = 0; part < parts; part++) {
                int64_t first = group * part / parts, after = group * (part + 1) / parts;
                score_block(&block, (int)(after - first), query + first * keys->dim, keys->length,
                            score + first * keys->length + at + from);
            }
        }
    }
}

/* out [group, dim] = shares [group, length] of the values. */
static void mix_row(const struct column *values, const float *share, int64_t group, float *out)
{
    int64_t size = values->cache->page_size, parts = parts_of(group);
    memset(out, 0, sizeof *out * (size_t)(group * values->dim));
    for (int64_t number = 0, at = 0; at < values->length; number++, at += size) {
        int64_t live = values->length - at < size ? values->length - at : size;
        ask_for(values, number + 1);
        for (int64_t from = 0; from < live; from += LANES) {
            struct block block;
            take(values, values->page[number] * size + from, live - from < LANES ? live - from : LANES,
                 &block);
            for (int64_t part = 0; part < parts; part++) {
                int64_t first = group * part / parts, after = group * (part + 1) / parts;
                mix_block(&block, (int)(after - first), share + first * values->length + at + from,
                          values->length, out + first * values->dim);
            }
        }
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

/* Copy [count, from_width] to [count, to_width], as far as both are wide; what is beyond becomes 0. */
static void copy_width(const float *from, int64_t count, int64_t from_width, int64_t to_width, float *to)
{
    int64_t both = from_width < to_width ? from_width : to_width;
    memset(to, 0, sizeof *to * (size_t)(count * to_width));
    for (int64_t i = 0; i < count; i++)
        memcpy(to + i * to_width, from + i * from_width, sizeof *to * (size_t)both);
}

/* Give entries of tokens before `oldest` the score `value`, in all heads. */
static void hide(const struct cache *cache, int64_t row, int64_t group, int64_t oldest, float value,
                 float *scores)
{
    int64_t length = cache->length[row];
    for (int64_t i = 0; i < length; i++)
        for (int64_t g = 0; g < group && cache->position[slot_of(cache, row, i)] < oldest; g++)
            scores[g * length + i] = value;
}

/* query, out: [group, D], the heads that share this row; scores: room for group * length. A page
 * is read from memory once for the whole group. The row holds at least the entry of this step. Tokens
 * before `oldest` are not seen. */
EXPORT void mmkv_attend(const struct cache *cache, int64_t row, const float *query, int64_t group,
                int64_t mass, int64_t oldest, float *scores, float *out)
{
    int64_t length = cache->length[row], dim = cache->head_dim;
    int64_t filled = (dim + 2 * LANES - 1) / (2 * LANES) * (2 * LANES), whole = filled == dim;
    float wide[whole ? 1 : LANES * (filled + dim)], queries[whole ? 1 : group * filled];
    float mixed[whole ? 1 : group * filled];
    struct column keys = {.cache = cache, .page = cache->table + row * cache->width, .length = length,
                          .bits = cache->key_bits, .dim = filled, .codes = cache->keys,
                          .scales = cache->key_scale, .at = keys_at, .wide = wide};
    struct column values = keys;
    values.bits = cache->value_bits, values.codes = cache->values;
    values.scales = cache->value_scale, values.at = values_at;
    if (!whole) {
        memset(wide, 0, sizeof wide);
        copy_width(query, group, dim, filled, queries);
    }
    score_row(&keys, whole ? query : queries, group, scores);
    if (oldest > 0)
        hide(cache, row, group, oldest, -INFINITY, scores);
    float scale = 1.0f / sqrtf((float)dim);
    for (int64_t g = 0; g < group; g++) {
        float share = 1.0f / soften(scores + g * length, length, scale);
        for (int64_t i = 0; i < length; i++)
            scores[g * length + i] *= share;
    }
    if (oldest > 0) /* exp stops above 0 */
        hide(cache, row, group, oldest, 0, scores);
    if (mass)
        add_mass(cache, row, group, mass - 1, scores);
    mix_row(&values, scores, group, whole ? out : mixed);
    if (!whole)
        copy_width(mixed, group, filled, dim, out);
}
