/* Keys and values in fewer bits, as engine/cache/forms.py defines them: the same codes, bit for bit. */
#include <math.h>
#include <string.h>

#include "native.h"

static float float_of(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* The nearest float16, even where two are as near. */
static uint16_t to_half(float x)
{
    uint32_t sign = bits_of(x) >> 16 & 0x8000, bits = bits_of(x) & 0x7fffffff;
    if (bits > 0x7f800000)
        return 0x7e00; /* not a number */
    if (bits >= 0x47800000)
        return (uint16_t)(sign | 0x7c00);
    if (bits < 0x38800000) /* below the normal numbers: steps are those of 0.5 in float32 */
        return (uint16_t)(sign | (bits_of(float_of(bits) + 0.5f) - 0x3f000000));
    return (uint16_t)(sign | (bits + 0xfff + (bits >> 13 & 1) - 0x38000000) >> 13);
}

/* Infinity comes back as no number. */
static float from_half(uint16_t half)
{
    float x = float_of((uint32_t)(half & 0x7fff) << 13) * 0x1p112f;
    x = (half & 0x7c00) == 0x7c00 ? NAN : x;
    return half & 0x8000 ? -x : x;
}

/* The smallest float16 that is not below x. */
static uint16_t half_at_least(float x)
{
    uint16_t near = to_half(x);
    if (near == 0xfc00 ? isfinite(x) : from_half(near) < x) /* -infinity is below all numbers */
        near = near & 0x8000 ? near - 1 : near + 1;
    return near;
}

/* The nearest whole number, even where two are as near; for |x| below 2^22. */
static inline float whole(float x)
{
    return (x + 12582912.0f) - 12582912.0f;
}

static inline float clamp(float x, float low, float high)
{
    return x < low ? low : x > high ? high : x;
}

static void encode_bf16(const float *x, int64_t dim, uint16_t *codes)
{
    for (int64_t i = 0; i < dim; i++) {
        uint32_t bits = bits_of(x[i]);
        codes[i] = isnan(x[i]) ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
}

static void encode_8(const float *restrict x, int64_t dim, float scale, int8_t *restrict codes)
{
#pragma omp simd
    for (int64_t i = 0; i < dim; i++)
        codes[i] = (int8_t)(int32_t)whole(clamp(x[i] / scale, -127, 127));
}

/* Feature i lies beside feature i + dim / 2. */
static void encode_4(const float *restrict x, int64_t dim, float zero, float scale,
                     uint8_t *restrict codes)
{
    const float *restrict second = x + dim / 2;
#pragma omp simd
    for (int64_t i = 0; i < dim / 2; i++) {
        int32_t low = (int32_t)whole(clamp((x[i] - zero) / scale, 0, 15));
        int32_t high = (int32_t)whole(clamp((second[i] - zero) / scale, 0, 15));
        codes[i] = (uint8_t)(low | high << 4);
    }
}

/* Round one vector into `slot` of a column and its scales. */
static void encode(void *column, uint16_t *scales, int64_t bits, int64_t dim, int64_t slot,
                   const float *x)
{
    uint8_t *codes = (uint8_t *)column + slot * dim * bits / 8;
    uint16_t *mine = scales + slot * scales_of(bits);
    float low = x[0], high = x[0], wrong = 0;
    if (bits == 32)
        memcpy(codes, x, sizeof(float) * (size_t)dim);
    if (bits == 16)
        encode_bf16(x, dim, (uint16_t *)codes);
    if (bits > 8)
        return;
#pragma omp simd reduction(min : low) reduction(max : high) reduction(+ : wrong)
    for (int64_t i = 0; i < dim; i++) {
        low = x[i] < low ? x[i] : low;
        high = x[i] > high ? x[i] : high;
        wrong += x[i] - x[i]; /* not 0 where something is not finite */
    }
    low += 0.0f; /* not -0 */
    if (bits == 4)
        mine[1] = half_at_least(-low) ^ 0x8000;
    float zero = bits == 4 ? from_half(mine[1]) : 0;
    mine[0] = half_at_least(bits == 4 ? (high - zero) / 15 : (-low > high ? -low : high) / 127);
    float scale = from_half(mine[0]);
    if (wrong != 0 || isnan(scale) || scale == 0) {
        mine[0] = scale == 0 && wrong == 0 ? mine[0] : 0x7e00;
        memset(codes, 0, (size_t)(dim * bits / 8));
    } else if (bits == 8)
        encode_8(x, dim, scale, (int8_t *)codes);
    else
        encode_4(x, dim, zero, scale, codes);
}

static void decode_8(const int8_t *restrict codes, int64_t dim, float scale, float *restrict x)
{
#pragma omp simd
    for (int64_t i = 0; i < dim; i++)
        x[i] = (float)codes[i] * scale;
}

static void decode_4(const uint8_t *restrict codes, int64_t dim, float zero, float scale,
                     float *restrict x)
{
    float *restrict second = x + dim / 2;
#pragma omp simd
    for (int64_t i = 0; i < dim / 2; i++) {
        x[i] = zero + (float)(codes[i] & 15) * scale;
        second[i] = zero + (float)(codes[i] >> 4) * scale;
    }
}

/* Vectors of `count` neighbouring slots as floats, in `wide` unless they lie there as such. */
static const float *decode(const void *column, const uint16_t *scales, int64_t bits, int64_t dim,
                           int64_t slot, int64_t count, float *wide)
{
    const uint8_t *codes = (const uint8_t *)column + slot * dim * bits / 8;
    if (bits == 32)
        return (const float *)codes;
    if (bits == 16) {
        const uint16_t *halves = (const uint16_t *)codes;
#pragma omp simd
        for (int64_t i = 0; i < count * dim; i++) {
            uint32_t whole_bits = (uint32_t)halves[i] << 16;
            memcpy(wide + i, &whole_bits, sizeof whole_bits);
        }
        return wide;
    }
    const uint16_t *mine = scales + slot * scales_of(bits);
    for (int64_t e = 0; e < count; e++, codes += dim * bits / 8) {
        if (bits == 8)
            decode_8((const int8_t *)codes, dim, from_half(mine[e]), wide + e * dim);
        else
            decode_4(codes, dim, from_half(mine[2 * e + 1]), from_half(mine[2 * e]),
                     wide + e * dim);
    }
    return wide;
}

const float *keys_at(const struct cache *cache, int64_t slot, int64_t count, float *wide)
{
    return decode(cache->keys, cache->key_scale, cache->key_bits, cache->head_dim, slot, count,
                  wide);
}

const float *values_at(const struct cache *cache, int64_t slot, int64_t count, float *wide)
{
    return decode(cache->values, cache->value_scale, cache->value_bits, cache->head_dim, slot,
                  count, wide);
}

/* Scales of `count` neighbouring vectors in 8 or 4 bits, and their zero points in 4. */
void scales_at(const uint16_t *scales, int64_t bits, int64_t slot, int64_t count, float *scale,
               float *zero)
{
    const uint16_t *mine = scales + slot * scales_of(bits);
    if (bits == 8)
#pragma omp simd
        for (int64_t e = 0; e < count; e++)
            scale[e] = from_half(mine[e]);
    if (bits == 4)
#pragma omp simd
        for (int64_t e = 0; e < count; e++) {
            scale[e] = from_half(mine[2 * e]);
            zero[e] = from_half(mine[2 * e + 1]);
        }
}

/* Multiply with the Hadamard matrix of a rotated form; sums in the order of hadamard() there. */
void turn_features(const struct cache *cache, float *x)
{
    int64_t dim = cache->head_dim, size = dim & -dim;
    if (!cache->rotated)
        return;
    for (int64_t step = 1; step < size; step *= 2)
        for (int64_t at = 0; at < dim; at += 2 * step)
            for (int64_t i = at; i < at + step; i++) {
                float first = x[i], second = x[i + step];
                x[i] = first + second;
                x[i + step] = first - second;
            }
    float scale = (float)(1.0 / sqrt((double)size));
    for (int64_t i = 0; i < dim; i++)
        x[i] *= scale;
}

/* Turn key and value [D] of the model in place, and round them into a slot. */
EXPORT void mmkv_store(const struct cache *cache, int64_t slot, float *key, float *value)
{
    turn_features(cache, key);
    turn_features(cache, value);
    encode(cache->keys, cache->key_scale, cache->key_bits, cache->head_dim, slot, key);
    encode(cache->values, cache->value_scale, cache->value_bits, cache->head_dim, slot, value);
}
