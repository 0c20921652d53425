/* The product of a panel of weights in 8 or 4 bits, in a form for each extension that a CPU may have.
 *
 * Whole numbers are multiplied and summed within a block, exactly; each block's sum is then scaled. Every
 * lane of a vector is a row of the matrix, so nothing is summed across lanes.
 *
 * A byte holds one code of 8 bits, or two of 4 bits, of neighbouring groups and 8 too large: the sum of
 * products of the codes as they lie begins with what that is too much, which `shift` says. `bits` is a
 * constant in all that is INLINE. */
#include "int8.h"

#if defined(__AVX2__)
#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#define TARGET(name) __attribute__((target(name)))

/* What the sums of vector v's block begin with where codes of 8 bits are signed. */
#define FIRST_SUM(v) (bits == 8 ? 0 : x.shift[block * count + (v)] >> 4)
/* Where they are taken 128 too large. */
#define FIRST_SUM_UNSIGNED(v) (x.shift[block * count + (v)] >> (bits == 8 ? 0 : 4))

INLINE int32_t four_codes(const int8_t *from)
{
    int32_t made;
    memcpy(&made, from, sizeof made);
    return made;
}

/* A byte of group `part` (0 or 1) of those that share bytes, as it is multiplied. */
INLINE int32_t code_of(int8_t byte, int part, int bits)
{
    return bits == 8 ? byte : (uint8_t)byte >> 4 * part & 15;
}

INLINE void panel_portable(const int8_t *codes, const uint16_t *scales, int bits, struct codes x,
                           int64_t count, float *made)
{
    memset(made, 0, sizeof *made * INT8_PANEL * (size_t)count);
    for (int64_t v = 0; v < count; v++, made += INT8_PANEL)
        for (int64_t block = 0; block < x.blocks; block++) {
            const int8_t *weight = codes + block * block_bytes(bits);
            const int8_t *input = x.at + (block * CODE_BLOCK * count) + 4 * v;
            int32_t dot[INT8_PANEL];
            for (int row = 0; row < INT8_PANEL; row++)
                dot[row] = FIRST_SUM(v);
            for (int group = 0; group < GROUPS; group += 8 / bits, weight += 4 * INT8_PANEL)
                for (int part = 0; part < 8 / bits; part++, input += 4 * count)
                    for (int row = 0; row < INT8_PANEL; row++)
                        for (int i = 0; i < 4; i++)
                            dot[row] += code_of(weight[4 * row + i], part, bits) * input[i];
            float step = x.scale[block * count + v];
            for (int row = 0; row < INT8_PANEL; row++)
                made[row] += (float)dot[row] * (from_bf16(scales[block * INT8_PANEL + row]) * step);
        }
}

static void portable(const int8_t *codes, const uint16_t *scales, int64_t bits, struct codes x,
                     int64_t count, float *made)
{
    if (bits == 8)
        panel_portable(codes, scales, 8, x, count, made);
    else
        panel_portable(codes, scales, 4, x, count, made);
}

static int always(void)
{
    return 1;
}

/* Unrolls a tile for each number of vectors that it may have, in either number of bits. */
#define TILE_CASE(tile, n)                                                                         \
    case n:                                                                                        \
        if (bits == 8)                                                                             \
            tile(codes, scales, 8, x, n, made);                                                    \
        else                                                                                       \
            tile(codes, scales, 4, x, n, made);                                                    \
        break;

#ifdef __AVX2__

#define HALF 8 /* rows of a panel in a vector of 256 bits */
#define TILE_256 6

