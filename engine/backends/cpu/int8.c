/* Products with weights in 8 bits, as engine/model/int8.py defines them: the states are rounded to 8
 * bits in blocks, too, and whole numbers are multiplied and summed; each block's sum is then scaled.
 *
 * Every lane of a vector is a row of the matrix, so nothing is summed across lanes: a product does not
 * depend, not in one bit, on the tile that it is computed in, on threads or on other vectors. */
#include <math.h>
#include <string.h>

#include "native.h"

#if defined(__AVX2__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#ifdef __linux__
#include <sys/auxv.h>
#endif
#endif

#define GROUPS 8         /* of a block: four columns of each row of a panel lie together */
#define MOST_VECTORS 8   /* in a tile, of any of the forms below */
#define INLINE static inline __attribute__((always_inline))
#define TARGET(name) __attribute__((target(name)))

/* One panel times `count` vectors. The sums of INT8_PANEL rows go to `made`, vector by vector. */
typedef void panel_product(const int8_t *codes, const uint16_t *scales, struct codes x,
                           int64_t count, float *made);

struct form {
    const char *name;
    int (*runs)(void);
    panel_product *product;
    int64_t vectors; /* in a tile */
};

static const struct form *chosen;

static int64_t tiles_of(int64_t count)
{
    return (count + chosen->vectors - 1) / chosen->vectors;
}

INLINE int32_t four_codes(const int8_t *from)
{
    int32_t made;
    memcpy(&made, from, sizeof made);
    return made;
}

INLINE float from_bf16(uint16_t half)
{
    uint32_t bits = (uint32_t)half << 16;
    float made;
    memcpy(&made, &bits, sizeof made);
    return made;
}

/* The nearest whole number, even where two are as near. */
INLINE float whole(float x)
{
#if defined(__SSE4_1__) || defined(__aarch64__)
    return rintf(x); /* one instruction; the form below could become a fused multiply-add */
#else
    return (x + 12582912.0f) - 12582912.0f;
#endif
}

/* The vectors of one of the tiles that `count` vectors are divided into. */
struct tile {
    int64_t first, count;
};

static struct tile tile_of(int64_t count, int64_t tiles, int64_t tile)
{
    int64_t first = count * tile / tiles;
    return (struct tile){first, count * (tile + 1) / tiles - first};
}

static struct codes codes_of(struct codes x, struct tile tile)
{
    int64_t at = tile.first * x.blocks;
    return (struct codes){x.at + at * CODE_BLOCK, x.scale + at, x.shift + at, x.blocks};
}

/* Round a block of one vector: its codes go to `codes`, four by four, `stride` bytes apart. */
static void code_block(const float *restrict x, int8_t *restrict codes, int64_t stride, float *scale,
                       int32_t *shift)
{
    int32_t bits[CODE_BLOCK], most = 0, sum = 0;
    int8_t made[CODE_BLOCK];
    memcpy(bits, x, sizeof bits);
#pragma omp simd reduction(max : most)
    for (int i = 0; i < CODE_BLOCK; i++) {
        int32_t size = bits[i] & 0x7fffffff; /* ordered like the numbers, and above them NaN */
        most = size > most ? size : most;
    }
    float greatest;
    memcpy(&greatest, &most, sizeof greatest);
    float inverse = greatest >= LEAST_CODED && most < 0x7f800000 ? 127.0f / greatest : 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < CODE_BLOCK; i++) {
        int32_t code = most < 0x7f800000 ? (int32_t)whole(x[i] * inverse) : 0;
        made[i] = (int8_t)code;
        sum += code;
    }
    for (int group = 0; group < GROUPS; group++)
        memcpy(codes + group * stride, made + 4 * group, 4);
    *scale = most < 0x7f800000 ? greatest / 127.0f : NAN;
    *shift = -128 * sum;
}

/* Round one of `parts` parts of `count` vectors of `width` numbers; the last block is filled with
 * zeros. */
void code_part(struct vectors x, int64_t width, int64_t count, int64_t part, int64_t parts,
               struct codes to)
{
    int64_t tiles = tiles_of(count);
    for (int64_t index = tiles * part / parts; index < tiles * (part + 1) / parts; index++) {
        struct tile tile = tile_of(count, tiles, index);
        struct codes mine = codes_of(to, tile);
        for (int64_t v = 0; v < tile.count; v++)
            for (int64_t block = 0; block < to.blocks; block++) {
                const float *from = x.at + (tile.first + v) * x.stride + block * CODE_BLOCK;
                int64_t at = block * tile.count, left = width - block * CODE_BLOCK;
                float rest[CODE_BLOCK] = {0};
                if (left < CODE_BLOCK)
                    from = memcpy(rest, from, sizeof *rest * (size_t)left);
                code_block(from, mine.at + at * CODE_BLOCK + 4 * v, 4 * tile.count,
                           mine.scale + at + v, mine.shift + at + v);
            }
    }
}

void code_vectors(struct vectors x, int64_t width, int64_t count, struct codes to)
{
    code_part(x, width, count, 0, 1, to);
}

