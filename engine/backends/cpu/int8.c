/* Products with weights in 8 bits, as engine/model/int8.py defines them: the states are rounded to 8
 * bits in blocks, too, and whole numbers are multiplied and summed; each block's sum is then scaled.
 *
 * Every lane of a vector is a row of the matrix, so nothing is summed across lanes: a product does not
 * depend, not in one bit, on the tile that it is computed in, on threads or on other vectors. */
#include <math.h>
#include <string.h>

#include "int8.h"

static const struct int8_form *chosen;

static int64_t tiles_of(int64_t count)
{
    return (count + chosen->vectors - 1) / chosen->vectors;
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

/* Lay out the codes of `count` vectors of `width` numbers at `base`; returns the floats they take. */
int64_t carve_codes(int64_t width, int64_t count, float *base, struct codes *to)
{
    int64_t blocks = (width + CODE_BLOCK - 1) / CODE_BLOCK, each = count * blocks;
    int64_t codes = each * CODE_BLOCK / (int64_t)sizeof(float), line = (each + 15) / 16 * 16;
    if (base)
        *to = (struct codes){(int8_t *)base, base + codes, (int32_t *)(base + codes + line), blocks};
    return codes + 2 * line;
}

/* Take the form of that name from now on, "" for the best that the CPU can run; returns the name of
 * what was taken, or NULL where this library or CPU has none of that name. */
EXPORT const char *mmkv_int8_form(const char *name)
{
    const struct int8_form *found = int8_form_of(name);
    if (!found)
        return 0;
    chosen = found;
    return chosen->name;
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
