/* What is between products, one token after the other: RMSNorm, RoPE and the gate of the MLP. A token's
 * numbers do not depend, not in one bit, on other tokens or on threads. */
#include "native.h"
#include "vectors.h"

void rotate(float *x, const float *restrict cos, const float *restrict sin, int64_t half)
{
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        float low = x[i], high = x[i + half];
        x[i] = low * cos[i] - high * sin[i];
        x[i + half] = high * cos[i] + low * sin[i];
    }
}

/* to [count] = activation(gate), times `up` where there is one. */
INLINE void activated(const float *gate, const float *up, int64_t count, int is_gelu, float *to)
{
    for (int64_t i = 0; i < count; i += LANES) {
        int64_t some = count - i < LANES ? count - i : LANES;
        lanes x = load_some(gate + i, some, 0), made = is_gelu ? gelu_lanes(x) : silu_lanes(x);
        store_some(up ? made * load_some(up + i, some, 0) : made, some, to + i);
    }
}

void silu(float *x, int64_t from, int64_t to)
{
    activated(x + from, 0, to - from, 0, x + from);
}

void gelu(float *x, int64_t from, int64_t to)
{
    activated(x + from, 0, to - from, 1, x + from);
}

/* y [tokens, size]: the norms of x [tokens, size]. */
EXPORT void mmkv_norm(const float *x, const float *gain, int64_t tokens, int64_t size, double eps,
                      int64_t threads, float *y)
{
#pragma omp parallel for num_threads((int)threads) if (threads > 1)
    for (int64_t token = 0; token < tokens; token++)
        rms_norm(x + token * size, gain, size, (float)eps, y + token * size);
}

/* Norm, if there is a gain [heads, dim], and rotate the heads [tokens, heads, dim], `stride` floats
 * from token to token, where they lie. cos and signed sin [tokens, rotary]: the negative half first. */
EXPORT void mmkv_turn(float *x, int64_t tokens, int64_t stride, int64_t heads, int64_t dim,
                      int64_t rotary, const float *gain, double eps, const float *cos,
                      const float *sin, int64_t threads)
{
#pragma omp parallel for num_threads((int)threads) if (threads > 1)
    for (int64_t token = 0; token < tokens; token++)
        for (int64_t head = 0; head < heads; head++) {
            float *at = x + token * stride + head * dim;
            if (gain)
                rms_norm(at, gain + head * dim, dim, (float)eps, at);
            rotate(at, cos + token * rotary, sin + token * rotary + rotary / 2, rotary / 2);
        }
}

/* y [tokens, inner] = activation(gate) * up of x [tokens, 2 inner], the gate first; SiLU or GELU. */
EXPORT void mmkv_gated(const float *x, int64_t tokens, int64_t inner, int64_t is_gelu,
                       int64_t threads, float *y)
{
#pragma omp parallel for num_threads((int)threads) if (threads > 1)
    for (int64_t token = 0; token < tokens; token++) {
        const float *gate = x + token * 2 * inner, *up = gate + inner;
        float *to = y + token * inner;
        if (is_gelu)
            activated(gate, up, inner, 1, to);
        else
            activated(gate, up, inner, 0, to);
    }
}
