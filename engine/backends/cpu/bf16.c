/* Products with weights in bfloat16 (engine/model/panels.py). They lie in panels of BF16_PANEL rows, and
 * in a panel two columns of every row lie together: one load gives the weights of both columns, each
 * in the half of a lane that makes it a float, and the CPU reads memory in one stream.
 *
 * Every lane is a row. Columns are summed in an order that is the same in any tile, and what a stretch
 * of columns sums up to is added to those before: a product does not depend, not in one bit, on the
 * tile, on threads or on other vectors.
 *
 * States are floats, or (`rounds` of the matrix) rounded to bfloat16 first. Pairs of those meet pairs of
 * weights in one instruction where the CPU has it, at twice the rate. */
#include <string.h>

#include "native.h"
#include "vectors.h"

/* Vectors of rows, and vectors of states, that a tile's sums and what it reads fit the registers with.
 * One vector of states alone takes more rows: its sums would otherwise wait for each other. */
#if defined(__AVX512F__)
#define PARTS 2
#define PARTS_OF_ONE 2
#define MOST_VECTORS 6
#elif defined(__AVX2__)
#define PARTS 2
#define PARTS_OF_ONE 4
#define MOST_VECTORS 3
#elif defined(__aarch64__)
#define PARTS 2
#define PARTS_OF_ONE 8
#define MOST_VECTORS 6
#else
#define PARTS 2
#define PARTS_OF_ONE 4
#define MOST_VECTORS 3
#endif

#if defined(__AVX512BW__)
#include <cpuid.h>
#endif

#define STRETCH 256 /* columns that a sum runs over: of thousands, each would round a larger sum */
#define AHEAD 1024 /* numbers that are asked for before they are read: as many as arrive meanwhile */

INLINE lanes_bits pairs_at(const uint16_t *from)
{
    lanes_bits made;
    memcpy(&made, from, sizeof made);
    return made;
}

/* `parts` vectors of rows of a panel times columns from .. to-1 of `count` vectors; the sums of vector
 * v go to made + v * BF16_PANEL, or are added to what is there. What lies `ahead` numbers further on is
 * asked for meanwhile. */
INLINE void stretch(const uint16_t *panel, int64_t from, int64_t to, struct vectors x, int parts,
                    int count, int64_t ahead, float *made)
{
    lanes even[MOST_VECTORS][PARTS_OF_ONE], odd[MOST_VECTORS][PARTS_OF_ONE];
    for (int v = 0; v < count; v++)
        for (int part = 0; part < parts; part++)
            even[v][part] = odd[v][part] = (lanes){0};
    int64_t at = from;
    panel += from * BF16_PANEL;
    for (; at + 2 <= to; at += 2, panel += 2 * BF16_PANEL) {
        lanes_bits pairs[PARTS_OF_ONE];
        for (int part = 0; part < parts; part++)
            pairs[part] = pairs_at(panel + 2 * LANES * part);
        for (int row = 0; row < parts * LANES; row += 16)
            __builtin_prefetch(panel + ahead + 2 * row);
        for (int v = 0; v < count; v++)
            for (int part = 0; part < parts; part++)
                even[v][part] += (lanes)(pairs[part] << 16) * x.at[v * x.stride + at];
        for (int v = 0; v < count; v++)
            for (int part = 0; part < parts; part++)
                odd[v][part] += (lanes)(pairs[part] & 0xffff0000u) * x.at[v * x.stride + at + 1];
    }
    for (int part = 0; at < to && part < parts; part++) {
        lanes last = (lanes)(pairs_at(panel + 2 * LANES * part) << 16);
        for (int v = 0; v < count; v++)
            even[v][part] += last * x.at[v * x.stride + at];
    }
    for (int v = 0; v < count; v++)
        for (int part = 0; part < parts; part++) {
            float *out = made + v * BF16_PANEL + part * LANES;
            lanes before = {0}, sum = even[v][part] + odd[v][part];
            if (from > 0)
                memcpy(&before, out, sizeof before);
            sum += before;
            memcpy(out, &sum, sizeof sum);
        }
}

