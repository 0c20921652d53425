/* Eviction: score every entry at the present step, find the lowest exactly, drop them.
 *
 * An entry's rank is one integer: its score, mapped so that integers order as floats do, above
 * its position. Entries are numbered row by row, so equal ranks fall to the lower number: ties
 * go by position, then layer, then head, as everywhere in mmkv. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "native.h"
#include "vmath.h"

#define LANES 16 /* arrays are padded to this, so that no entry takes a scalar path of its own */

struct victim {
    uint64_t rank;
    int64_t index;
};

static inline uint32_t ordered(float score)
{
    uint32_t bits;
    score += 0.0f; /* -0 and 0 are one score */
    memcpy(&bits, &score, sizeof bits);
    bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return score != score ? UINT32_MAX : bits; /* NaN outranks all, as in torch */
}

static double log1mexp(double x)
{
    return x > -0.6931471805599453 ? log(-expm1(x)) : log1p(-exp(x));
}

/* score[i] becomes the score of an entry: log_beta and position in, both padded. `ahead` is the
 * part of eq. 9 that does not depend on age. */
static void score_retention(const float *log_beta, const int32_t *position, int64_t count,
                            int64_t seen, double lookahead, float *ahead, float *score)
{
    if (lookahead == 1)
        memset(ahead, 0, sizeof(float) * count);
    else if (lookahead == 2)
#pragma omp simd
        for (int64_t i = 0; i < count; i++)
            ahead[i] = log1p_exp(log_beta[i]);
    else
        for (int64_t i = 0; i < count; i++)
            ahead[i] = (float)-log1mexp(log_beta[i]);
    int32_t now = (int32_t)seen;
#pragma omp simd
    for (int64_t i = 0; i < count; i++)
        score[i] = (float)(now - position[i]) * log_beta[i] + ahead[i];
}

static inline int after(struct victim a, struct victim b)
{
    return a.rank > b.rank || (a.rank == b.rank && a.index > b.index);
}

static void sift_down(struct victim *heap, int64_t size, struct victim item)
{
    int64_t at = 0;
    for (int64_t child = 1; child < size; child = 2 * at + 1) {
        if (child + 1 < size && after(heap[child + 1], heap[child]))
            child++;
        if (!after(heap[child], item))
            break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = item;
}

/* The `wanted` lowest ranks of entries first .. last-1 into heap (a max-heap: its top is the best
 * of the victims so far, which nearly every later entry passes with one comparison). */
static void lowest(const uint64_t *rank, int64_t first, int64_t last, int64_t wanted,
                   struct victim *heap)
{
    int64_t size = 0;
    for (int64_t i = first; i < last; i++) {
        struct victim item = {rank[i], i};
        if (size == wanted) {
            if (rank[i] < heap[0].rank) /* an equal rank of a later row stays */
                sift_down(heap, size, item);
            continue;
        }
        int64_t at = size++;
        for (; at && after(item, heap[(at - 1) / 2]); at = (at - 1) / 2)
            heap[at] = heap[(at - 1) / 2];
        heap[at] = item;
    }
}

static int by_index(const void *a, const void *b)
{
    int64_t left = *(const int64_t *)a, right = *(const int64_t *)b;
    return (left > right) - (left < right);
}

/* How many entries have to go. */
static int64_t excess(const struct cache *cache, const struct eviction *what)
{
    if (what->allocation == COMPETE_GLOBAL)
        return what->entries - what->budget;
    int64_t share = what->budget / cache->rows, count = 0;
    for (int64_t row = 0; row < cache->rows; row++)
        count += cache->length[row] > share ? cache->length[row] - share : 0;
    return count;
}

static int64_t padded(int64_t entries)
{
    return (entries + LANES - 1) / LANES * LANES;
}

/* Bytes of scratch that mmkv_evict needs. */
EXPORT int64_t mmkv_evict_scratch(int64_t entries, int64_t victims)
{
    return padded(entries) * (int64_t)(sizeof(uint64_t) + 4 * sizeof(float)) +
           victims * (int64_t)(sizeof(struct victim) + sizeof(int64_t));
}

/* Evict down to the budget. Returns 0, with nothing changed, when there is no room for so many
 * victims or the rows do not hold `entries`. */
EXPORT int64_t mmkv_evict(struct cache *cache, struct eviction *what)
{
    int64_t entries = what->entries, count = padded(entries), size = cache->page_size;
    int64_t wanted = excess(cache, what), held = 0;
    for (int64_t row = 0; row < cache->rows; row++)
        held += cache->length[row];
    if (wanted > what->most || held != entries)
        return 0;
    if (wanted <= 0)
        return 1;
    uint64_t *rank = what->scratch;
    struct victim *heap = (struct victim *)(rank + count);
    int64_t *victims = (int64_t *)(heap + what->most);
    float *log_beta = (float *)(victims + what->most), *ahead = log_beta + count;
    float *score = ahead + count;
    int32_t *position = (int32_t *)(score + count);

    int64_t filled = 0;
    for (int64_t row = 0; row < cache->rows; row++) {
        const int64_t *page = cache->table + row * cache->width;
        for (int64_t at = 0; at < cache->length[row]; at += size) {
            int64_t live = cache->length[row] - at < size ? cache->length[row] - at : size;
            int64_t slot = page[at / size] * size;
            memcpy(log_beta + filled, cache->log_beta + slot, sizeof(float) * live);
            memcpy(position + filled, cache->position + slot, sizeof(int32_t) * live);
            filled += live;
        }
    }
    memset(log_beta + filled, 0, sizeof(float) * (count - filled));
    memset(position + filled, 0, sizeof(int32_t) * (count - filled));

    if (what->scorer == SCORE_RETENTION)
        score_retention(log_beta, position, count, what->seen, what->lookahead, ahead, score);
    else
        for (int64_t i = 0; i < count; i++)
            score[i] = (float)position[i];
    int32_t first = (int32_t)what->protect_first;
    int32_t recent = (int32_t)(what->protect_recent ? what->seen - what->protect_recent : INT32_MAX);
    for (int64_t i = 0; i < count; i++) {
        float kept = position[i] < first || position[i] >= recent ? INFINITY : score[i];
        rank[i] = (uint64_t)ordered(kept) << 32 | (uint32_t)position[i];
    }

    if (what->allocation == COMPETE_GLOBAL) {
        lowest(rank, 0, entries, wanted, heap);
    } else {
        int64_t share = what->budget / cache->rows, start = 0, found = 0;
        for (int64_t row = 0; row < cache->rows; row++) {
            int64_t length = cache->length[row];
            if (length > share) {
                lowest(rank, start, start + length, length - share, heap + found);
                found += length - share;
            }
            start += length;
        }
    }
    for (int64_t i = 0; i < wanted; i++)
        victims[i] = heap[i].index;
    qsort(victims, (size_t)wanted, sizeof *victims, by_index);
    drop_entries(cache, victims, wanted);
    what->dropped += wanted;
    return 1;
}
