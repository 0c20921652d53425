/* The product of a panel of weights in 8 bits, in a form for each extension that a CPU may have.
 *
 * Whole numbers are multiplied and summed within a block, exactly; each block's sum is then scaled. Every
 * lane of a vector is a row of the matrix, so nothing is summed across lanes. */
#include "int8.h"

#if defined(__AVX2__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#define TARGET(name) __attribute__((target(name)))

INLINE int32_t four_codes(const int8_t *from)
{
    int32_t made;
    memcpy(&made, from, sizeof made);
    return made;
}

static void portable(const int8_t *codes, const uint16_t *scales, struct codes x, int64_t count,
                     float *made)
{
    memset(made, 0, sizeof *made * INT8_PANEL * (size_t)count);
    for (int64_t v = 0; v < count; v++, made += INT8_PANEL)
        for (int64_t block = 0; block < x.blocks; block++) {
            const int8_t *weight = codes + block * CODE_BLOCK * INT8_PANEL;
            const int8_t *input = x.at + (block * CODE_BLOCK * count) + 4 * v;
            int32_t dot[INT8_PANEL] = {0};
            for (int group = 0; group < GROUPS; group++, weight += 4 * INT8_PANEL, input += 4 * count)
                for (int row = 0; row < INT8_PANEL; row++)
                    dot[row] += weight[4 * row] * input[0] + weight[4 * row + 1] * input[1] +
                                weight[4 * row + 2] * input[2] + weight[4 * row + 3] * input[3];
            float step = x.scale[block * count + v];
            for (int row = 0; row < INT8_PANEL; row++)
                made[row] += (float)dot[row] * (from_bf16(scales[block * INT8_PANEL + row]) * step);
        }
}

static int always(void)
{
    return 1;
}

/* Unrolls a tile for each number of vectors that it may have. */
#define TILE_CASE(tile, n) \
    case n: tile(codes, scales, x, n, made); break;

#ifdef __AVX2__

#define HALF 8 /* rows of a panel in a vector of 256 bits */
#define TILE_256 6

INLINE __m256 scales_256(const uint16_t *from)
{
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

/* A tile in vectors of 256 bits. START: what sums begin with; DOT(sum, weight, input): the sum with
 * the products of four neighbours added in each lane. */
#define TILE_OF_256(START, WEIGHT, DOT)                                                             \
    for (int half = 0; half < INT8_PANEL; half += HALF) {                                               \
        __m256 sum[TILE_256];                                                                      \
        for (int v = 0; v < count; v++)                                                            \
            sum[v] = _mm256_setzero_ps();                                                          \
        for (int64_t block = 0; block < x.blocks; block++) {                                       \
            const int8_t *at = codes + block * CODE_BLOCK * INT8_PANEL + 4 * half;                           \
            const int8_t *input = x.at + block * CODE_BLOCK * count;                               \
            __m256i dot[TILE_256];                                                                 \
            for (int v = 0; v < count; v++)                                                        \
                dot[v] = START(v);                                                                 \
            for (int group = 0; group < GROUPS; group++) {                                         \
                __m256i weight = _mm256_loadu_si256((const void *)(at + group * 4 * INT8_PANEL));       \
                WEIGHT;                                                                            \
                for (int v = 0; v < count; v++) {                                                  \
                    const int8_t *from = input + 4 * (group * count + v);                 \
                    __m256i four = _mm256_set1_epi32(four_codes(from));                            \
                    dot[v] = DOT(dot[v], weight, four);                                            \
                }                                                                                  \
            }                                                                                      \
            __m256 scale = scales_256(scales + block * INT8_PANEL + half);                              \
            for (int v = 0; v < count; v++) {                                                      \
                __m256 both = _mm256_mul_ps(scale, _mm256_set1_ps(x.scale[block * count + v])); \
                sum[v] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot[v]), both, sum[v]);                \
            }                                                                                      \
        }                                                                                          \
        for (int v = 0; v < count; v++)                                                            \
            _mm256_storeu_ps(made + v * INT8_PANEL + half, sum[v]);                                     \
    }

#define ZERO(v) _mm256_setzero_si256()
#define SHIFT(v) _mm256_set1_epi32(x.shift[block * count + v])
/* Codes lie between -127 and 127, so pairs of products fit 16 bits. */
#define DOT_SIGNED(sum, weight, four)                                                              \
    _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(                                  \
                                                size, _mm256_sign_epi8(four, weight)),             \
                                            _mm256_set1_epi16(1)))

