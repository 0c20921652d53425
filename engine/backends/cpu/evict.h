/* What the two searches for victims share. */
#ifndef MMKV_EVICT_H
#define MMKV_EVICT_H

#include <math.h>

#include "native.h"

#define MARGIN 1e-6f /* room for the rounding of scores and of what stands for them, relative */
#define BLOCK 64     /* entries looked at together */

struct victim {
    uint64_t rank;
    int64_t index;
    float score, log_beta;
    int32_t position, row;
};

static inline int is_protected(const struct eviction *what, int32_t position)
{
    return position < what->protect_first ||
           (what->protect_recent && position >= what->seen - what->protect_recent);
}

/* What an entry's position is taken from to get its age. */
static inline int32_t now_of(const struct eviction *what)
{
    return (int32_t)(what->seen + what->age_shift);
}

/* Where the victims of an order are listed, by ascending index. */
static inline int64_t *victims_of(const struct eviction *what)
{
    return (int64_t *)((struct victim *)what->scratch + what->most);
}

/* A number per row, behind that. */
static inline int64_t *taken_of(const struct eviction *what)
{
    return victims_of(what) + what->most;
}

/* From one step to the next the last victim's score moves little. */
static inline void guess_after(struct eviction *what, float last)
{
    what->guess = isfinite(last) ? last + what->margin * (1 + fabs(last)) : INFINITY;
}

/* fast_select.c */
int fast_select(const struct cache *cache, struct eviction *what);

#endif
