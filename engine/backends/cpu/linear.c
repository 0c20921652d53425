/* Matrix times one vector per batch slot or token, and RMSNorm.
 *
 * Rows and vectors go in tiles, so that each number that is read serves several products. Every
 * product is summed as if it were alone, in the same order in any tile: results do not depend, not
 * in one bit, on the number of threads or on how many vectors there are. */
#include <math.h>
#include <string.h>

#include "native.h"
#include "vectors.h"

#define PRODUCT_BYTES (256 * 1024) /* of weights in a chunk of mmkv_product: they stay in the second cache */

static inline void dot4(const float *weight, int64_t width, const float *restrict x, float *sum)
{
    const float *a = weight, *b = a + width, *c = b + width, *d = c + width;
    float p = 0, q = 0, r = 0, s = 0;
#pragma omp simd reduction(+ : p, q, r, s)
    for (int64_t i = 0; i < width; i++) {
        p += a[i] * x[i];
        q += b[i] * x[i];
        r += c[i] * x[i];
        s += d[i] * x[i];
    }
    sum[0] = p, sum[1] = q, sum[2] = r, sum[3] = s;
}

static inline float dot(const float *a, int64_t width, const float *restrict x)
{
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < width; i++)
        sum += a[i] * x[i];
    return sum;
}

static inline void dots(const float *weight, int64_t rows, int64_t width, const float *x, float *y)
{
    int64_t row = 0;
    for (; row + 4 <= rows; row += 4)
        dot4(weight + row * width, width, x, y + row);
    for (; row < rows; row++)
        y[row] = dot(weight + row * width, width, x);
}

/* y[rows] = weight[rows, width] x. The usual head sizes are unrolled by the compiler. */
void dot_rows(const float *weight, int64_t rows, int64_t width, const float *x, float *y)
{
    switch (width) {
    case 32: dots(weight, rows, 32, x, y); break;
    case 64: dots(weight, rows, 64, x, y); break;
    case 128: dots(weight, rows, 128, x, y); break;
    default: dots(weight, rows, width, x, y);
    }
}

/* A tile of sums and what it reads fill the registers. */
#if defined(__AVX512F__) || defined(__aarch64__)
#define TILE_SLOTS 6
#else
#define TILE_SLOTS 3
#endif

/* The last `left` < LANES numbers of a row, then zeros. */
INLINE lanes load_part(const float *from, int64_t left)
{
    float full[LANES] = {0};
    memcpy(full, from, sizeof *full * (size_t)left);
    return load(full);
}

/* `rows` rows times `slots` vectors. Each product has a vector of sums of its own, so a result does
 * not depend on the tile that it is computed in. */
INLINE void tile(const struct linear *map, struct vectors x, struct vectors y, int64_t row, int add,
                 int rows, int slots)
{
    lanes sum[2 * ROWS_TOGETHER][TILE_SLOTS], input[TILE_SLOTS];
    UNROLLED for (int r = 0; r < rows; r++)
        UNROLLED for (int s = 0; s < slots; s++)
            sum[r][s] = (lanes){0};
    const float *from = map->weight + row * map->in;
    int64_t at = 0, width = map->in, left = width % LANES;
    for (; at < width - left; at += LANES) {
        for (int s = 0; s < slots; s++)
            input[s] = load(x.at + s * x.stride + at);
        for (int r = 0; r < rows; r++) {
            /* the rows that come next: each is too short for the CPU to foresee */
            __builtin_prefetch(from + (rows + r) * width + at);
            lanes weight = load(from + r * width + at);
            for (int s = 0; s < slots; s++)
                sum[r][s] += weight * input[s];
        }
    }
    for (int s = 0; left && s < slots; s++)
        input[s] = load_part(x.at + s * x.stride + at, left);
    for (int r = 0; left && r < rows; r++) {
        lanes weight = load_part(from + r * width + at, left);
        for (int s = 0; s < slots; s++)
            sum[r][s] += weight * input[s];
    }
    for (int s = 0; s < slots; s++)
        for (int r = 0; r < rows; r++) {
            float *out = y.at + s * y.stride + row + r;
            *out = (add ? *out : 0.0f) + (total(sum[r][s]) + (map->bias ? map->bias[row + r] : 0.0f));
        }
}

/* Rows from .. to-1 for up to TILE_SLOTS vectors. One vector alone takes twice the rows at a time:
 * its sums would otherwise wait for each other. */
INLINE void tiles(const struct linear *map, struct vectors x, struct vectors y, int64_t from,
                  int64_t to, int add, int slots)
{
    int64_t row = from;
    for (; slots == 1 && row + 2 * ROWS_TOGETHER <= to; row += 2 * ROWS_TOGETHER)
        tile(map, x, y, row, add, 2 * ROWS_TOGETHER, slots);
    for (; row + ROWS_TOGETHER <= to; row += ROWS_TOGETHER)
        tile(map, x, y, row, add, ROWS_TOGETHER, slots);
    for (; row < to; row++)
        tile(map, x, y, row, add, 1, slots);
}

static void few(const struct linear *map, struct vectors x, struct vectors y, int64_t from,
                int64_t to, int add, int64_t slots)
{
    switch (slots) {
    case 1: tiles(map, x, y, from, to, add, 1); break;
    case 2: tiles(map, x, y, from, to, add, 2); break;
    case 3: tiles(map, x, y, from, to, add, 3); break;
#if TILE_SLOTS > 3
    case 4: tiles(map, x, y, from, to, add, 4); break;
    case 5: tiles(map, x, y, from, to, add, 5); break;
    case 6: tiles(map, x, y, from, to, add, 6); break;
#endif
    }
}