INLINE void tile_avx2(const int8_t *codes, const uint16_t *scales, struct codes x, int count,
                      float *made)
{
    TILE_OF_256(ZERO, __m256i size = _mm256_abs_epi8(weight), DOT_SIGNED)
}

static void product_avx2(const int8_t *codes, const uint16_t *scales, struct codes x, int64_t count,
                         float *made)
{
    switch (count) {
        TILE_CASE(tile_avx2, 1)
        TILE_CASE(tile_avx2, 2)
        TILE_CASE(tile_avx2, 3)
        TILE_CASE(tile_avx2, 4)
        TILE_CASE(tile_avx2, 5)
        TILE_CASE(tile_avx2, 6)
    }
}

/* VNNI multiplies unsigned by signed numbers: weights are taken 128 too large, which `shift` takes
 * back. Compilers that do not know an extension leave its form out. */
#if (defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 11) || \
    (defined(__clang__) && __clang_major__ >= 14)
#define HAS_AVX_VNNI
#define TARGET_AVX_VNNI TARGET("avx2,fma,avxvnni")

INLINE TARGET_AVX_VNNI void tile_avxvnni(const int8_t *codes, const uint16_t *scales, struct codes x,
                                         int count, float *made)
{
    const __m256i sign = _mm256_set1_epi8(-128);
    TILE_OF_256(SHIFT, weight = _mm256_xor_si256(weight, sign), _mm256_dpbusd_avx_epi32)
}

static TARGET_AVX_VNNI void product_avxvnni(const int8_t *codes, const uint16_t *scales,
                                            struct codes x, int64_t count, float *made)
{
    switch (count) {
        TILE_CASE(tile_avxvnni, 1)
        TILE_CASE(tile_avxvnni, 2)
        TILE_CASE(tile_avxvnni, 3)
        TILE_CASE(tile_avxvnni, 4)
        TILE_CASE(tile_avxvnni, 5)
        TILE_CASE(tile_avxvnni, 6)
    }
}

/* Asked of the CPU: clang below 19 takes no such name for __builtin_cpu_supports. That the system
 * keeps these registers is known: levels.c has asked for AVX2. */
static int runs_avxvnni(void)
{
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && a >> 4 & 1;
}
#endif

#ifdef __AVX512BW__
#define TARGET_512 TARGET("avx512f,avx512bw,avx512vl,avx512vnni")
#define TILE_512 8 /* of 12, too, sums fit the registers, and it is a quarter slower */

INLINE TARGET_512 void tile_avx512vnni(const int8_t *codes, const uint16_t *scales, struct codes x,
                                       int count, float *made)
{
    const __m512i sign = _mm512_set1_epi8(-128);
    __m512 sum[TILE_512];
    for (int v = 0; v < count; v++)
        sum[v] = _mm512_setzero_ps();
    for (int64_t block = 0; block < x.blocks; block++) {
        const int8_t *at = codes + block * CODE_BLOCK * INT8_PANEL, *input = x.at + block * CODE_BLOCK * count;
        __m512i dot[TILE_512];
        for (int v = 0; v < count; v++)
            dot[v] = _mm512_set1_epi32(x.shift[block * count + v]);
        for (int group = 0; group < GROUPS; group++) {
            __m512i weight = _mm512_loadu_si512((const void *)(at + group * 4 * INT8_PANEL));
            weight = _mm512_xor_si512(weight, sign);
            for (int v = 0; v < count; v++) {
                const int8_t *from = input + 4 * (group * count + v);
                dot[v] = _mm512_dpbusd_epi32(dot[v], weight, _mm512_set1_epi32(four_codes(from)));
            }
        }
        __m256i half = _mm256_loadu_si256((const void *)(scales + block * INT8_PANEL));
        __m512 scale = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
        for (int v = 0; v < count; v++) {
            __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(x.scale[block * count + v]));
            sum[v] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[v]), both, sum[v]);
        }
    }
    for (int v = 0; v < count; v++)
        _mm512_storeu_ps(made + v * INT8_PANEL, sum[v]);
}

static TARGET_512 void product_avx512vnni(const int8_t *codes, const uint16_t *scales,
                                          struct codes x, int64_t count, float *made)
{
    switch (count) {
        TILE_CASE(tile_avx512vnni, 1)
        TILE_CASE(tile_avx512vnni, 2)
        TILE_CASE(tile_avx512vnni, 3)
        TILE_CASE(tile_avx512vnni, 4)
        TILE_CASE(tile_avx512vnni, 5)
        TILE_CASE(tile_avx512vnni, 6)
        TILE_CASE(tile_avx512vnni, 7)
        TILE_CASE(tile_avx512vnni, 8)
    }
}

