/* Vectors of the level's own width, for arithmetic in float32. */
#ifndef MMKV_VECTORS_H
#define MMKV_VECTORS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "vmath.h"
#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif

#define INLINE static inline __attribute__((always_inline))
/* Before a loop of a few rounds over numbers that stay in registers: gcc would keep them in memory. */
#ifdef __clang__
#define UNROLLED
#else
#define UNROLLED _Pragma("GCC unroll 16")
#endif

typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef uint32_t lanes_bits __attribute__((vector_size(4 * LANES)));
typedef int32_t lanes_int __attribute__((vector_size(4 * LANES)));
typedef int8_t lanes_int8 __attribute__((vector_size(LANES)));
typedef uint16_t lanes_uint16 __attribute__((vector_size(2 * LANES)));
typedef float quad __attribute__((vector_size(16)));

INLINE lanes load(const float *from)
{
    lanes made;
    memcpy(&made, from, sizeof made);
    return made;
}

/* The first `count` lanes; those after them are `beyond`. */
INLINE lanes load_some(const float *from, int64_t count, float beyond)
{
    if (count == LANES)
        return load(from);
#if LANES == 16
    return (lanes)_mm512_mask_loadu_ps(_mm512_set1_ps(beyond), (__mmask16)((1u << count) - 1), from);
#else
    lanes made = (lanes){0} + beyond;
    memcpy(&made, from, sizeof *from * (size_t)count);
    return made;
#endif
}

INLINE void store_some(lanes x, int64_t count, float *to)
{
    if (count == LANES)
        memcpy(to, &x, sizeof x);
    else
#if LANES == 16
        _mm512_mask_storeu_ps(to, (__mmask16)((1u << count) - 1), (__m512)x);
#else
        memcpy(to, &x, sizeof *to * (size_t)count);
#endif
}

/* LANES bytes as numbers. Compilers make single moves of a vector's conversion. */
INLINE lanes_int bytes_at(const uint8_t *from)
{
#if LANES == 16
    return (lanes_int)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from));
#elif LANES == 8
    return (lanes_int)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from));
#elif defined(__aarch64__)
    uint32_t word;
    memcpy(&word, from, sizeof word);
    return (lanes_int)vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(word))));
#elif defined(__SSE2__)
    int32_t word;
    memcpy(&word, from, sizeof word);
    __m128i none = _mm_setzero_si128(), pairs = _mm_unpacklo_epi8(_mm_cvtsi32_si128(word), none);
    return (lanes_int)_mm_unpacklo_epi16(pairs, none);
#else
    return (lanes_int){from[0], from[1], from[2], from[3]};
#endif
}

INLINE lanes_int signed_bytes_at(const int8_t *from)
{
#if LANES == 16
    return (lanes_int)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from));
#elif LANES == 8
    return (lanes_int)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from));
#elif defined(__aarch64__)
    uint32_t word;
    memcpy(&word, from, sizeof word);
    return (lanes_int)vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(word))));
#elif defined(__SSE2__)
    int32_t word;
    memcpy(&word, from, sizeof word);
    __m128i once = _mm_cvtsi32_si128(word), pairs = _mm_unpacklo_epi8(once, once);
    return (lanes_int)_mm_srai_epi32(_mm_unpacklo_epi16(pairs, pairs), 24);
#else
    return (lanes_int){from[0], from[1], from[2], from[3]};
#endif
}

/* LANES numbers in bfloat16. */
INLINE lanes bf16_at(const uint16_t *from)
{
#if LANES == 16
    return (lanes)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16);
#elif LANES == 8
    return (lanes)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from)), 16);
#else
    lanes_uint16 short_form;
    memcpy(&short_form, from, sizeof short_form);
    return (lanes)(__builtin_convertvector(short_form, lanes_bits) << 16);
#endif
}

/* The nearest whole numbers, even ones where two are as near. */
INLINE lanes_int nearest(lanes x)
{
#if LANES == 16
    return (lanes_int)_mm512_cvtps_epi32((__m512)x);
#elif LANES == 8
    return (lanes_int)_mm256_cvtps_epi32((__m256)x);
#elif defined(__aarch64__)
    return (lanes_int)vcvtnq_s32_f32((float32x4_t)x);
#elif defined(__SSE2__)
    return (lanes_int)_mm_cvtps_epi32((__m128)x);
#else
    lanes_int made;
    for (int i = 0; i < LANES; i++)
        made[i] = (int32_t)rintf(x[i]);
    return made;
#endif
}

/* Sum of the lanes, always in the same order. */
INLINE float total(lanes sums)
{
    quad part[LANES / 4];
    memcpy(part, &sums, sizeof sums);
    for (int n = LANES / 8; n > 0; n /= 2)
        for (int i = 0; i < n; i++)
            part[i] += part[i + n];
    return (part[0][0] + part[0][2]) + (part[0][1] + part[0][3]);
}