INLINE void put(const float *restrict sums, const float *restrict bias, int64_t count, int add, float *restrict y)
{
#pragma omp simd
    for (int64_t row = 0; row < count; row++)
        y[row] = (add ? y[row] : 0.0f) + (sums[row] + (bias ? bias[row] : 0.0f));
}

/* Write the sums of rows from .. to-1 (sums[0]: of row `from`), with their bias, to `y`, or add them. */
void put_rows(const struct linear *map, const float *sums, int64_t from, int64_t to, int add, float *y)
{
    const float *bias = map->bias ? map->bias + from : 0;
    if (to - from == INT8_PANEL) /* the usual: without a loop */
        put(sums, bias, INT8_PANEL, add, y + from);
    else
        put(sums, bias, to - from, add, y + from);
}

/* y or y += weight x + bias for rows from .. to-1: the vectors a few at a time, which stay in the
 * nearest cache with the rows. */
static void map_rows(const struct linear *map, struct vectors x, struct vectors y,
                     int64_t batch_slots, int64_t from, int64_t to, int add)
{
    int64_t groups = (batch_slots + TILE_SLOTS - 1) / TILE_SLOTS;
    if (map->codes) {
        int8_rows(map, x.codes, y, batch_slots, from, to, add);
        return;
    }
    if (map->bf16) {
        bf16_rows(map, x, y, batch_slots, from, to, add);
        return;
    }
    for (int64_t group = 0; group < groups; group++) {
        int64_t first = batch_slots * group / groups, after = batch_slots * (group + 1) / groups;
        struct vectors in = {.at = x.at + first * x.stride, .stride = x.stride};
        struct vectors out = {.at = y.at + first * y.stride, .stride = y.stride};
        few(map, in, out, from, to, add, after - first);
    }
}

void linear_rows(const struct linear *map, struct vectors x, struct vectors y, int64_t batch_slots,
                 int64_t from, int64_t to)
{
    map_rows(map, x, y, batch_slots, from, to, 0);
}

void linear_add_rows(const struct linear *map, struct vectors x, struct vectors y, int64_t batch_slots,
                     int64_t from, int64_t to)
{
    map_rows(map, x, y, batch_slots, from, to, 1);
}

/* Lay out at `base` (NULL: to measure) what `map` reads of `count` vectors, where it does not read them
 * as they are; returns the floats that this takes. */
int64_t carve_states(const struct linear *map, int64_t count, float *base, struct vectors *x)
{
    if (map->codes)
        return carve_codes(map->in, count, base, base ? &x->codes : 0);
    return map->rounds ? carve_rounded(map->in, count, base, x) : 0;
}

/* Make one of `parts` parts of it. */
void states_part(const struct linear *map, struct vectors x, int64_t count, int64_t part, int64_t parts)
{
    if (map->codes)
        code_part(x, map->bits, map->in, count, part, parts, x.codes);
    else if (map->rounds)
        round_part(x, map->in, count, part, parts);
}

/* Floats of scratch that mmkv_product needs. */
EXPORT int64_t mmkv_product_scratch(const struct linear *map, int64_t tokens)
{
    return carve_states(map, tokens, 0, 0);
}

/* y [tokens, out] = weight x [tokens, in] + bias. */
EXPORT void mmkv_product(const struct linear *map, float *x, float *y, int64_t tokens,
                         int64_t threads, float *scratch)
{
    int64_t tile = rows_together(map);
    int64_t each = (map->out / threads + tile - 1) / tile * tile, bytes = map->codes ? 1 : map->bf16 ? 2 : 4;
    int64_t rows = PRODUCT_BYTES / bytes / map->in / tile * tile;
    rows = rows < each ? rows : each; /* of a thread */
    rows = rows > tile ? rows : tile;
    int64_t chunks = (map->out + rows - 1) / rows;
    struct vectors in = {.at = x, .stride = map->in}, out = {.at = y, .stride = map->out};
    int64_t parts = carve_states(map, tokens, scratch, &in) > 0 ? threads : 0;
#pragma omp parallel for num_threads((int)threads) schedule(static, 1) if (threads > 1)
    for (int64_t part = 0; part < parts; part++)
        states_part(map, in, tokens, part, parts);
#pragma omp parallel for num_threads((int)threads) schedule(dynamic) if (threads > 1)
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
        int64_t to = (chunk + 1) * rows;
        map_rows(map, in, out, tokens, chunk * rows, to < map->out ? to : map->out, 0);
    }
}

void copy_row(const struct linear *map, int64_t row, float *to)
{
    if (map->codes) {
        int8_row(map, row, to);
        return;
    }
    if (map->bf16) {
        bf16_row(map, row, to);
        return;
    }
    memcpy(to, map->weight + row * map->in, sizeof *to * (size_t)map->in);
}

void rms_norm(const float *x, const float *gain, int64_t size, float eps, float *y)
{
    float scale = 1.0f / sqrtf(dot(x, size, x) / (float)size + eps);
#pragma omp simd
    for (int64_t i = 0; i < size; i++)
        y[i] = x[i] * scale * gain[i];
}