/* Lay out the codes of `count` vectors of `width` numbers at `base`; returns the floats they take. */
int64_t carve_codes(int64_t width, int64_t count, float *base, struct codes *to)
{
    int64_t blocks = (width + CODE_BLOCK - 1) / CODE_BLOCK, each = count * blocks;
    int64_t codes = each * CODE_BLOCK / (int64_t)sizeof(float), line = (each + 15) / 16 * 16;
    if (base)
        *to = (struct codes){(int8_t *)base, base + codes, (int32_t *)(base + codes + line), blocks};
    return codes + 2 * line;
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

static const struct form FORMS[] = { /* best first */
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

/* Take the form of that name from now on, "" for the best that the CPU can run; returns the name of
 * what was taken, or NULL where this library or CPU has none of that name. */
EXPORT const char *mmkv_int8_form(const char *name)
{
#ifdef __AVX2__
    __builtin_cpu_init();
#endif
    for (size_t i = 0; i < sizeof FORMS / sizeof *FORMS; i++)
        if ((!*name || !strcmp(name, FORMS[i].name)) && FORMS[i].runs()) {
            chosen = FORMS + i;
            return chosen->name;
        }
    return 0;
}

/* y or y += weight x + bias for rows from .. to-1: the vectors a few at a time, which stay in the
 * nearest cache with the panels. */
void int8_rows(const struct linear *map, struct codes x, struct vectors y, int64_t count,
               int64_t from, int64_t to, int add)
{
    int64_t tiles = tiles_of(count);
    for (int64_t index = 0; index < tiles; index++) {
        struct tile tile = tile_of(count, tiles, index);
        struct codes in = codes_of(x, tile);
        for (int64_t panel = from / INT8_PANEL; panel * INT8_PANEL < to; panel++) {
            float made[MOST_VECTORS * INT8_PANEL];
            int64_t start = panel * INT8_PANEL, at = panel * x.blocks * INT8_PANEL;
            int64_t low = from > start ? from : start, high = to < start + INT8_PANEL ? to : start + INT8_PANEL;
            chosen->product(map->codes + at * CODE_BLOCK, map->scales + at, in, tile.count, made);
            for (int64_t v = 0; v < tile.count; v++)
                put_rows(map, made + v * INT8_PANEL + (low - start), low, high, add,
                         y.at + (tile.first + v) * y.stride);
        }
    }
}

void int8_row(const struct linear *map, int64_t row, float *to)
{
    int64_t blocks = (map->in + CODE_BLOCK - 1) / CODE_BLOCK, panel = row / INT8_PANEL * blocks * INT8_PANEL;
    for (int64_t i = 0; i < map->in; i++) {
        int64_t at = panel + i / CODE_BLOCK * INT8_PANEL;
        int8_t code = map->codes[at * CODE_BLOCK + (i % CODE_BLOCK / 4 * INT8_PANEL + row % INT8_PANEL) * 4 + i % 4];
        to[i] = (float)code * from_bf16(map->scales[at + row % INT8_PANEL]);
    }
}

/* Round a block of weights, and add what that changes and their squares to `sums`. Codes go to the
 * block's groups, four by four. */
static void round_block(const float *restrict x, int8_t *restrict codes, uint16_t *scale, double *sums)
{
    int32_t bits[CODE_BLOCK], most = 0;
    int8_t made[CODE_BLOCK];
    memcpy(bits, x, sizeof bits);
#pragma omp simd reduction(max : most)
    for (int i = 0; i < CODE_BLOCK; i++) {
        int32_t size = bits[i] & 0x7fffffff;
        most = size > most ? size : most;
    }
    float greatest, step, wrong = 0, whole_block = 0;
    uint32_t least;
    memcpy(&greatest, &most, sizeof greatest);
    greatest /= 127.0f;
    memcpy(&least, &greatest, sizeof least);
    *scale = most < 0x7f800000 ? (uint16_t)((least + 0xffff) >> 16) : 0x7fc0; /* or not a number */
    step = from_bf16(*scale);
    float divisor = step > 0 ? step : 1.0f;
#pragma omp simd reduction(+ : wrong, whole_block)
    for (int i = 0; i < CODE_BLOCK; i++) {
        float code = whole(x[i] / divisor), off = x[i] - code * step;
        made[i] = (int8_t)(int32_t)(most < 0x7f800000 ? code : 0.0f);
        wrong += off * off;
        whole_block += x[i] * x[i];
    }
    for (int group = 0; group < GROUPS; group++)
        memcpy(codes + group * 4 * INT8_PANEL, made + 4 * group, 4);
    sums[0] += wrong;
    sums[1] += whole_block;
}

/* Round weights [out, in], float32 or (`half`) bfloat16, as Int8Matrix.of does. `sums` [panels, 2]
 * gets, panel by panel, the squares of what changed and of the weights. */
EXPORT void mmkv_round(const void *weights, int64_t half, int64_t out, int64_t in, int8_t *codes,
                       uint16_t *scales, double *sums, int64_t threads)
{
    int64_t panels = (out + INT8_PANEL - 1) / INT8_PANEL, blocks = (in + CODE_BLOCK - 1) / CODE_BLOCK;
#pragma omp parallel for num_threads((int)threads) if (threads > 1)
    for (int64_t panel = 0; panel < panels; panel++) {
        sums[2 * panel] = sums[2 * panel + 1] = 0;
        for (int64_t i = 0; i < INT8_PANEL * blocks; i++) {
            int64_t row = panel * INT8_PANEL + i / blocks, block = i % blocks;
            int64_t from = row * in + block * CODE_BLOCK, left = in - block * CODE_BLOCK;
            int64_t at = (panel * blocks + block) * INT8_PANEL + i / blocks, lane = 4 * (i / blocks);
            float x[CODE_BLOCK] = {0};
            for (int64_t n = 0; row < out && n < (left < CODE_BLOCK ? left : CODE_BLOCK); n++)
                x[n] = half ? from_bf16(((const uint16_t *)weights)[from + n])
                            : ((const float *)weights)[from + n];
            round_block(x, codes + (panel * blocks + block) * CODE_BLOCK * INT8_PANEL + lane, scales + at,
                        sums + 2 * panel);
        }
    }
}