/* Lanes of a and b by number: those of b are counted on. */
#ifdef __clang__
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, (lanes_int){__VA_ARGS__})
#endif

/* Of each pair of neighbouring runs of n lanes the sum: that of a's in the first, that of b's in the
 * second of the two places. */
#if LANES == 16
INLINE lanes fold8(lanes a, lanes b)
{
    return PICK(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           PICK(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}

INLINE lanes fold4(lanes a, lanes b)
{
    return PICK(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
           PICK(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
}

INLINE lanes fold2(lanes a, lanes b)
{
    return PICK(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           PICK(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
}

INLINE lanes fold1(lanes a, lanes b)
{
    return PICK(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
           PICK(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
}
#elif LANES == 8
INLINE lanes fold4(lanes a, lanes b)
{
    return PICK(a, b, 0, 1, 2, 3, 8, 9, 10, 11) + PICK(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
}

INLINE lanes fold2(lanes a, lanes b)
{
    return PICK(a, b, 0, 1, 8, 9, 4, 5, 12, 13) + PICK(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
}

INLINE lanes fold1(lanes a, lanes b)
{
    return PICK(a, b, 0, 8, 2, 10, 4, 12, 6, 14) + PICK(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
}
#else
INLINE lanes fold2(lanes a, lanes b)
{
    return PICK(a, b, 0, 1, 4, 5) + PICK(a, b, 2, 3, 6, 7);
}

INLINE lanes fold1(lanes a, lanes b)
{
    return PICK(a, b, 0, 4, 2, 6) + PICK(a, b, 1, 5, 3, 7);
}
#endif

/* `count` vectors become one: two and two, of runs of n lanes first. They are used up. */
INLINE lanes fold_all(lanes *sums, int count, int n)
{
    for (; count > 1; count /= 2, n *= 2)
        for (int i = 0; i < count / 2; i++)
            switch (n) {
            case 1: sums[i] = fold1(sums[2 * i], sums[2 * i + 1]); break;
            case 2: sums[i] = fold2(sums[2 * i], sums[2 * i + 1]); break;
#if LANES >= 8
            case 4: sums[i] = fold4(sums[2 * i], sums[2 * i + 1]); break;
#endif
#if LANES == 16
            case 8: sums[i] = fold8(sums[2 * i], sums[2 * i + 1]); break;
#endif
            }
    return sums[0];
}

/* Lanes of a where the mask is set, those of b elsewhere. */
INLINE lanes either(lanes_int mask, lanes a, lanes b)
{
    return (lanes)((mask & (lanes_int)a) | (~mask & (lanes_int)b));
}

INLINE lanes larger(lanes a, lanes b)
{
    return either(a > b, a, b);
}

/* The greatest of `count` numbers and `most`. What is not a number is left out. */
INLINE float greatest_of(const float *x, int64_t count, float most)
{
    lanes one = (lanes){0} + most, other = one;
    float each[LANES];
    int64_t i = 0;
    for (; i + 2 * LANES <= count; i += 2 * LANES) {
        one = larger(load(x + i), one);
        other = larger(load(x + i + LANES), other);
    }
    for (; i < count; i += LANES)
        one = larger(load_some(x + i, count - i < LANES ? count - i : LANES, most), one);
    one = larger(one, other);
    memcpy(each, &one, sizeof each);
#pragma omp simd reduction(max : most)
    for (i = 0; i < LANES; i++)
        most = each[i] > most ? each[i] : most;
    return most;
}

/* exp(x) for x <= 64, of -87.3 where it is below; see exp_float. */
INLINE lanes exp_lanes(lanes x)
{
    x = either(x < -87.3f, (lanes){0} - 87.3f, x);
    lanes shifted = x * 1.44269504f + 12582912.0f, n = shifted - 12582912.0f;
    lanes r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    return EXP_NEAR_0(r) * (lanes)(((lanes_int)shifted + 127) << 23);
}

/* x times its logistic function. exp stops at 64, so that no quotient is subnormal: a CPU takes a hundred
 * cycles for one. */
INLINE lanes silu_lanes(lanes x)
{
    return x / (1.0f + exp_lanes(either(x < -64.0f, (lanes){0} + 64.0f, -x)));
}

/* x times the logistic function of 2 u: half of x times 1 + tanh(u), the usual approximation of GELU. */
INLINE lanes gelu_lanes(lanes x)
{
    lanes twice = 1.595769122f * (x + 0.044715f * x * x * x); /* 2 sqrt(2 / pi) */
    return x / (1.0f + exp_lanes(either(twice < -64.0f, (lanes){0} + 64.0f, -twice)));
}

#endif
