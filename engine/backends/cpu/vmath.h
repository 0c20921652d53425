/* Elementary functions without branches, so that loops over them become vector code. */
#ifndef MMKV_VMATH_H
#define MMKV_VMATH_H

#include <stdint.h>
#include <string.h>

/* exp(r) for |r| <= ln 2 / 2, of a float or of a vector of them. */
#define HORNER(p, r, term) ((p) * (r) + (term))
#define EXP_NEAR_0(r)                                                                  \
    HORNER(HORNER(HORNER(HORNER(HORNER(HORNER(HORNER(1.0f / 5040, r, 1.0f / 720), \
    r, 1.0f / 120), r, 1.0f / 24), r, 1.0f / 6), r, 0.5f), r, 1.0f), r, 1.0f)

/* exp(x) for x clamped to [-87.3, 88], to about one unit in the last place. */
static inline float exp_float(float x)
{
    x = x < -87.3f ? -87.3f : x > 88.0f ? 88.0f : x;
    /* Adding 1.5 * 2^23 rounds to a whole number and leaves it in the low bits. */
    float shifted = x * 1.44269504f + 12582912.0f;
    float n = shifted - 12582912.0f;
    float r = (x - n * 0.693359375f) + n * 2.12194440e-4f; /* ln 2 in two parts */
    uint32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 127u) << 23;
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    return EXP_NEAR_0(r) * scale;
}

#endif