INLINE __m256 scales_256(const uint16_t *from)
{
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

/* Codes of group `part` (0 or 1) of those that share bytes. */
INLINE __m256i part_256(__m256i bytes, int part, int bits)
{
    if (bits == 8)
        return bytes;
    return _mm256_and_si256(part ? _mm256_srli_epi16(bytes, 4) : bytes, _mm256_set1_epi8(15));
}

/* A tile in vectors of 256 bits. FIRST(v): what sums begin with; WEIGHT: a change to weights; DOT(sum,
 * weight, input): the sum with the products of four neighbours added in each lane. */
#define TILE_OF_256(FIRST, WEIGHT, DOT)                                                            \
    for (int half = 0; half < INT8_PANEL; half += HALF) {                                          \
        __m256 sum[TILE_256];                                                                      \
        for (int v = 0; v < count; v++)                                                            \
            sum[v] = _mm256_setzero_ps();                                                          \
        for (int64_t block = 0; block < x.blocks; block++) {                                       \
            const int8_t *at = codes + block * block_bytes(bits) + 4 * half;                       \
            const int8_t *input = x.at + block * CODE_BLOCK * count;                               \
            __m256i dot[TILE_256];                                                                 \
            for (int v = 0; v < count; v++)                                                        \
                dot[v] = _mm256_set1_epi32(FIRST(v));                                              \
            for (int group = 0; group < GROUPS; group += 8 / bits, at += 4 * INT8_PANEL) {         \
                __m256i bytes = _mm256_loadu_si256((const void *)at);                              \
                for (int part = 0; part < 8 / bits; part++) {                                      \
                    __m256i weight = part_256(bytes, part, bits);                                  \
                    WEIGHT;                                                                        \
                    for (int v = 0; v < count; v++) {                                              \
                        const int8_t *from = input + 4 * ((group + part) * count + v);             \
                        __m256i four = _mm256_set1_epi32(four_codes(from));                        \
                        dot[v] = DOT(dot[v], weight, four);                                        \
                    }                                                                              \
                }                                                                                  \
            }                                                                                      \
            __m256 scale = scales_256(scales + block * INT8_PANEL + half);                         \
            for (int v = 0; v < count; v++) {                                                      \
                __m256 both = _mm256_mul_ps(scale, _mm256_set1_ps(x.scale[block * count + v]));    \
                sum[v] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot[v]), both, sum[v]);                \
            }                                                                                      \
        }                                                                                          \
        for (int v = 0; v < count; v++)                                                            \
            _mm256_storeu_ps(made + v * INT8_PANEL + half, sum[v]);                                \
    }

/* Codes lie between -127 and 127, so pairs of products fit 16 bits. The sign of a weight goes over to
 * the input; codes of 4 bits, as they lie, have none. */
#define DOT_SIGNED(sum, weight, four)                                                              \
    _mm256_add_epi32(                                                                              \
        sum, _mm256_madd_epi16(                                                                    \
                 _mm256_maddubs_epi16(size, bits == 8 ? _mm256_sign_epi8(four, weight) : four),    \
                 _mm256_set1_epi16(1)))

INLINE void tile_avx2(const int8_t *codes, const uint16_t *scales, int bits, struct codes x, int count,
                      float *made)
{
    TILE_OF_256(FIRST_SUM, __m256i size = bits == 8 ? _mm256_abs_epi8(weight) : weight, DOT_SIGNED)
}

static void product_avx2(const int8_t *codes, const uint16_t *scales, int64_t bits, struct codes x,
                         int64_t count, float *made)
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

/* VNNI multiplies unsigned by signed numbers: codes of 8 bits are taken 128 too large. Compilers that
 * do not know an extension leave its form out. */
#if (defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 11) || \
    (defined(__clang__) && __clang_major__ >= 14)
#define HAS_AVX_VNNI
#define TARGET_AVX_VNNI TARGET("avx2,fma,avxvnni")

INLINE TARGET_AVX_VNNI void tile_avxvnni(const int8_t *codes, const uint16_t *scales, int bits,
                                         struct codes x, int count, float *made)
{
    const __m256i sign = _mm256_set1_epi8(bits == 8 ? -128 : 0);
    TILE_OF_256(FIRST_SUM_UNSIGNED, weight = _mm256_xor_si256(weight, sign), _mm256_dpbusd_avx_epi32)
}

