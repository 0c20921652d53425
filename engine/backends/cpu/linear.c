/* Matrix times one vector per batch slot, and RMSNorm.
 *
 * Rows go four at a time, and callers cut work between threads at multiples of four: every row
 * is then summed in the same order whatever the number of threads. Four rows are read from memory
 * once for all batch slots, and each batch slot is summed as if it were alone. */
#include <math.h>
#include <string.h>

#include "native.h"

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

/* Rows of a matrix as floats; `wide` has room for them. */
static inline const float *rows_from(const struct linear *map, int64_t row, int64_t count,
                                     float *wide)
{
    if (!map->bf16)
        return map->weight + row * map->in;
    const uint16_t *bf16 = map->bf16 + row * map->in;
#pragma omp simd
    for (int64_t i = 0; i < count * map->in; i++) {
        uint32_t bits = (uint32_t)bf16[i] << 16;
        memcpy(wide + i, &bits, sizeof bits);
    }
    return wide;
}

/* y or y += weight x + bias for rows from .. to-1. */
static inline void map_rows(const struct linear *map, struct vectors x, struct vectors y,
                            int64_t batch_slots, int64_t from, int64_t to, int add)
{
    float wide[map->bf16 ? 4 * map->in : 1];
    for (int64_t row = from; row < to; row += 4) {
        int64_t count = to - row < 4 ? to - row : 4;
        const float *weight = rows_from(map, row, count, wide);
        for (int64_t batch_slot = 0; batch_slot < batch_slots; batch_slot++) {
            float sum[4], *out = y.at + batch_slot * y.stride + row;
            dots(weight, count, map->in, x.at + batch_slot * x.stride, sum);
            for (int64_t i = 0; i < count; i++)
                out[i] = (add ? out[i] : 0.0f) + (sum[i] + (map->bias ? map->bias[row + i] : 0.0f));
        }
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

void rms_norm(const float *x, const float *gain, int64_t size, float eps, float *y)
{
    float scale = 1.0f / sqrtf(dot(x, size, x) / (float)size + eps);
#pragma omp simd
    for (int64_t i = 0; i < size; i++)
        y[i] = x[i] * scale * gain[i];
}
