/* Attention of one new query per head, or of some, to the retained entries of one row.
 *
 * Codes become numbers in registers and serve all heads of the group there; where heads are many, codes
 * become numbers in memory first. Features are taken as pairs of vectors, one of each half of head_dim,
 * since codes of 4 bits share bytes so. The scale and zero point of a key in fewer bits are left out of the
 * sum over features and put to the score, those of a value to the entry's share. */
#include <float.h>
#include <math.h>

#include "native.h"
#include "vectors.h"
#include "vmath.h"

#if defined(__AVX512F__) || defined(__aarch64__)
#define HEADS 6 /* of those that share a row that are taken together, at most */
#define KEYS 4  /* whose sums are in registers together */
#define STEPS 2 /* pairs of vectors of a value, likewise */
#else
#define HEADS 4
#define KEYS 2
#define STEPS 1
#endif
#define STRETCH 256 /* entries that are scored before their values are read */
#define WIDE (STRETCH + LANES) /* floats from head to head: a power of two would share few cache sets */

/* Up to LANES entries of a page, their keys or their values. */
struct block {
    const uint8_t *codes;
    int64_t bits, coded, count; /* bits of a code as it lies here, and as it lay in the cache */
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

/* Sums of the products of KEYS keys from number `first` on and the queries: of each head a vector, in which
 * each key has LANES / KEYS parts. */
INLINE void tile(const struct block *block, int bits, int64_t first, int heads, const float *query,
                 lanes (*sums)[LANES / KEYS])
{
    lanes sum[HEADS][KEYS];
    for (int h = 0; h < heads; h++)
        for (int k = 0; k < KEYS; k++)
            sum[h][k] = (lanes){0};
    int64_t dim = block->dim, half = dim / 2, last = block->count - 1;
    const uint8_t *codes[KEYS];
    for (int k = 0; k < KEYS; k++) { /* beyond the last key it is taken again, for nothing */
        int64_t key = first + k;
        codes[k] = block->codes + (key < last ? key : last) * block->stride;
    }
    for (int64_t at = 0; at < half; at += LANES) {
        struct pair key[KEYS];
        for (int k = 0; k < KEYS; k++)
            key[k] = pair_at(codes[k], bits, at, half);
        for (int h = 0; h < heads; h++) {
            lanes low = load(query + h * dim + at), high = load(query + h * dim + at + half);
            for (int k = 0; k < KEYS; k++)
                sum[h][k] += key[k].low * low;
            for (int k = 0; k < KEYS; k++)
                sum[h][k] += key[k].high * high;
        }
    }
    for (int h = 0; h < heads; h++)
        sums[h][first / KEYS] = fold_all(sum[h], KEYS, 1);
}

/* Sum of the features of a query. */
static float features_of(const float *query, int64_t dim)
{
    lanes sum = {0};
    for (int64_t at = 0; at < dim; at += LANES)
        sum += load(query + at);
    return total(sum);
}

/* score[h][entry] = key query[h]; heads are WIDE floats from each other. features: sums of the queries',
 * read for keys of 4 bits. */
INLINE void score_heads(const struct block *block, int bits, int heads, const float *query,
                        const float *features, float *score)
{
    lanes sums[HEADS][LANES / KEYS];
    for (int64_t first = 0; first < LANES; first += KEYS)
        if (first < block->count)
            tile(block, bits, first, heads, query, sums);
        else
            for (int h = 0; h < heads; h++)
                sums[h][first / KEYS] = (lanes){0};
    for (int h = 0; h < heads; h++) {
        lanes found = fold_all(sums[h], LANES / KEYS, KEYS);
        if (block->coded < 16)
            found *= load(block->scale);
        if (block->coded == 4)
            found += load(block->zero) * features[h];
        store_some(found, block->count, score + h * WIDE);
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

INLINE void mix_heads(const struct block *block, int bits, int heads, const float *score, float *out)
{
    float share[HEADS][LANES], shift[HEADS];
    for (int h = 0; h < heads; h++) {
        lanes mine = load_some(score + h * WIDE, block->count, 0);
        shift[h] = block->coded == 4 ? total(mine * load(block->zero)) : 0;
        if (block->coded < 16)
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
                       const float *features, float *score)
{
    switch (heads) {
    case 1: score_heads(block, bits, 1, query, features, score); break;
    case 2: score_heads(block, bits, 2, query, features, score); break;
    case 3: score_heads(block, bits, 3, query, features, score); break;
    case 4: score_heads(block, bits, 4, query, features, score); break;
#if HEADS > 4
    case 5: score_heads(block, bits, 5, query, features, score); break;
    case 6: score_heads(block, bits, 6, query, features, score); break;
#endif
    }
}

INLINE void mix_form(const struct block *block, int bits, int heads, const float *score, float *out)
{
    switch (heads) {
    case 1: mix_heads(block, bits, 1, score, out); break;
    case 2: mix_heads(block, bits, 2, score, out); break;
    case 3: mix_heads(block, bits, 3, score, out); break;
    case 4: mix_heads(block, bits, 4, score, out); break;
#if HEADS > 4
    case 5: mix_heads(block, bits, 5, score, out); break;
    case 6: mix_heads(block, bits, 6, score, out); break;
#endif
    }
}

static void score_block(const struct block *block, int heads, const float *query, const float *features,
                        float *score)
{
    switch (block->bits) {
    case 32: score_form(block, 32, heads, query, features, score); break;
    case 16: score_form(block, 16, heads, query, features, score); break;
    case 8: score_form(block, 8, heads, query, features, score); break;
    case 4: score_form(block, 4, heads, query, features, score); break;
    }
}

static void mix_block(const struct block *block, int heads, const float *score, float *out)
{
    switch (block->bits) {
    case 32: mix_form(block, 32, heads, score, out); break;
    case 16: mix_form(block, 16, heads, score, out); break;
    case 8: mix_form(block, 8, heads, score, out); break;
    case 4: mix_form(block, 4, heads, score, out); break;
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
    float *wide; /* [LANES, dim] for codes as numbers; where head_dim is filled up, [LANES, head_dim] more */
    uint8_t *apart; /* where pages hold an entry each: room for LANES of them */
};

/* Up to LANES entries from number `at` on, `most` at most, that lie in one page; or in a page each. */
static void take(const struct column *column, int64_t at, int64_t most, struct block *block)
{
    int64_t size = column->cache->page_size, dim = column->cache->head_dim, bits = column->bits;
    int64_t left = size == 1 ? LANES : size - at % size, some = left < LANES ? left : LANES;
    *block = (struct block){.count = most < some ? most : some, .bits = 32, .coded = 32,
                            .dim = column->dim, .stride = 4 * column->dim};
    if (dim == column->dim) {
        block->bits = block->coded = bits, block->stride = dim * bits / 8;
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

INLINE void widen_form(const struct block *block, int bits, float *to)
{
    int64_t half = block->dim / 2;
    for (int64_t e = 0; e < block->count; e++, to += block->dim)
        for (int64_t at = 0; at < half; at += LANES) {
            struct pair made = pair_at(block->codes + e * block->stride, bits, at, half);
            memcpy(to + at, &made.low, sizeof made.low);
            memcpy(to + at + half, &made.high, sizeof made.high);
        }
}

/* Put a block's codes as numbers at `to`: for many heads they are not worth reading again. */
static void widen(struct block *block, float *to)
{
    switch (block->bits) {
    case 16: widen_form(block, 16, to); break;
    case 8: widen_form(block, 8, to); break;
    case 4: widen_form(block, 4, to); break;
    case 32: return;
    }
    block->codes = (const uint8_t *)to, block->bits = 32, block->stride = 4 * block->dim;
}

/* Ask for the codes of entries from .. from + count - 1, which are read a stretch later. */
static void ask_for(const struct column *column, int64_t from, int64_t count)
{
    int64_t size = column->cache->page_size, bytes = column->cache->head_dim * column->bits / 8;
    int64_t to = from + count < column->length ? from + count : column->length;
    for (; from < to; from++) {
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

/* Entries from .. to - 1 of a row, for so many heads. */
struct part {
    int64_t from, to, heads;
};

/* score[head][entry - from] = key query[head]. */
static void score_part(const struct column *keys, const struct column *values, struct part of,
                       const float *query, float *score)
{
    struct block block;
    float features[of.heads];
    for (int64_t h = 0; keys->bits == 4 && h < of.heads; h++)
        features[h] = features_of(query + h * keys->dim, keys->dim);
    for (int64_t at = of.from, parts = parts_of(of.heads); at < of.to; at += block.count) {
        take(keys, at, of.to - at, &block);
        ask_for(values, at, block.count);
        if (parts > 1)
            widen(&block, keys->wide);
        for (int64_t part = 0; part < parts; part++) {
            int64_t first = of.heads * part / parts, after = of.heads * (part + 1) / parts;
            score_block(&block, (int)(after - first), query + first * keys->dim, features + first,
                        score + first * WIDE + at - of.from);
        }
    }
}

/* out[head] += the values, share[head][entry - from] of each. */
static void mix_part(const struct column *keys, const struct column *values, struct part of,
                     const float *share, float *out)
{
    struct block block;
    for (int64_t at = of.from, parts = parts_of(of.heads); at < of.to; at += block.count) {
        take(values, at, of.to - at, &block);
        ask_for(keys, at + STRETCH, block.count);
        if (parts > 1)
            widen(&block, values->wide);
        for (int64_t part = 0; part < parts; part++) {
            int64_t first = of.heads * part / parts, after = of.heads * (part + 1) / parts;
            mix_block(&block, (int)(after - first), share + first * WIDE + at - of.from,
                      out + first * values->dim);
        }
    }
}

/* What a head has seen so far: the greatest score, and the sum of exp(scale * (score - greatest)). */
struct seen {
    float highest, sum;
};

/* exp(scale * (score - highest)), 0 of a score of minus infinity. A share just above 0 would be worse than
 * useless: a CPU takes a hundred cycles for what is made of it. */
INLINE lanes shares_of(lanes score, float highest, float scale)
{
    return either(score != (lanes){0} - INFINITY, exp_lanes((score - highest) * scale), (lanes){0});
}

/* Turn scores into exp(scale * (score - highest)), with those seen before. Returns how much less the sums
 * of before count now. */
static float soften(float *scores, int64_t count, float scale, struct seen *seen)
{
    float highest = greatest_of(scores, count, seen->highest);
    lanes sum = {0};
    for (int64_t i = 0; i < count; i += LANES) {
        int64_t some = count - i < LANES ? count - i : LANES;
        lanes share = shares_of(load_some(scores + i, some, -INFINITY), highest, scale);
        store_some(share, some, scores + i);
        sum += share;
    }
    float less = exp_float((seen->highest - highest) * scale);
    *seen = (struct seen){highest, seen->sum * less + total(sum)};
    return less;
}

/* Add what each of the first `count` entries is paid to its state 0: its shares of a token's heads. */
static void add_mass(const struct cache *cache, int64_t row, int64_t group, int64_t join, int64_t count,
                     float scale, const float *scores, const struct seen *seen)
{
    for (int64_t i = 0; i < count; i += LANES) {
        int64_t some = count - i < LANES ? count - i : LANES;
        lanes all = {0};
        for (int64_t g = 0; g < group; g++) {
            lanes score = load_some(scores + g * cache->length[row] + i, some, -INFINITY);
            lanes share = shares_of(score, seen[g].highest, scale) * (1.0f / seen[g].sum);
            all = join != JOIN_MAX ? all + share : either(share > all, share, all);
        }
        for (int64_t e = 0; e < some; e++)
            cache->state[slot_of(cache, row, i + e) * cache->state_size] +=
                join == JOIN_MEAN ? all[e] / (float)group : all[e];
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

/* Give a head no share of entries from .. to - 1 whose tokens come before `oldest`. */
static void hide(const struct cache *cache, int64_t row, int64_t from, int64_t to, int64_t oldest,
                 float *score)
{
    for (int64_t at = from; at < to; at++)
        if (cache->position[slot_of(cache, row, at)] < oldest)
            score[at - from] = -INFINITY;
}

/* Attend from the last `tokens` tokens of a row, whose entries are its last ones: each sees those before
 * its own, and that. query, out: [tokens, group, D], the heads that share this row; scores: where `mass` is
 * asked for, room for tokens * group * length. Stretches that all see are read from memory once; what a
 * token gets does not depend, not in one bit, on the others. Tokens before oldest[token] are not seen. The
 * softmax goes on from stretch to stretch, as in chunk.c. */
void attend_tokens(const struct cache *cache, int64_t row, const float *query, int64_t tokens, int64_t group,
                   int64_t mass, const int64_t *oldest, float *scores, float *out)
{
    int64_t length = cache->length[row], dim = cache->head_dim, heads = tokens * group;
    int64_t filled = (dim + 2 * LANES - 1) / (2 * LANES) * (2 * LANES), whole = filled == dim;
    float wide[LANES * (whole ? filled : filled + dim)], queries[whole ? 1 : heads * filled];
    float mixed[whole ? 1 : heads * filled], score[heads * WIDE];
    uint8_t apart[cache->page_size == 1 ? LANES * 4 * dim : 1];
    struct seen seen[heads];
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
    for (int64_t h = 0; h < heads; h++)
        seen[h] = (struct seen){-FLT_MAX, 0};
    /* stretches that all see, for all together (-1); then the rest of each */
    int64_t shared = tokens > 1 ? (length - tokens + 1) / STRETCH * STRETCH : 0;
    for (int64_t token = -1; token < tokens; token++) {
        int64_t first = token < 0 ? 0 : token * group;
        int64_t end = token < 0 ? shared : length - tokens + 1 + token;
        struct part of = {.from = token < 0 ? 0 : shared, .heads = token < 0 ? heads : group};
        for (; of.from < end; of.from = of.to) {
            of.to = of.from + STRETCH < end ? of.from + STRETCH : end;
            score_part(&keys, &values, of, query + first * filled, score);
            for (int64_t h = 0; h < of.heads; h++) {
                if (oldest[(first + h) / group] > 0)
                    hide(cache, row, of.from, of.to, oldest[(first + h) / group], score + h * WIDE);
                if (mass)
                    memcpy(scores + (first + h) * length + of.from, score + h * WIDE,
                           sizeof *score * (size_t)(of.to - of.from));
                float less = soften(score + h * WIDE, of.to - of.from, scale, seen + first + h);
                for (int64_t i = 0; less != 1 && i < filled; i++)
                    to[(first + h) * filled + i] *= less;
            }
            mix_part(&keys, &values, of, score, to + first * filled);
        }
        if (mass && token >= 0)
            add_mass(cache, row, group, mass - 1, end, scale, scores + first * length, seen + first);
    }
    for (int64_t h = 0; h < heads; h++)
        for (int64_t i = 0; i < filled; i++)
            to[h * filled + i] /= seen[h].sum;
    if (!whole)
        copy_width(mixed, heads, filled, dim, out);
}

/* As attend_tokens, from the last token. */
EXPORT void mmkv_attend(const struct cache *cache, int64_t row, const float *query, int64_t group,
                int64_t mass, int64_t oldest, float *scores, float *out)
{
    attend_tokens(cache, row, query, 1, group, mass, &oldest, scores, out);
}