static int runs_avx512vnni(void)
{
    return __builtin_cpu_supports("avx512vnni");
}
#endif

#elif defined(__aarch64__)
#define TILE_NEON 4

/* Written out: compilers would want all of this, and what it calls, for ARMv8.2. Assemblers want to be
 * told; what the other levels are compiled for has to stay allowed. */
#ifdef __ARM_FEATURE_DOTPROD
#define WITH_DOTS ""
#else
#define WITH_DOTS ".arch armv8.2-a+dotprod+sve\n\t"
#endif

INLINE int32x4_t dot_neon(int32x4_t sum, int8x16_t weight, int8x16_t four)
{
    __asm__(WITH_DOTS "sdot %0.4s, %1.16b, %2.16b"
            : "+w"(sum)
            : "w"(weight), "w"(four));
    return sum;
}

INLINE void tile_neon(const int8_t *codes, const uint16_t *scales, struct codes x,
                                  int count, float *made)
{
    for (int quarter = 0; quarter < INT8_PANEL; quarter += 4) {
        float32x4_t sum[TILE_NEON];
        for (int v = 0; v < count; v++)
            sum[v] = vdupq_n_f32(0);
        for (int64_t block = 0; block < x.blocks; block++) {
            const int8_t *at = codes + block * CODE_BLOCK * INT8_PANEL + 4 * quarter;
            const int8_t *input = x.at + block * CODE_BLOCK * count;
            int32x4_t dot[TILE_NEON];
            for (int v = 0; v < count; v++)
                dot[v] = vdupq_n_s32(0);
            for (int group = 0; group < GROUPS; group++) {
                int8x16_t weight = vld1q_s8(at + group * 4 * INT8_PANEL);
                for (int v = 0; v < count; v++) {
                    const int8_t *from = input + 4 * (group * count + v);
                    int8x16_t four = vreinterpretq_s8_s32(vdupq_n_s32(four_codes(from)));
                    dot[v] = dot_neon(dot[v], weight, four);
                }
            }
            uint32x4_t wide = vmovl_u16(vld1_u16(scales + block * INT8_PANEL + quarter));
            float32x4_t scale = vreinterpretq_f32_u32(vshlq_n_u32(wide, 16));
            for (int v = 0; v < count; v++) {
                float32x4_t both = vmulq_n_f32(scale, x.scale[block * count + v]);
                sum[v] = vfmaq_f32(sum[v], vcvtq_f32_s32(dot[v]), both);
            }
        }
        for (int v = 0; v < count; v++)
            vst1q_f32(made + v * INT8_PANEL + quarter, sum[v]);
    }
}

static void product_neon(const int8_t *codes, const uint16_t *scales, struct codes x,
                                     int64_t count, float *made)
{
    switch (count) {
        TILE_CASE(tile_neon, 1)
        TILE_CASE(tile_neon, 2)
        TILE_CASE(tile_neon, 3)
        TILE_CASE(tile_neon, 4)
    }
}

static int runs_neon(void)
{
#if defined(__ARM_FEATURE_DOTPROD)
    return 1;
#elif defined(__linux__)
    const unsigned long asimddp = 1ul << 20; /* HWCAP_ASIMDDP */
    return (getauxval(AT_HWCAP) & asimddp) != 0;
#else
    return 0;
#endif
}
#endif

static const struct int8_form FORMS[] = { /* best first */
#ifdef __AVX512BW__
    {"avx512vnni", runs_avx512vnni, product_avx512vnni, TILE_512},
#endif
#ifdef HAS_AVX_VNNI
    {"avxvnni", runs_avxvnni, product_avxvnni, TILE_256},
#endif
#ifdef __AVX2__
    {"avx2", always, product_avx2, TILE_256},
#elif defined(__aarch64__)
    {"neon", runs_neon, product_neon, TILE_NEON},
#endif
    {"portable", always, portable, MOST_VECTORS},
};

const struct int8_form *int8_form_of(const char *name)
{
#ifdef __AVX2__
    __builtin_cpu_init();
#endif
    for (size_t i = 0; i < sizeof FORMS / sizeof *FORMS; i++)
        if ((!*name || !strcmp(name, FORMS[i].name)) && FORMS[i].runs())
            return FORMS + i;
    return 0;
}
