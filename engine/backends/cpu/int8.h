/* What products with weights as whole numbers (int8.c) and their forms (int8_forms.c) share. */
#ifndef MMKV_INT8_H
#define MMKV_INT8_H

#include <stdint.h>
#include <string.h>

#include "native.h"
#include "vectors.h"

#define GROUPS 8        /* of a block: four columns of each row of a panel lie together */
#define MOST_VECTORS 16 /* in a tile, of any form */

/* Bytes of the codes of a panel's block. */
INLINE int64_t block_bytes(int64_t bits)
{
    return CODE_BLOCK * INT8_PANEL * bits / 8;
}

/* One panel, in codes of `bits`, times `count` vectors. The sums of INT8_PANEL rows go to `made`, vector
 * by vector. */
typedef void panel_product(const int8_t *codes, const uint16_t *scales, int64_t bits, struct codes x,
                           int64_t count, float *made);

/* How a panel is multiplied: with an extension of the instruction set, or in plain C. */
struct int8_form {
    const char *name;
    int (*runs)(void);
    panel_product *product;
    int64_t vectors; /* in a tile */
    int64_t wide;    /* in a tile of codes of 8 bits, where that is more, or 0 */
    void (*start)(int64_t count); /* before a wide tile of so many vectors is multiplied by panels */
    void (*stop)(void);           /* and after it */
};

/* The vectors of a tile. In one of more than `form->vectors` each vector has its codes of a block side by
 * side, else four of each vector in turn. */
INLINE int64_t vectors_of(const struct int8_form *form, int64_t bits)
{
    return form->wide && bits == 8 ? form->wide : form->vectors;
}

/* The form of that name, or for "" the best that the CPU can run; NULL where there is none. */
const struct int8_form *int8_form_of(const char *name);

INLINE uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

INLINE float with_bits(uint32_t bits)
{
    float made;
    memcpy(&made, &bits, sizeof made);
    return made;
}

INLINE float from_bf16(uint16_t half)
{
    return with_bits((uint32_t)half << 16);
}

#endif
