/* Elementary functions without branches, so that loops over them become vector code. */
#ifndef MMKV_VMATH_H
#define MMKV_VMATH_H

#include <stdint.h>
#include <string.h>

/* exp(x) for x clamped to [-87.3, 88], to about one unit in the last place. */
static inline float exp_float(float x)
{
    x = x < -87.3f ? -87.3f : x > 88.0f ? 88.0f : x;
    /* Adding 1.5 * 2^23 rounds to a whole number and leaves it in the low bits. */
    float shifted = x * 1.44269504f + 12582912.0f;
    float n = shifted - 12582912.0f;
    float r = (x - n * 0.693359375f) + n * 2.12194440e-4f; /* ln 2 in two parts */
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    uint32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 127u) << 23;
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    return p * scale;
}

/* log(1 + exp(x)) for x <= 0, in double to 2e-16 and rounded once, as the torch code rounds it: the
 * order of two entries must not depend on which of them scored. */
static inline float log1p_exp(float x)
{
    double wide = x < -104.0f ? -104.0 : (double)x;
    double shifted = wide * 1.4426950408889634 + 6755399441055744.0; /* 1.5 * 2^52 */
    double r = wide - (shifted - 6755399441055744.0) * 0.6931471805599453;
    double p = 1.0 / 479001600;
    p = p * r + 1.0 / 39916800;
    p = p * r + 1.0 / 3628800;
    p = p * r + 1.0 / 362880;
    p = p * r + 1.0 / 40320;
    p = p * r + 1.0 / 5040;
    p = p * r + 1.0 / 720;
    p = p * r + 1.0 / 120;
    p = p * r + 1.0 / 24;
    p = p * r + 1.0 / 6;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    uint64_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 1023u) << 52;
    double scale;
    memcpy(&scale, &bits, sizeof scale);
    double y = p * scale;
    /* log1p(y) = 2 artanh(s) with s = y / (2 + y) <= 1/3 */
    double s = y / (2.0 + y), t = s * s;
    double q = 1.0 / 31;
    q = q * t + 1.0 / 29;
    q = q * t + 1.0 / 27;
    q = q * t + 1.0 / 25;
    q = q * t + 1.0 / 23;
    q = q * t + 1.0 / 21;
    q = q * t + 1.0 / 19;
    q = q * t + 1.0 / 17;
    q = q * t + 1.0 / 15;
    q = q * t + 1.0 / 13;
    q = q * t + 1.0 / 11;
    q = q * t + 1.0 / 9;
    q = q * t + 1.0 / 7;
    q = q * t + 1.0 / 5;
    q = q * t + 1.0 / 3;
    q = q * t + 1.0;
    return (float)(2.0 * s * q);
}

#endif