/* `parts` vectors of rows of a panel times `count` vectors, a stretch of columns at a time. */
INLINE void tile(const uint16_t *panel, int64_t width, struct vectors x, int parts, int count,
                 int64_t ahead, float *made)
{
    int64_t from = 0;
    do {
        int64_t to = width - from > STRETCH ? from + STRETCH : width;
        stretch(panel, from, to, x, parts, count, ahead, made);
        from = to;
    } while (from < width);
}

INLINE void panel_times(const uint16_t *panel, int64_t width, struct vectors x, int count, int64_t ahead,
                        float *made)
{
    int parts = count == 1 ? PARTS_OF_ONE : PARTS;
    for (int row = 0; row < BF16_PANEL; row += parts * LANES)
        tile(panel + 2 * row, width, x, parts, count, ahead, made + row);
}

static void product(const uint16_t *panel, int64_t width, struct vectors x, int64_t count, int64_t ahead,
                    float *made)
{
    switch (count) {
    case 1: panel_times(panel, width, x, 1, ahead, made); break;
    case 2: panel_times(panel, width, x, 2, ahead, made); break;
    case 3: panel_times(panel, width, x, 3, ahead, made); break;
#if MOST_VECTORS > 3
    case 4: panel_times(panel, width, x, 4, ahead, made); break;
    case 5: panel_times(panel, width, x, 5, ahead, made); break;
    case 6: panel_times(panel, width, x, 6, ahead, made); break;
#endif
    }
}

static int64_t numbers_of_panel(int64_t width)
{
    return (width + 1) / 2 * 2 * BF16_PANEL;
}

#ifdef __AVX512BW__
#define DOTS
#define TARGET_DOTS __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))
#define DOT_VECTORS 8

/* A panel times a stretch of columns of `count` rounded vectors, as `stretch` does it. Numbers below
 * 2^-126 count as 0. */
INLINE TARGET_DOTS void dot_stretch(const uint16_t *panel, int64_t from, int64_t to, struct vectors x,
                                    int count, int64_t ahead, float *made)
{
    __m512 low[DOT_VECTORS], high[DOT_VECTORS];
    const uint32_t *states = x.rounded;
    for (int v = 0; v < count; v++)
        low[v] = high[v] = _mm512_setzero_ps();
    panel += from * BF16_PANEL;
    for (int64_t pair = from / 2; 2 * pair < to; pair++, panel += 2 * BF16_PANEL) {
        __m512i one = _mm512_loadu_si512(panel), other = _mm512_loadu_si512(panel + 32);
        __builtin_prefetch(panel + ahead);
        __builtin_prefetch(panel + ahead + 32);
        for (int v = 0; v < count; v++) {
            __m512i both = _mm512_set1_epi32((int)states[v * x.stride + pair]);
            low[v] = _mm512_dpbf16_ps(low[v], (__m512bh)one, (__m512bh)both);
            high[v] = _mm512_dpbf16_ps(high[v], (__m512bh)other, (__m512bh)both);
        }
    }
    for (int v = 0; v < count; v++) {
        float *out = made + v * BF16_PANEL;
        if (from > 0) {
            low[v] = _mm512_add_ps(low[v], _mm512_loadu_ps(out));
            high[v] = _mm512_add_ps(high[v], _mm512_loadu_ps(out + LANES));
        }
        _mm512_storeu_ps(out, low[v]);
        _mm512_storeu_ps(out + LANES, high[v]);
    }
}

INLINE TARGET_DOTS void dot_panel(const uint16_t *panel, int64_t width, struct vectors x, int count,
                                  int64_t ahead, float *made)
{
    int64_t from = 0;
    do {
        int64_t to = width - from > STRETCH ? from + STRETCH : width;
        dot_stretch(panel, from, to, x, count, ahead, made);
        from = to;
    } while (from < width);
}

