/* Products with weights in 8 or 4 bits, as engine/model/rounded.py defines them: the states are
 * rounded to 8 bits in blocks, and whole numbers are multiplied and summed; each block's sum is then
 * scaled.
 *
 * Every lane of a vector is a row of the matrix, so nothing is summed across lanes: a product does not
 * depend, not in one bit, on the tile that it is computed in, on threads or on other vectors. */
#include <math.h>
#include <string.h>

#include "int8.h"

static const struct int8_form *chosen;

static int64_t tiles_of(int64_t count, int64_t bits)
{
    int64_t each = vectors_of(chosen, bits);
    return (count + each - 1) / each;
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

/* The bits of the greatest size in a block: ordered like the numbers, and above them what is none. */
INLINE int32_t most_of(const float *restrict x)
{
    lanes_int most = {0};
    int32_t each[LANES], greatest = 0;
    for (int i = 0; i < CODE_BLOCK; i += LANES) {
        lanes_int size = (lanes_int)load(x + i) & 0x7fffffff;
        most = (lanes_int)either(size > most, (lanes)size, (lanes)most);
    }
    memcpy(each, &most, sizeof each);
#pragma omp simd reduction(max : greatest)
    for (int i = 0; i < LANES; i++)
        greatest = each[i] > greatest ? each[i] : greatest;
    return greatest;
}

#define RUN 16 /* blocks of a vector or row that are rounded together */

/* Round `count` blocks of a vector, which are blocks of a tile of `each` vectors: a block's codes go to
 * `codes` four by four, `stride` bytes apart. shift: NULL where it is not read. */
INLINE void code_run(const float *restrict x, int64_t count, int64_t each, int8_t *restrict codes,
                     int64_t stride, float *restrict scale, int32_t *restrict shift)
{
    int32_t most[RUN];
    float step[RUN], inverse[RUN];
    for (int64_t b = 0; b < count; b++)
        most[b] = most_of(x + b * CODE_BLOCK);
#pragma omp simd
    for (int64_t b = 0; b < count; b++) {
        float greatest = with_bits((uint32_t)most[b]);
        step[b] = most[b] < 0x7f800000 ? greatest / 127.0f : NAN;
        inverse[b] = greatest >= LEAST_CODED && most[b] < 0x7f800000 ? 127.0f / greatest : 0.0f;
    }
    for (int64_t b = 0; b < count; b++, codes += each * CODE_BLOCK) {
        int8_t made[CODE_BLOCK];
        lanes sum = {0}; /* of whole numbers: exact */
        UNROLLED for (int i = 0; i < CODE_BLOCK; i += LANES) {
            lanes_int code = nearest(load(x + b * CODE_BLOCK + i) * inverse[b]);
            code = most[b] < 0x7f800000 ? code : (lanes_int){0};
            lanes_int8 bytes = __builtin_convertvector(code, lanes_int8);
            memcpy((stride == 4 ? codes : made) + i, &bytes, sizeof bytes);
            sum += __builtin_convertvector(code, lanes);
        }
        if (stride != 4)
            UNROLLED for (int group = 0; group < GROUPS; group++)
                memcpy(codes + group * stride, made + 4 * group, 4);
        scale[b * each] = step[b];
        if (shift)
            shift[b * each] = -128 * (int32_t)total(sum);
    }
}

/* Round one of `parts` parts of `count` vectors of `width` numbers; the last block is filled with
 * zeros. */
void code_part(struct vectors x, int64_t bits, int64_t width, int64_t count, int64_t part,
               int64_t parts, struct codes to)
{
    int64_t tiles = tiles_of(count, bits), full = width / CODE_BLOCK;
    for (int64_t index = tiles * part / parts; index < tiles * (part + 1) / parts; index++) {
        struct tile tile = tile_of(count, tiles, index);
        struct codes mine = codes_of(to, tile);
        int beside = tile.count > chosen->vectors;
        int64_t next = beside ? CODE_BLOCK : 4, stride = beside ? 4 : 4 * tile.count; /* bytes further on */
        for (int64_t v = 0; v < tile.count; v++) {
            const float *from = x.at + (tile.first + v) * x.stride;
            for (int64_t block = 0; block < to.blocks;) {
                int64_t run = full - block < RUN ? full - block : RUN, at = block * tile.count;
                float rest[CODE_BLOCK] = {0};
                const float *some = from + block * CODE_BLOCK;
                if (!run) {
                    memcpy(rest, some, sizeof *rest * (size_t)(width % CODE_BLOCK));
                    some = rest, run = 1;
                }
                code_run(some, run, tile.count, mine.at + at * CODE_BLOCK + next * v, stride,
                         mine.scale + at + v, beside ? 0 : mine.shift + at + v);
                block += run;
            }
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

/* Ask for part `part` of `parts` of a panel. */
INLINE void fetch_part(const struct linear *map, int64_t panel, int64_t blocks, int64_t part, int64_t parts)
{
    int64_t size = blocks * block_bytes(map->bits);
    const int8_t *codes = map->codes + panel * size;
    for (int64_t at = size * part / parts; at < size * (part + 1) / parts; at += 64)
        __builtin_prefetch(codes + at, 0, 2);
}

#define MANY_TILES 4 /* beside which there is time to read the rows that come next */

/* y or y += weight x + bias for rows from .. to-1: the vectors a few at a time, which stay in the
 * nearest cache with the panels. */
void int8_rows(const struct linear *map, struct codes x, struct vectors y, int64_t count,
               int64_t from, int64_t to, int add)
{
    int64_t tiles = tiles_of(count, map->bits), started = 0, next = (to - from + INT8_PANEL - 1) / INT8_PANEL;
    for (int64_t index = 0; index < tiles; index++) {
        struct tile tile = tile_of(count, tiles, index);
        struct codes in = codes_of(x, tile);
        if (tile.count > chosen->vectors && tile.count != started)
            chosen->start(started = tile.count);
        for (int64_t panel = from / INT8_PANEL; panel * INT8_PANEL < to; panel++) {
            float made[MOST_VECTORS * INT8_PANEL];
            int64_t start = panel * INT8_PANEL, at = panel * x.blocks * INT8_PANEL;
            int64_t low = from > start ? from : start, high = to < start + INT8_PANEL ? to : start + INT8_PANEL;
            if (tiles >= MANY_TILES && (panel + next) * INT8_PANEL < map->out)
                fetch_part(map, panel + next, x.blocks, index, tiles);
            chosen->product(map->codes + panel * x.blocks * block_bytes(map->bits), map->scales + at,
                            map->bits, in, tile.count, made);
            for (int64_t v = 0; v < tile.count; v++)
                put_rows(map, made + v * INT8_PANEL + (low - start), low, high, add,
                         y.at + (tile.first + v) * y.stride);
        }
    }
    if (started)
        chosen->stop();
}

void int8_row(const struct linear *map, int64_t row, float *to)
{
    int64_t blocks = (map->in + CODE_BLOCK - 1) / CODE_BLOCK, line = row % INT8_PANEL;
    for (int64_t i = 0; i < map->in; i++) {
        int64_t block = row / INT8_PANEL * blocks + i / CODE_BLOCK, group = i % CODE_BLOCK / 4;
        const int8_t *at = map->codes + block * block_bytes(map->bits) + 4 * line + i % 4;
        int32_t code = map->bits == 8 ? at[group * 4 * INT8_PANEL]
                                      : ((uint8_t)at[group / 2 * 4 * INT8_PANEL] >> 4 * (group % 2) & 15) - 8;
        to[i] = (float)code * from_bf16(map->scales[block * INT8_PANEL + line]);
    }
}

/* A block's codes of a row go to its panel four by four: those of all rows alternate. */
INLINE void put_codes(const int8_t *from, int groups, int8_t *to)
{
#pragma GCC unroll 8
    for (int group = 0; group < groups; group++)
        memcpy(to + group * 4 * INT8_PANEL, from + 4 * group, 4);
}

/* Round blocks to 8 bits, by the smallest step that is not below what the greatest number of each asks
 * for. Returns the squares of what changed. */
INLINE lanes round_8(const float (*x)[CODE_BLOCK], int64_t count, int8_t *codes, uint16_t *scales)
{
    float step[RUN], divisor[RUN];
    int32_t most[RUN];
    lanes wrong = {0};
    for (int64_t b = 0; b < count; b++)
        most[b] = most_of(x[b]);
#pragma omp simd
    for (int64_t b = 0; b < count; b++) {
        uint32_t bits = (bits_of(with_bits((uint32_t)most[b]) / 127.0f) + 0xffff) & 0xffff0000;
        step[b] = with_bits(most[b] < 0x7f800000 ? bits : 0x7fc00000 /* not a number */);
        divisor[b] = step[b] == 0 ? 1.0f : step[b];
    }
    for (int64_t b = 0; b < count; b++) {
        int32_t bits[CODE_BLOCK];
        int8_t made[CODE_BLOCK];
        for (int i = 0; i < CODE_BLOCK; i += LANES) {
            /* as in whole(): a quotient can't become part of a fused sum, and its code is the lowest byte */
            lanes code = load(x[b] + i) / divisor[b] + 12582912.0f;
            memcpy(bits + i, &code, sizeof code);
            lanes off = load(x[b] + i) - (code - 12582912.0f) * step[b];
            wrong += off * off;
        }
#pragma omp simd
        for (int i = 0; i < CODE_BLOCK; i++)
            made[i] = (int8_t)(most[b] < 0x7f800000 ? bits[i] : 0);
        put_codes(made, GROUPS, codes + b * block_bytes(8));
        scales[b * INT8_PANEL] = (uint16_t)(bits_of(step[b]) >> 16);
    }
    return wrong;
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

#define TRIED 16 /* steps that a block in 4 bits is rounded by, as DIVISORS of rounded.py has it */

INLINE int32_t code_4(float x)
{
    int32_t code = (int32_t)whole(x);
    code = code > -8 ? code : -8;
    return code < 7 ? code : 7;
}

/* Round a block to 4 bits, as Int4Matrix.rounded does. Returns the squares of what changed. */
static float round_4(const float *restrict x, int8_t *codes, uint16_t *scale)
{
    float low = x[0], high = x[0], wrong[TRIED] = {0}, step[TRIED], inverse[TRIED], all = 0;
    int8_t made[CODE_BLOCK / 2];
    *scale = 0x7fc0; /* not a number */
    if (most_of(x) >= 0x7f800000) {
        memset(made, 0x88, sizeof made);
        put_codes(made, GROUPS / 2, codes);
        return NAN;
    }
#pragma omp simd reduction(min : low) reduction(max : high)
    for (int i = 0; i < CODE_BLOCK; i++) {
        low = x[i] < low ? x[i] : low;
        high = x[i] > high ? x[i] : high;
    }
    float greatest = high >= -low ? high : low;
#pragma omp simd
    for (int k = 0; k < TRIED; k++) {
        uint32_t bits = bits_of(greatest / -(6.5f + 0.1875f * (float)k));
        step[k] = with_bits((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000); /* a bfloat16 */
        inverse[k] = fabsf(step[k]) >= LEAST_CODED ? 1.0f / step[k] : 0.0f;
    }
#pragma omp simd
    for (int k = 0; k < TRIED; k++)
        for (int i = 0; i < CODE_BLOCK; i++) {
            float off = x[i] - (float)code_4(x[i] * inverse[k]) * step[k];
            off = with_bits(bits_of(off) & 0xfffff000); /* its square is exact, fused or not */
            wrong[k] += off * off;
        }
    int best = 0;
    for (int k = 1; k < TRIED; k++)
        best = wrong[k] < wrong[best] ? k : best;
    int32_t code[CODE_BLOCK];
#pragma omp simd reduction(+ : all)
    for (int i = 0; i < CODE_BLOCK; i++) {
        code[i] = code_4(x[i] * inverse[best]);
        float off = x[i] - (float)code[i] * step[best];
        all += off * off;
    }
    for (int i = 0; i < CODE_BLOCK / 2; i++) { /* the codes of two groups share bytes */
        const int32_t *both = code + i / 4 * 8 + i % 4;
        made[i] = (int8_t)((both[0] + 8) | (both[4] + 8) << 4);
    }
    put_codes(made, GROUPS / 2, codes);
    *scale = (uint16_t)(bits_of(step[best]) >> 16);
    return all;
}

/* x = `count` numbers of a row from number `from` on, and zeros. */
INLINE void block_at(const void *weights, int64_t half, int64_t from, int64_t count, float *x)
{
    const uint16_t *short_form = (const uint16_t *)weights + from;
    const float *wide = (const float *)weights + from;
    if (count == CODE_BLOCK)
        for (int i = 0; i < CODE_BLOCK; i += LANES) {
            lanes made = half ? bf16_at(short_form + i) : load(wide + i);
            memcpy(x + i, &made, sizeof made);
        }
    else
        for (int64_t i = 0; i < CODE_BLOCK; i++)
            x[i] = i >= count ? 0 : half ? from_bf16(short_form[i]) : wide[i];
}

/* Round `count` blocks of a row from number `from` on, of which `left` numbers are there, and add the
 * squares of what changes and of the weights to `sums`. */
INLINE void round_run(const void *weights, int64_t half, int64_t from, int64_t in, int64_t left, int64_t count,
                      int64_t bits, int8_t *codes, uint16_t *scales, double *sums)
{
    float x[RUN][CODE_BLOCK], wrong = 0;
    lanes squared = {0};
    for (int64_t b = 0; b < count; b++, from += CODE_BLOCK, left -= CODE_BLOCK) {
        /* of the next row: a run is too short for the CPU to see it coming */
        __builtin_prefetch((const char *)weights + (from + in) * (half ? 2 : 4));
        block_at(weights, half, from, left < CODE_BLOCK ? left : CODE_BLOCK, x[b]);
        for (int i = 0; i < CODE_BLOCK; i += LANES)
            squared += load(x[b] + i) * load(x[b] + i);
    }
    if (bits == 8)
        wrong = total(round_8(x, count, codes, scales));
    else
        for (int64_t b = 0; b < count; b++)
            wrong += round_4(x[b], codes + b * block_bytes(4), scales + b * INT8_PANEL);
    sums[0] += wrong;
    sums[1] += total(squared);
}

/* Round weights [out, in], float32 or (`half`) bfloat16, to `bits`, 8 or 4, as IntegerMatrix.of does.
 * `sums` [panels, 2] gets, panel by panel, the squares of what changed and of the weights. */
EXPORT void mmkv_round(const void *weights, int64_t half, int64_t out, int64_t in, int64_t bits,
                       int8_t *codes, uint16_t *scales, double *sums, int64_t threads)
{
    int64_t panels = (out + INT8_PANEL - 1) / INT8_PANEL, blocks = (in + CODE_BLOCK - 1) / CODE_BLOCK;
#pragma omp parallel for num_threads((int)threads) if (threads > 1)
    for (int64_t panel = 0; panel < panels; panel++) {
        sums[2 * panel] = sums[2 * panel + 1] = 0;
        for (int64_t run = 0; run < blocks; run += RUN)
            for (int64_t lane = 0; lane < INT8_PANEL; lane++) {
                int64_t row = panel * INT8_PANEL + lane, at = panel * blocks + run, first = run * CODE_BLOCK;
                round_run(weights, half, row * in + first, in, row < out ? in - first : 0,
                          blocks - run < RUN ? blocks - run : RUN, bits, codes + at * block_bytes(bits) + 4 * lane,
                          scales + at * INT8_PANEL + lane, sums + 2 * panel);
            }
    }
}