static TARGET_AVX_VNNI void product_avxvnni(const int8_t *codes, const uint16_t *scales, int64_t bits,
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

INLINE TARGET_512 __m512i part_512(__m512i bytes, int part, int bits)
{
    if (bits == 8)
        return _mm512_xor_si512(bytes, _mm512_set1_epi8(-128));
    return _mm512_and_si512(part ? _mm512_srli_epi16(bytes, 4) : bytes, _mm512_set1_epi8(15));
}

INLINE TARGET_512 __m512 scales_512(const uint16_t *from)
{
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

INLINE TARGET_512 void tile_avx512vnni(const int8_t *codes, const uint16_t *scales, int bits,
                                       struct codes x, int count, float *made)
{
    __m512 sum[TILE_512];
    UNROLLED for (int v = 0; v < count; v++)
        sum[v] = _mm512_setzero_ps();
    for (int64_t block = 0; block < x.blocks; block++) {
        const int8_t *at = codes + block * block_bytes(bits), *input = x.at + block * CODE_BLOCK * count;
        __m512i dot[TILE_512];
        UNROLLED for (int v = 0; v < count; v++)
            dot[v] = _mm512_set1_epi32(FIRST_SUM_UNSIGNED(v));
        for (int group = 0; group < GROUPS; group += 8 / bits, at += 4 * INT8_PANEL) {
            __m512i bytes = _mm512_loadu_si512((const void *)at);
            for (int part = 0; part < 8 / bits; part++) {
                __m512i weight = part_512(bytes, part, bits);
                UNROLLED for (int v = 0; v < count; v++) {
                    const int8_t *from = input + 4 * ((group + part) * count + v);
                    dot[v] = _mm512_dpbusd_epi32(dot[v], weight, _mm512_set1_epi32(four_codes(from)));
                }
            }
        }
        __m512 scale = scales_512(scales + block * INT8_PANEL);
        UNROLLED for (int v = 0; v < count; v++) {
            __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(x.scale[block * count + v]));
            sum[v] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[v]), both, sum[v]);
        }
    }
    UNROLLED for (int v = 0; v < count; v++)
        _mm512_storeu_ps(made + v * INT8_PANEL, sum[v]);
}

static TARGET_512 void product_avx512vnni(const int8_t *codes, const uint16_t *scales, int64_t bits,
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

/* AMX multiplies a block of a panel by 16 vectors in one instruction; what is left is to scale the sums,
 * as without it. */
#if defined(HAS_AVX_VNNI) && defined(__linux__)
#define HAS_AMX
#define TARGET_AMX TARGET("avx512f,avx512bw,avx512vl,avx512vnni,amx-tile,amx-int8")
#define TILE_AMX 16
#define LATE 4  /* blocks by which sums are read later: what AMX stores is long on its way */
#define KEPT 8  /* blocks whose sums are there */
#define AHEAD 4 /* blocks of weights that are asked for before they are read */

/* Its registers hold: 0 and 1 sums, 4 and 5 codes of vectors, 6 and 7 weights. */
struct amx_setting {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16]; /* of a row */
    uint8_t rows[16];
};

static TARGET_AMX void start_amx(int64_t count)
{
    uint8_t some = (uint8_t)count;
    /* volatile: gcc's function names 8 bytes of it to the compiler, which would leave out the others */
    volatile struct amx_setting setting = {
        .palette = 1,
        .bytes = {64, 64, 0, 0, CODE_BLOCK, CODE_BLOCK, 64, 64},
        .rows = {some, some, 0, 0, some, some, GROUPS, GROUPS},
    };
    _tile_loadconfig((const void *)&setting);
}

static TARGET_AMX void stop_amx(void)
{
    _tile_release();
}

#define MULTIPLY_AMX(block, sums, vectors, weights)                                                \
    {                                                                                              \
        const int8_t *weight = codes + (block)*block_bytes(8);                                     \
        _tile_loadd(vectors, x.at + (block)*CODE_BLOCK * count, CODE_BLOCK);                       \
        _tile_loadd(weights, weight, 4 * INT8_PANEL);                                              \
        for (int64_t line = 0; line < block_bytes(8); line += 64)                                  \
            __builtin_prefetch(weight + AHEAD * block_bytes(8) + line);                            \
        _tile_zero(sums);                                                                          \
        _tile_dpbssd(sums, vectors, weights);                                                      \
    }

INLINE TARGET_AMX void tile_amx(const int8_t *codes, const uint16_t *scales, struct codes x, int count,
                                float *made)
{
    int32_t dots[KEPT][TILE_AMX * INT8_PANEL] __attribute__((aligned(64)));
    __m512 sum[TILE_AMX];
    UNROLLED for (int v = 0; v < count; v++)
        sum[v] = _mm512_setzero_ps();
    for (int64_t block = 0, ready = -LATE; ready < x.blocks; block += 2) {
        if (block < x.blocks)
            MULTIPLY_AMX(block, 0, 4, 6)
        if (block + 1 < x.blocks)
            MULTIPLY_AMX(block + 1, 1, 5, 7)
        if (block < x.blocks)
            _tile_stored(0, dots[block % KEPT], 4 * INT8_PANEL);
        if (block + 1 < x.blocks)
            _tile_stored(1, dots[(block + 1) % KEPT], 4 * INT8_PANEL);
        for (int both = 0; both < 2; both++, ready++) {
            if (ready < 0 || ready >= x.blocks)
                continue;
            const int32_t *dot = dots[ready % KEPT];
            const float *scale = x.scale + ready * count;
            __m512 weight = scales_512(scales + ready * INT8_PANEL);
            UNROLLED for (int v = 0; v < count; v++) {
                __m512 whole = _mm512_cvtepi32_ps(_mm512_load_si512((const void *)(dot + v * INT8_PANEL)));
                sum[v] = _mm512_fmadd_ps(whole, _mm512_mul_ps(weight, _mm512_set1_ps(scale[v])), sum[v]);
            }
        }
    }
    UNROLLED for (int v = 0; v < count; v++)
        _mm512_storeu_ps(made + v * INT8_PANEL, sum[v]);
}

