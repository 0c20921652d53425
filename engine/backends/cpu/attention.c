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
    uint8_t *apart; /* where pages hold an entry each: room for LANES of them */
};

/* Up to LANES entries from number `at` on, `most` at most, that lie in one page; or in a page each. */
static void take(const struct column *column, int64_t at, int64_t most, struct block *block)
{
    int64_t size = column->cache->page_size, dim = column->cache->head_dim, bits = column->bits;
    int64_t left = size == 1 ? LANES : size - at % size, some = left < LANES ? left : LANES;
    *block = (struct block){.count = most < some ? most : some, .bits = 32, .dim = column->dim,
                            .stride = 4 * column->dim};
    if (dim == column->dim) {
        block->bits = bits, block->stride = dim * bits / 8;
        block->codes = column->apart;
    } else
        block->codes = (const uint8_t *)column->wide;
    int64_t together = size == 1 ? 1 : block->count;
    for (int64_t e = 0; e < block->count; e += together) {
        int64_t slot = column->page[(at + e) / size] * size + (at + e) % size;
        if (dim != column->dim) { /* no vector divides it: entries are widened */
            const float *from = column->at(column->cache, slot, together, column->wide + LANES * column->dim);
            for (int64_t i = 0; i < together; i++)
                memcpy(column->wide + (e + i) * column->dim, from + i * dim, sizeof *from * (size_t)dim);
            continue;
        }
        const uint8_t *codes = column->codes + slot * block->stride;
        if (size == 1)
            memcpy(column->apart + e * block->stride, codes, (size_t)block->stride);
        else
            block->codes = codes;
        scales_at(column->scales, bits, slot, together, block->scale + e, block->zero + e);
    }
}

/* Ask for the codes of the pages that follow entry `at`, which are read while those before are computed. */
static void ask_for(const struct column *column, int64_t at)
{
    int64_t size = column->cache->page_size, bytes = column->cache->head_dim * column->bits / 8;
    int64_t from = size == 1 ? at + LANES : at % size ? column->length : at + size;
    int64_t to = from + (size == 1 ? LANES : size);
    for (to = to < column->length ? to : column->length; from < to; from++) {
        const uint8_t *codes = column->codes + (column->page[from / size] * size + from % size) * bytes;
        for (int64_t line = 0; line < bytes; line += 64)
            __builtin_prefetch(codes + line);
    }
}

/* Heads of a group in so many parts, each of HEADS at most. */
static int64_t parts_of(int64_t group)
{
    return (group + HEADS - 1) / HEADS;
}

/* Entries from .. to - 1 of a row for so many heads; `from` is the first of a page. What heads have of an
 * entry lies `apart` floats from head to head. */
struct part {
    int64_t from, to, heads, apart;
};

/* score[head][entry] = key query[head]. */
static void score_part(const struct column *keys, struct part of, const float *query, float *score)
{
    struct block block;
    for (int64_t at = of.from, parts = parts_of(of.heads); at < of.to; at += block.count) {
        ask_for(keys, at);
        take(keys, at, of.to - at, &block);
        for (int64_t part = 0; part < parts; part++) {
            int64_t first = of.heads * part / parts, after = of.heads * (part + 1) / parts;
            score_block(&block, (int)(after - first), query + first * keys->dim, of.apart,
                        score + first * of.apart + at);
        }
    }
}