static TARGET_DOTS void dot_product(const uint16_t *panel, int64_t width, struct vectors x,
                                    int64_t count, int64_t ahead, float *made)
{
    switch (count) {
    case 1: dot_panel(panel, width, x, 1, ahead, made); break;
    case 2: dot_panel(panel, width, x, 2, ahead, made); break;
    case 3: dot_panel(panel, width, x, 3, ahead, made); break;
    case 4: dot_panel(panel, width, x, 4, ahead, made); break;
    case 5: dot_panel(panel, width, x, 5, ahead, made); break;
    case 6: dot_panel(panel, width, x, 6, ahead, made); break;
    case 7: dot_panel(panel, width, x, 7, ahead, made); break;
    case 8: dot_panel(panel, width, x, 8, ahead, made); break;
    }
}

/* Asked of the CPU, as not all compilers have a name for it. */
static int runs_dots(void)
{
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && a >> 5 & 1;
}
#else
#define DOT_VECTORS MOST_VECTORS
#endif

/* How rounded states are multiplied: in pairs, or widened to floats. */
struct bf16_form {
    const char *name;
    int (*runs)(void);
    void (*product)(const uint16_t *panel, int64_t width, struct vectors x, int64_t count, int64_t ahead,
                    float *made); /* NULL: states are floats that bfloat16 holds */
};

static int always(void)
{
    return 1;
}

static const struct bf16_form FORMS[] = { /* best first */
#ifdef DOTS
    {"avx512bf16", runs_dots, dot_product},
#endif
    {"widened", always, 0},
};

static const struct bf16_form *chosen = FORMS + sizeof FORMS / sizeof *FORMS - 1;

/* Take the form of that name from now on, "" for the best that the CPU can run; returns the name of
 * what was taken, or NULL where this library or CPU has none of that name. */
EXPORT const char *mmkv_bf16_form(const char *name)
{
    for (size_t i = 0; i < sizeof FORMS / sizeof *FORMS; i++)
        if ((!*name || !strcmp(name, FORMS[i].name)) && FORMS[i].runs()) {
            chosen = FORMS + i;
            return chosen->name;
        }
    return 0;
}

/* Numbers or pairs from one rounded vector to the next: whole cache lines, and of pairs one line more,
 * or those of all vectors would fall to the same few places of a cache. */
static int64_t rounded_stride(int64_t width)
{
    return chosen->product ? ((width + 1) / 2 + 15) / 16 * 16 + 16 : (width + 15) / 16 * 16;
}

/* Lay out `count` rounded vectors at `base` (NULL: to measure); returns the floats they take. */
int64_t carve_rounded(int64_t width, int64_t count, float *base, struct vectors *x)
{
    if (base)
        x->rounded = (uint32_t *)base;
    return count * rounded_stride(width);
}

