/* Page bookkeeping of one sequence: the same moves, in the same order, as RaggedCache. */
#include <string.h>

#include "native.h"

/* What appending one entry to every row needs: {free pages, table columns, longest row after}.
 * Changes nothing: growing the pool and the table is Python's part. */
EXPORT void mmkv_plan(const struct cache *cache, int64_t *need)
{
    need[0] = 0, need[1] = 0, need[2] = 0;
    for (int64_t row = 0; row < cache->rows; row++) {
        int64_t length = cache->length[row], held = pages_of(cache, length + 1);
        need[0] += length % cache->page_size == 0;
        if (held > need[1])
            need[1] = held;
        if (length + 1 > need[2])
            need[2] = length + 1;
    }
}

/* Make room for one text token in every row; keys, values and log_beta are the caller's to fill. */
void append_entry(struct cache *cache, int64_t position)
{
    for (int64_t row = 0; row < cache->rows; row++) {
        int64_t length = cache->length[row]++;
        if (length % cache->page_size == 0)
            cache->table[row * cache->width + length / cache->page_size] =
                cache->stack[--cache->free];
        int64_t slot = slot_of(cache, row, length);
        cache->position[slot] = (int32_t)position;
        cache->modality[slot] = 0;
    }
}

static void move(struct cache *cache, int64_t to, int64_t from)
{
    int64_t dim = cache->head_dim;
    memcpy(cache->keys + to * dim, cache->keys + from * dim, sizeof(float) * dim);
    memcpy(cache->values + to * dim, cache->values + from * dim, sizeof(float) * dim);
    cache->log_beta[to] = cache->log_beta[from];
    cache->position[to] = cache->position[from];
    cache->modality[to] = cache->modality[from];
}

/* Drop victims from one row, given as ascending storage indices: holes are filled from the tail,
 * first hole with first survivor, and emptied pages go back to the stack. */
static void drop_from_row(struct cache *cache, int64_t row, const int64_t *victims, int64_t count)
{
    int64_t before = cache->length[row], after = before - count;
    const int64_t *end = victims + count, *beyond = victims;
    while (beyond < end && *beyond < after)
        beyond++;
    int64_t mover = after;
    for (const int64_t *hole = victims; hole < end && *hole < after; hole++, mover++) {
        for (; beyond < end && *beyond == mover; beyond++)
            mover++;
        move(cache, slot_of(cache, row, *hole), slot_of(cache, row, mover));
    }
    const int64_t *page = cache->table + row * cache->width;
    for (int64_t i = pages_of(cache, after); i < pages_of(cache, before); i++)
        cache->stack[cache->free++] = page[i];
    cache->length[row] = after;
}

/* Drop entries given by ascending index among all entries of the sequence, row by row. The
 * indices are turned into offsets inside their rows. */
void drop_entries(struct cache *cache, int64_t *victims, int64_t count)
{
    int64_t start = 0, first = 0;
    for (int64_t row = 0; row < cache->rows && first < count; row++) {
        int64_t length = cache->length[row], last = first;
        for (; last < count && victims[last] < start + length; last++)
            victims[last] -= start;
        if (last > first)
            drop_from_row(cache, row, victims + first, last - first);
        start += length;
        first = last;
    }
}