#define CASE_AMX(n)                                                                                \
    case n: tile_amx(codes, scales, x, n, made); break;

static TARGET_AMX void product_amx(const int8_t *codes, const uint16_t *scales, int64_t bits,
                                   struct codes x, int64_t count, float *made)
{
    switch (count) {
        CASE_AMX(9)
        CASE_AMX(10)
        CASE_AMX(11)
        CASE_AMX(12)
        CASE_AMX(13)
        CASE_AMX(14)
        CASE_AMX(15)
        CASE_AMX(16)
    default: product_avx512vnni(codes, scales, bits, x, count, made);
    }
}

/* The system keeps its registers for processes that have asked for it. */
static int runs_amx(void)
{
    const long ask = 0x1023, registers = 18; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
    unsigned a, b, c, d;
    return runs_avx512vnni() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && d >> 24 & d >> 25 & 1 &&
           !syscall(SYS_arch_prctl, ask, registers);
}
#endif
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

INLINE int8x16_t part_neon(int8x16_t bytes, int part, int bits)
{
    if (bits == 8)
        return bytes;
    uint8x16_t both = vreinterpretq_u8_s8(bytes);
    return vreinterpretq_s8_u8(part ? vshrq_n_u8(both, 4) : vandq_u8(both, vdupq_n_u8(15)));
}

INLINE void tile_neon(const int8_t *codes, const uint16_t *scales, int bits, struct codes x, int count,
                      float *made)
{
    for (int quarter = 0; quarter < INT8_PANEL; quarter += 4) {
        float32x4_t sum[TILE_NEON];
        for (int v = 0; v < count; v++)
            sum[v] = vdupq_n_f32(0);
        for (int64_t block = 0; block < x.blocks; block++) {
            const int8_t *at = codes + block * block_bytes(bits) + 4 * quarter;
            const int8_t *input = x.at + block * CODE_BLOCK * count;
            int32x4_t dot[TILE_NEON];
            for (int v = 0; v < count; v++)
                dot[v] = vdupq_n_s32(FIRST_SUM(v));
            for (int group = 0; group < GROUPS; group += 8 / bits, at += 4 * INT8_PANEL) {
                int8x16_t bytes = vld1q_s8(at);
                for (int part = 0; part < 8 / bits; part++) {
                    int8x16_t weight = part_neon(bytes, part, bits);
                    for (int v = 0; v < count; v++) {
                        const int8_t *from = input + 4 * ((group + part) * count + v);
                        int8x16_t four = vreinterpretq_s8_s32(vdupq_n_s32(four_codes(from)));
                        dot[v] = dot_neon(dot[v], weight, four);
                    }
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

static void product_neon(const int8_t *codes, const uint16_t *scales, int64_t bits, struct codes x,
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
#ifdef HAS_AMX
    {"amx", runs_amx, product_amx, TILE_512, TILE_AMX, start_amx, stop_amx},
#endif
#ifdef __AVX512BW__
    {"avx512vnni", runs_avx512vnni, product_avx512vnni, TILE_512, 0, 0, 0},
#endif
#ifdef HAS_AVX_VNNI
    {"avxvnni", runs_avxvnni, product_avxvnni, TILE_256, 0, 0, 0},
#endif
#ifdef __AVX2__
    {"avx2", always, product_avx2, TILE_256, 0, 0, 0},
#elif defined(__aarch64__)
    {"neon", runs_neon, product_neon, TILE_NEON, 0, 0, 0},
#endif
    {"portable", always, portable, MOST_VECTORS, 0, 0, 0},
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
