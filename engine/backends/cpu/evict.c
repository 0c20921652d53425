/* Eviction: score every entry at the present step, find the lowest exactly, drop them.
 *
 * An entry's rank is one integer: its score, mapped so that integers order as floats do, above
 * its position. Entries are numbered row by row, so equal ranks fall to the lower number: ties
 * go by position, then layer, then head, as everywhere in mmkv.
 *
 * Scores need logarithms, but a bound from below needs none: a mean of powers is at least the power
 * of the mean, log(1 + b + .. + b^(n-1)) >= log n + (n-1)/2 log b. The scores of those with the
 * lowest bounds give a limit; only entries whose bound is not above it are scored at all. A decode
 * loop's usual case is quicker still: fast_select, which comes first. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "native.h"
#include "vmath.h"

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

/* The victims of a decode step, where that is easy: nearly always.
 *
 * The scores of few entries lie below a guess near the last victim's of the step before. They are
 * computed in single precision, to within MARGIN; those of entries that have to go and of those
 * that stay rarely lie so close that it matters. Where they do, or the guess was too low, or so high
 * that there is no room for all below it, the search behind this has to. */
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
static int fast_select(const struct cache *cache, struct eviction *what)
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

/* The exact search, for all other cases. */

/* A max-heap of the lowest ranks so far; its top is the best of them. No score is below
 * (age + slope) * log_beta + offset, and no victim's score above limit. */
struct search {
    struct victim *heap;
    int64_t wanted, size, row;
    float slope, offset, limit;
    int scoring; /* by scores, or by bounds */
};

static inline uint32_t ordered(float score)
{
    uint32_t bits;
    score += 0.0f; /* -0 and 0 are one score */
    memcpy(&bits, &score, sizeof bits);
    bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return score != score ? 0 : bits; /* NaN below -inf: it has to go first */
}

static double log1mexp(double x)
{
    return x > -0.6931471805599453 ? log(-expm1(x)) : log1p(-exp(x));
}

/* The part of eq. 9 that does not depend on age, in double and rounded once, as in torch. */
static float ahead_of(double log_beta, double lookahead)
{
    if (lookahead == 1)
        return 0.0f;
    if (lookahead == 2)
        return (float)log1p(exp(log_beta));
    if (isinf(lookahead))
        return (float)-log1mexp(log_beta);
    double sum = log_beta == 0 ? lookahead : expm1(lookahead * log_beta) / expm1(log_beta);
    return (float)log(sum);
}

static float retention_of(const struct eviction *what, float log_beta, int32_t position)
{
    if (is_protected(what, position))
        return INFINITY;
    /* Rounded before the sum, as in torch: volatile keeps compilers from fusing the two. */
    int32_t age = now_of(what) - position;
    volatile float decayed = age ? (float)age * log_beta : 0.0f; /* not 0 * -inf */
    return decayed + ahead_of(log_beta, what->lookahead);
}

#define ENTRIES_PER_THREAD (1 << 14) /* waking a thread takes as long as looking through thousands */

