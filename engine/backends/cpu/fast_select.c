/* The victims of a decode step, where that is easy: nearly always.
 *
 * The scores of few entries lie below a guess near the last victim's of the step before. They are
 * computed in single precision, to within MARGIN; those of entries that have to go and of those
 * that stay rarely lie so close that it matters. Where they do, or the guess was too low, or so high
 * that there is no room for all below it, evict.c has to search. */
#include <string.h>

#include "evict.h"
#include "vmath.h"

#define LEAST_MARGIN 1e-4
#define MOST_MARGIN 1.0

/* Scores not above the limit, and whose they are; whether one of them is NaN. */
struct selection {
    float *score;
    int64_t *index, count;
    float limit;
    int nan;
};

/* log(1 + exp(log_beta)): 2 atanh(s) with s = u / (2 + u) <= 1/3, whose series ends below 2e-8. */
static inline float ahead_of_two(float log_beta)
{
    float u = exp_float(log_beta), s = u / (2 + u), q = s * s, sum = 1.0f / 13;
    for (int k = 11; k > 0; k -= 2)
        sum = sum * q + 1.0f / (float)k;
    return 2 * s * sum;
}

/* Note those of `count` entries from `slot` on that score at or below the limit. The scores of all
 * `room` are computed, used or not: that leaves no odd rest behind the vectors. */
static void note(const struct cache *cache, const struct eviction *what, int64_t slot, int64_t room,
                 int64_t count, int64_t index, struct selection *found)
{
    const float limit = found->limit;
    const float *log_beta = cache->log_beta + slot;
    const int32_t *position = cache->position + slot, now = now_of(what);
    float score[BLOCK];
    int any = 0;
#pragma omp simd reduction(| : any)
    for (int64_t i = 0; i < room; i++) {
        score[i] = (float)(now - position[i]) * log_beta[i] + ahead_of_two(log_beta[i]);
        any |= !(score[i] > limit); /* NaN, too */
    }
    for (int64_t i = 0; any && i < count; i++) {
        found->score[found->count] = score[i];
        found->index[found->count] = index + i;
        int low = !(score[i] > limit) && !is_protected(what, position[i]);
        found->count += low;
        found->nan |= low && score[i] != score[i];
    }
}

/* Note all of them; gives up where there might be no room for a block's. */
static int note_all(const struct cache *cache, const struct eviction *what, struct selection *found)
{
    int64_t size = cache->page_size;
    for (int64_t row = 0, index = 0; row < cache->rows; index += cache->length[row++])
        for (int64_t at = 0, length = cache->length[row]; at < length;) {
            int64_t page = cache->table[row * cache->width + at / size], from = at % size;
            int64_t room = size - from < BLOCK ? size - from : BLOCK;
            int64_t count = length - at < room ? length - at : room;
            if (found->count + count >= what->most)
                return 0;
            note(cache, what, page * size + from, room, count, index + at, found);
            at += count;
        }
    return 1;
}

/* Ask for what will be read: pages lie anywhere, and the step has emptied the caches. */
static void prefetch(const struct cache *cache)
{
    for (int64_t row = 0; row < cache->rows; row++) {
        const int64_t *page = cache->table + row * cache->width;
        for (int64_t left = cache->length[row]; left > 0; left -= cache->page_size, page++) {
            __builtin_prefetch(cache->log_beta + *page * cache->page_size);
            __builtin_prefetch(cache->position + *page * cache->page_size);
        }
    }
}

/* Put the value of rank `k` in its place, with none above it before and none below it behind. */
static float select_rank(float *value, int64_t count, int64_t k)
{
    for (int64_t low = 0, high = count - 1; low < high;) {
        float pivot = value[(low + high) / 2];
        int64_t i = low, j = high;
        while (i <= j) {
            while (value[i] < pivot)
                i++;
            while (value[j] > pivot)
                j--;
            if (i <= j) {
                float swapped = value[i];
                value[i++] = value[j];
                value[j--] = swapped;
            }
        }
        if (k <= j)
            high = j;
        else if (k >= i)
            low = i;
        else
            break;
    }
    return value[k];
}

/* List the `found` victims of a request and say 1; or 0, and leave a guess that is known to hold, or
 * none. */
int fast_select(const struct cache *cache, struct eviction *what)
{
    float limit = (float)what->guess;
    if (what->scorer != SCORE_RETENTION || what->lookahead != 2 || isinf(limit) ||
        what->found + BLOCK >= what->most)
        return 0;
    float *score = what->scratch, *sorted = score + what->most;
    struct selection found = {score, victims_of(what), 0, limit, 0};
    prefetch(cache);
    what->guess = INFINITY;
    if (!note_all(cache, what, &found)) {
        what->margin = fmax(what->margin / 2, LEAST_MARGIN);
        return 0;
    }
    if (found.nan)
        return 0;
    if (found.count < what->found) {
        what->margin = fmin(what->margin * 2, MOST_MARGIN);
        return 0;
    }
    memcpy(sorted, score, sizeof(float) * (size_t)found.count);
    float last = select_rank(sorted, found.count, what->found - 1), rival = INFINITY;
    float beyond = last + 4 * MARGIN * (1 + fabsf(last));
    if (!(beyond <= limit))
        return 0; /* there may be others above the guess, or a score is -inf */
    for (int64_t i = what->found; i < found.count; i++)
        rival = sorted[i] < rival ? sorted[i] : rival;
    what->guess = beyond;
    if (rival <= beyond)
        return 0; /* too close to tell */
    int64_t victims = 0;
    for (int64_t i = 0; i < found.count; i++) {
        found.index[victims] = found.index[i];
        victims += score[i] <= last;
    }
    what->margin = fmax(what->margin * 0.99, LEAST_MARGIN);
    guess_after(what, last);
    return 1;
}