/* out[head] += the values, share[head][entry] of each. */
static void mix_part(const struct column *values, struct part of, const float *share, float *out)
{
    struct block block;
    for (int64_t at = of.from, parts = parts_of(of.heads); at < of.to; at += block.count) {
        ask_for(values, at);
        take(values, at, of.to - at, &block);
        for (int64_t part = 0; part < parts; part++) {
            int64_t first = of.heads * part / parts, after = of.heads * (part + 1) / parts;
            mix_block(&block, (int)(after - first), share + first * of.apart + at, of.apart,
                      out + first * values->dim);
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

/* Add what each of the first `count` entries is paid to its state 0; scores are probabilities by now. */
static void add_mass(const struct cache *cache, int64_t row, int64_t group, int64_t join, int64_t count,
                     int64_t apart, const float *scores)
{
    for (int64_t i = 0; i < count; i++) {
        float all = scores[i];
        for (int64_t g = 1; g < group; g++) {
            float other = scores[g * apart + i];
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

/* Give those of the first `count` entries whose tokens come before `oldest` the score `value`, in all heads. */
static void hide(const struct cache *cache, int64_t row, int64_t group, int64_t oldest, float value,
                 int64_t count, int64_t apart, float *scores)
{
    for (int64_t i = 0; i < count; i++)
        for (int64_t g = 0; g < group && cache->position[slot_of(cache, row, i)] < oldest; g++)
            scores[g * apart + i] = value;
}

/* Attend from the last `tokens` tokens of a row, whose entries are its last ones: each sees those before
 * its own, and that. query, out: [tokens, group, D], the heads that share this row; scores: room for
 * tokens * group * length. A page is read from memory once for all of them; what a token gets does not
 * depend, not in one bit, on the others. Tokens before oldest[token] are not seen. */
void attend_tokens(const struct cache *cache, int64_t row, const float *query, int64_t tokens, int64_t group,
                   int64_t mass, const int64_t *oldest, float *scores, float *out)
{
    int64_t length = cache->length[row], dim = cache->head_dim, heads = tokens * group;
    int64_t filled = (dim + 2 * LANES - 1) / (2 * LANES) * (2 * LANES), whole = filled == dim;
    float wide[whole ? 1 : LANES * (filled + dim)], queries[whole ? 1 : heads * filled];
    float mixed[whole ? 1 : heads * filled];
    uint8_t apart[cache->page_size == 1 ? LANES * 4 * dim : 1];
    struct column keys = {.cache = cache, .page = cache->table + row * cache->width, .length = length,
                          .bits = cache->key_bits, .dim = filled, .codes = cache->keys,
                          .scales = cache->key_scale, .at = keys_at, .wide = wide, .apart = apart};
    struct column values = keys;
    values.bits = cache->value_bits, values.codes = cache->values;
    values.scales = cache->value_scale, values.at = values_at;
    if (!whole) {
        memset(wide, 0, sizeof wide);
        copy_width(query, heads, dim, filled, queries);
        query = queries;
    }
    float *to = whole ? out : mixed, scale = 1.0f / sqrtf((float)dim);
    memset(to, 0, sizeof *to * (size_t)(heads * filled));
    /* whole pages that all see, or blocks of pages of one entry; then the rest of each */
    int64_t size = cache->page_size == 1 ? LANES : cache->page_size;
    int64_t shared = tokens > 1 ? (length - tokens + 1) / size * size : 0;
    struct part all = {0, shared, heads, length};
    score_part(&keys, all, query, scores);
    for (int64_t t = 0; t < tokens; t++) {
        int64_t seen = length - tokens + 1 + t;
        float *own = scores + t * group * length;
        score_part(&keys, (struct part){shared, seen, group, length}, query + t * group * filled, own);
        if (oldest[t] > 0)
            hide(cache, row, group, oldest[t], -INFINITY, seen, length, own);
        for (int64_t g = 0; g < group; g++) {
            float share = 1.0f / soften(own + g * length, seen, scale);
            for (int64_t i = 0; i < seen; i++)
                own[g * length + i] *= share;
        }
        if (oldest[t] > 0) /* exp stops above 0 */
            hide(cache, row, group, oldest[t], 0, seen, length, own);
        if (mass)
            add_mass(cache, row, group, mass - 1, seen, length, own);
    }
    mix_part(&values, all, scores, to);
    for (int64_t t = 0; t < tokens; t++)
        mix_part(&values, (struct part){shared, length - tokens + 1 + t, group, length},
                 scores + t * group * length, to + t * group * filled);
    if (!whole)
        copy_width(mixed, heads, filled, dim, out);
}

/* As attend_tokens, from the last token. */
EXPORT void mmkv_attend(const struct cache *cache, int64_t row, const float *query, int64_t group,
                int64_t mass, int64_t oldest, float *scores, float *out)
{
    attend_tokens(cache, row, query, 1, group, mass, &oldest, scores, out);
}