/* The nearest number in bfloat16, even where two are as near, as the upper half. */
INLINE uint32_t round_bits(uint32_t bits)
{
    uint32_t near = bits + 0x7fff + (bits >> 16 & 1);
    return ((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc00000 : near) & 0xffff0000;
}

/* Numbers seen as their bits. */
typedef uint32_t __attribute__((may_alias)) word;

/* Round one of `parts` parts of `count` vectors, to pairs of numbers or to floats. */
void round_part(struct vectors x, int64_t width, int64_t count, int64_t part, int64_t parts)
{
    for (int64_t v = count * part / parts; v < count * (part + 1) / parts; v++) {
        const word *restrict from = (const word *)(x.at + v * x.stride);
        word *restrict to = (word *)(x.rounded + v * rounded_stride(width));
        if (!chosen->product) {
#pragma omp simd
            for (int64_t i = 0; i < width; i++)
                to[i] = round_bits(from[i]);
            continue;
        }
#pragma omp simd
        for (int64_t i = 0; i < width / 2; i++)
            to[i] = round_bits(from[2 * i]) >> 16 | round_bits(from[2 * i + 1]);
        if (width % 2)
            to[width / 2] = round_bits(from[width - 1]) >> 16;
    }
}

/* y or y += weight x + bias for rows from .. to-1: the vectors a few at a time, which stay in the
 * nearest cache with the panels. */
void bf16_rows(const struct linear *map, struct vectors x, struct vectors y, int64_t count,
               int64_t from, int64_t to, int add)
{
    int dots = map->rounds && chosen->product, most = dots ? DOT_VECTORS : MOST_VECTORS;
    int64_t groups = (count + most - 1) / most, size = numbers_of_panel(map->in);
    if (map->rounds)
        x.at = (float *)x.rounded, x.stride = rounded_stride(map->in);
    for (int64_t group = 0; group < groups; group++) {
        int64_t first = count * group / groups, after = count * (group + 1) / groups;
        struct vectors in = {.at = x.at + first * x.stride, .stride = x.stride};
        in.rounded = (uint32_t *)in.at;
        /* one group alone waits for memory; of several the first computes, and panels come meanwhile */
        int64_t ahead = groups == 1 ? AHEAD : group == 0 ? size : 0;
        for (int64_t panel = from / BF16_PANEL; panel * BF16_PANEL < to; panel++) {
            float made[DOT_VECTORS * BF16_PANEL];
            int64_t start = panel * BF16_PANEL, end = start + BF16_PANEL;
            int64_t low = from > start ? from : start, high = to < end ? to : end;
            if (dots)
                chosen->product(map->bf16 + panel * size, map->in, in, after - first, ahead, made);
            else
                product(map->bf16 + panel * size, map->in, in, after - first, ahead, made);
            for (int64_t v = first; v < after; v++)
                put_rows(map, made + (v - first) * BF16_PANEL + (low - start), low, high, add,
                         y.at + v * y.stride);
        }
    }
}

void bf16_row(const struct linear *map, int64_t row, float *to)
{
    const uint16_t *panel = map->bf16 + row / BF16_PANEL * numbers_of_panel(map->in);
    for (int64_t i = 0; i < map->in; i++) {
        uint32_t bits = (uint32_t)panel[(i / 2 * BF16_PANEL + row % BF16_PANEL) * 2 + i % 2] << 16;
        memcpy(to + i, &bits, sizeof bits);
    }
}

#define PACKED 16 /* pairs of columns in a cache line */

/* `count` pairs of columns of one row to their places in a panel. */
INLINE void pack_pairs(const uint16_t *from, int64_t count, uint16_t *to)
{
    for (int64_t pair = 0; pair < count; pair++)
        memcpy(to + pair * 2 * BF16_PANEL, from + 2 * pair, 2 * sizeof *to);
}

/* Lay out weights [out, in] in panels, as Bf16Matrix.of does. */
EXPORT void mmkv_pack(const uint16_t *weights, int64_t out, int64_t in, uint16_t *panels,
                      int64_t threads)
{
    int64_t count = (out + BF16_PANEL - 1) / BF16_PANEL, size = numbers_of_panel(in);
#pragma omp parallel for num_threads((int)threads) if (threads > 1)
    for (int64_t panel = 0; panel < count; panel++) {
        uint16_t *to = panels + panel * size;
        int64_t first = panel * BF16_PANEL, rows = out - first < BF16_PANEL ? out - first : BF16_PANEL;
        if (rows < BF16_PANEL || in % 2)
            memset(to, 0, sizeof *to * (size_t)size);
        /* a cache line of each row at a time */
        int64_t whole = in - in % (2 * PACKED);
        for (int64_t at = 0; at < whole; at += 2 * PACKED)
            for (int64_t row = 0; row < rows; row++)
                pack_pairs(weights + (first + row) * in + at, PACKED, to + (at / 2 * BF16_PANEL + row) * 2);
        for (int64_t row = 0; row < rows; row++) {
            const uint16_t *from = weights + (first + row) * in;
            pack_pairs(from + whole, (in - whole) / 2, to + (whole / 2 * BF16_PANEL + row) * 2);
            if (in % 2)
                to[(in / 2 * BF16_PANEL + row) * 2] = from[in - 1];
        }
    }
}