static struct search search_for(const struct eviction *what, struct victim *heap, int64_t wanted)
{
    struct search search = {heap, wanted, 0, 0, 0.0f, 0.0f, INFINITY, 0};
    if (what->scorer == SCORE_RETENTION && !isinf(what->lookahead)) {
        double most = log(what->lookahead);
        search.slope = (float)((what->lookahead - 1) / 2);
        search.offset = (float)(most - MARGIN * (most + 1));
    }
    return search;
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

static void offer(struct search *search, struct victim item)
{
    if (search->size == search->wanted) {
        if (item.rank < search->heap[0].rank) /* an equal rank of a later row stays */
            sift_down(search->heap, search->size, item);
        return;
    }
    int64_t at = search->size++;
    for (; at && after(item, search->heap[(at - 1) / 2]); at = (at - 1) / 2)
        search->heap[at] = search->heap[(at - 1) / 2];
    search->heap[at] = item;
}

/* Scores that need no computing. */
static void copy_scores(const struct cache *cache, const struct eviction *what, int64_t slot,
                        int64_t count, int64_t index, float *score)
{
    for (int64_t i = 0; i < count; i++)
        score[i] = what->scorer == SCORE_RECENCY ? (float)cache->position[slot + i]
                   : what->scorer == SCORE_GIVEN ? what->given[index + i]
                                                 : cache->state[(slot + i) * cache->state_size];
}

/* Offer `count` entries that lie together from `slot` on, the first of which has number `index`. */
static void search_block(const struct cache *cache, const struct eviction *what, int64_t slot,
                         int64_t count, int64_t index, struct search *search)
{
    const float *log_beta = cache->log_beta + slot;
    const int32_t *position = cache->position + slot, now = now_of(what);
    const float slope = search->slope, offset = search->offset, more = 1 + MARGIN;
    const float best = search->size == search->wanted ? search->heap[0].score : INFINITY;
    const float limit = best < search->limit ? best : search->limit;
    float bound[BLOCK];
    int any = 0; /* not above the limit, or NaN */
    if (what->scorer == SCORE_RETENTION)
#pragma omp simd reduction(| : any)
        for (int64_t i = 0; i < count; i++) {
            bound[i] = ((float)(now - position[i]) + slope) * (log_beta[i] * more) + offset;
            any |= !(bound[i] > limit);
        }
    else {
        copy_scores(cache, what, slot, count, index, bound);
        for (int64_t i = 0; i < count; i++)
            any |= !(bound[i] > limit);
    }
    for (int64_t i = 0; any && i < count; i++) {
        if (bound[i] > limit)
            continue;
        float score = bound[i];
        if (is_protected(what, position[i]))
            score = INFINITY;
        else if (search->scoring && what->scorer == SCORE_RETENTION)
            score = retention_of(what, log_beta[i], position[i]);
        uint64_t rank = (uint64_t)ordered(score) << 32 | (uint32_t)position[i];
        offer(search, (struct victim){rank, index + i, score, log_beta[i], position[i],
                                      (int32_t)search->row});
    }
}

/* Offer the entries of one row, the first of which has the number `index`. */
static void search_row(const struct cache *cache, const struct eviction *what, int64_t row,
                       int64_t index, struct search *search)
{
    const int64_t *page = cache->table + row * cache->width, size = cache->page_size;
    search->row = row;
    for (int64_t left = cache->length[row]; left > 0; left -= size, index += size) {
        int64_t slot = *page++ * size, live = left < size ? left : size;
        for (int64_t at = 0; at < live; at += BLOCK)
            search_block(cache, what, slot + at, live - at < BLOCK ? live - at : BLOCK,
                         index + at, search);
    }
}

/* From bounds to scores: the wanted-th lowest score is not above the highest of any `wanted`. */
static void begin_scoring(const struct eviction *what, struct search *search)
{
    search->limit = search->size < search->wanted ? INFINITY : -INFINITY;
    for (int64_t i = 0; i < search->size; i++) {
        const struct victim *one = search->heap + i;
        float score = what->scorer == SCORE_RETENTION
                          ? retention_of(what, one->log_beta, one->position)
                          : one->score;
        search->limit = score > search->limit ? score : search->limit; /* NaN is below any limit */
    }
    search->size = 0;
    search->scoring = 1;
}

static int by_index(const void *a, const void *b)
{
    int64_t left = *(const int64_t *)a, right = *(const int64_t *)b;
    return (left > right) - (left < right);
}

/* Entries that a row of its own budget may keep: the first rows get what a division leaves over. */
static int64_t share_of(const struct cache *cache, const struct eviction *what, int64_t row)
{
    return what->budget / cache->rows + (row < what->budget % cache->rows);
}

/* How many entries have to go: none while each group of rows is within its share and slack. */
static int64_t excess(const struct cache *cache, const struct eviction *what)
{
    if (what->allocation == COMPETE_GLOBAL)
        return what->entries > what->budget + what->slack ? what->entries - what->budget : 0;
    int64_t slack = what->slack / cache->rows, count = 0;
    int due = 0;
    if (what->allocation == COMPETE_GROUPS) {
        for (int64_t group = 0; group < what->groups; group++) {
            int64_t above = -what->share[group], from = what->first_row[group];
            for (int64_t row = from; row < what->first_row[group + 1]; row++)
                above += cache->length[row];
            count += above > 0 ? above : 0;
            due |= above > slack * (what->first_row[group + 1] - from);
        }
        return due ? count : 0;
    }
    for (int64_t row = 0; row < cache->rows; row++) {
        int64_t above = cache->length[row] - share_of(cache, what, row);
        count += above > 0 ? above : 0;
        due |= above > slack;
    }
    return due ? count : 0;
}

/* Bytes of scratch that mmkv_evict needs for so many victims and rows. */
EXPORT int64_t mmkv_evict_scratch(int64_t victims, int64_t rows)
{
    return victims * (int64_t)(sizeof(struct victim) + sizeof(int64_t)) + rows * (int64_t)sizeof(int64_t);
}

static void search_rows(const struct cache *cache, const struct eviction *what,
                        struct search *search)
{
    for (int64_t row = 0, index = 0; row < cache->rows; index += cache->length[row++])
        search_row(cache, what, row, index, search);
}

/* All rows together. From one step to the next the limit moves little: a guess near the last one
 * saves the search by bounds. It was too low if there are not `wanted` entries at or below it. */
static void search_all(const struct cache *cache, struct eviction *what, struct search *search)
{
    if (!isinf(what->guess)) {
        search->limit = (float)what->guess;
        search->scoring = 1;
        search_rows(cache, what, search);
    }
    if (search->size < search->wanted || search->heap[0].score > search->limit) {
        *search = search_for(what, search->heap, search->wanted);
        search_rows(cache, what, search);
        begin_scoring(what, search);
        search_rows(cache, what, search);
    }
    guess_after(what, search->heap[0].score);
}

/* The `wanted` lowest entries of rows from .. to-1, none of them of a row that is marked. `index`: of
 * the first entry of the first row. */
static void search_unmarked(const struct cache *cache, const struct eviction *what, int64_t from,
                            int64_t to, int64_t index, const int64_t *marked,
                            struct search *search)
{
    for (int pass = 0; pass < 2; pass++) {
        int64_t at = index;
        for (int64_t row = from; row < to; at += cache->length[row++])
            if (!marked || marked[row] >= 0)
                search_row(cache, what, row, at, search);
        if (what->scorer != SCORE_RETENTION)
            return; /* these were scores, not bounds */
        if (!pass)
            begin_scoring(what, search);
    }
}

static int64_t free_of(const struct cache *cache, const struct eviction *what, int64_t row)
{
    int64_t above = cache->length[row] - (what->floor ? what->floor[row] : 0);
    return above > 0 ? above : 0;
}

/* The `wanted` lowest entries of a group whose rows keep their floors; returns the heap's end.
 *
 * A row that would lose more than it may loses just that: with its best entries guarded, more of
 * the other rows have to go, and its own unguarded ones lie below all of these. So rows are marked
 * (-1) until no more of them would lose too many. */
static struct victim *search_group(const struct cache *cache, const struct eviction *what,
                                   int64_t from, int64_t to, int64_t index, int64_t wanted,
                                   struct victim *heap)
{
    int64_t *taken = taken_of(what);
    for (int64_t row = from; row < to; row++)
        taken[row] = 0;
    for (int again = 1; again && wanted;) {
        struct search search = search_for(what, heap, wanted);
        search_unmarked(cache, what, from, to, index, taken, &search);
        again = 0;
        for (int64_t i = 0; what->floor && i < search.size; i++)
            taken[heap[i].row]++;
        for (int64_t row = from; row < to; row++) {
            int64_t most = free_of(cache, what, row);
            if (what->floor && taken[row] > most) {
                again = 1;
                wanted -= most;
                taken[row] = -1;
            } else if (taken[row] > 0)
                taken[row] = 0;
        }
    }
    heap += wanted;
    for (int64_t row = from, at = index; row < to; at += cache->length[row++])
        if (taken[row] < 0 && free_of(cache, what, row)) {
            struct search search = search_for(what, heap, free_of(cache, what, row));
            search_unmarked(cache, what, row, row + 1, at, 0, &search);
            heap += search.wanted;
        }
    return heap;
}

static void search_groups(const struct cache *cache, const struct eviction *what,
                          struct victim *heap)
{
    for (int64_t group = 0, index = 0; group < what->groups; group++) {
        int64_t from = what->first_row[group], to = what->first_row[group + 1], held = 0;
        for (int64_t row = from; row < to; row++)
            held += cache->length[row];
        if (held > what->share[group])
            heap = search_group(cache, what, from, to, index, held - what->share[group], heap);
        index += held;
    }
}

/* Whether the victims listed leave each row its floor. */
static int keeps_floors(const struct cache *cache, const struct eviction *what)
{
    const int64_t *victim = victims_of(what), *end = victim + what->found;
    int64_t start = 0, rows = what->allocation == COMPETE_GROUPS && what->floor ? cache->rows : 0;
    for (int64_t row = 0; row < rows; row++) {
        const int64_t *first = victim;
        start += cache->length[row];
        while (victim < end && *victim < start)
            victim++;
        if (victim - first > free_of(cache, what, row))
            return 0;
    }
    return 1;
}

/* List who has to go. Refuses when there is no room for so many, or the rows do not hold
 * `entries`. */
static void find_victims(const struct cache *cache, struct eviction *what)
{
    int64_t wanted = excess(cache, what), held = 0;
    what->nan = 0;
    for (int64_t row = 0; row < cache->rows; row++)
        held += cache->length[row];
    what->found = wanted > what->most || held != what->entries ? -1 : wanted > 0 ? wanted : 0;
    if (what->found <= 0)
        return;
    int one_group = what->allocation == COMPETE_GROUPS && what->groups == 1;
    if ((what->allocation == COMPETE_GLOBAL || one_group) && fast_select(cache, what) &&
        keeps_floors(cache, what))
        return;
    struct victim *heap = what->scratch;
    struct search search = search_for(what, heap, wanted);
    if (what->allocation == COMPETE_GLOBAL)
        search_all(cache, what, &search);
    else if (what->allocation == COMPETE_GROUPS)
        search_groups(cache, what, heap);
    else
        for (int64_t row = 0, index = 0, found = 0; row < cache->rows; row++) {
            int64_t length = cache->length[row], share = share_of(cache, what, row);
            if (length > share) {
                search = search_for(what, heap + found, length - share);
                search_row(cache, what, row, index, &search);
                begin_scoring(what, &search);
                search_row(cache, what, row, index, &search);
                found += search.wanted;
            }
            index += length;
        }
    int64_t *victims = victims_of(what);
    for (int64_t i = 0; i < wanted; i++) {
        victims[i] = heap[i].index;
        what->nan += heap[i].score != heap[i].score;
    }
    qsort(victims, (size_t)wanted, sizeof *victims, by_index);
}

/* Write down the victims listed, with the scores that they had. */
static void note_deaths(const struct cache *cache, const struct eviction *what)
{
    const int64_t *victim = victims_of(what), *end = victim + what->found;
    struct death *note = what->trace;
    int64_t start = 0;
    for (int64_t row = 0; row < cache->rows; start += cache->length[row++])
        for (; victim < end && *victim < start + cache->length[row]; victim++, note++) {
            int64_t slot = slot_of(cache, row, *victim - start);
            float score = INFINITY;
            if (what->scorer == SCORE_RETENTION)
                score = retention_of(what, cache->log_beta[slot], cache->position[slot]);
            else if (!is_protected(what, cache->position[slot]))
                copy_scores(cache, what, slot, 1, *victim, &score);
            *note = (struct death){(int32_t)row, cache->position[slot], cache->log_beta[slot],
                                   score, 0};
        }
}

/* Cut each sequence in which a group of rows stands above its share and slack down to the shares, or,
 * where refused, change nothing of it. The caches share one stack of free pages, as to mmkv_step; it
 * is filled sequence after sequence. */
EXPORT void mmkv_evict(struct cache *caches, struct eviction *requests, int64_t batch_slots,
                       int64_t threads)
{
    int64_t entries = 0;
    for (int64_t batch_slot = 0; batch_slot < batch_slots; batch_slot++)
        entries += requests[batch_slot].entries;
    int64_t useful = entries / ENTRIES_PER_THREAD;
    useful = useful < batch_slots ? useful : batch_slots;
    threads = threads < useful ? threads : useful > 1 ? useful : 1;
#pragma omp parallel for num_threads((int)threads) schedule(dynamic, 1) if (threads > 1)
    for (int64_t batch_slot = 0; batch_slot < batch_slots; batch_slot++)
        find_victims(caches + batch_slot, requests + batch_slot);
    for (int64_t batch_slot = 0; batch_slot < batch_slots; batch_slot++) {
        caches[batch_slot].free = caches[batch_slot ? batch_slot - 1 : 0].free;
        if (requests[batch_slot].found > 0 && requests[batch_slot].trace)
            note_deaths(caches + batch_slot, requests + batch_slot);
        if (requests[batch_slot].found > 0)
            drop_entries(caches + batch_slot, victims_of(requests + batch_slot),
                         requests[batch_slot].found);
    }
    for (int64_t batch_slot = 0; batch_slot < batch_slots; batch_slot++)
        caches[batch_slot].free = caches[batch_slots - 1].free;
}
