/* Page bookkeeping of one sequence: the same moves, in the same order, as RaggedCache. */
#include <string.h>

#include "native.h"

/* Add up what the step needs to append one entry to every row, once it has appended `before` others.
 * Changes nothing else: growing the pool, the table and the scratch is Python's part. */
void plan_append(const struct cache *cache, int64_t before, struct step *step)
{
    int64_t longest = 0;
    for (int64_t row = 0; row < cache->rows; row++) {
        int64_t length = cache->length[row] + before;
        step->pages += length % cache->page_size == 0;
        longest = length + 1 > longest ? length + 1 : longest;
    }
    int64_t width = pages_of(cache, longest), scores = step->mass ? longest * (before + 1) : 0;
    step->longest = scores > step->longest ? scores : step->longest;
    step->width = width > step->width ? width : step->width;
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
        cache->log_beta[slot] = 0; /* where no gate says it */
        if (cache->state_size) /* else there is no such column */
            memset(cache->state + slot * cache->state_size, 0, sizeof(float) * cache->state_size);
    }
}

/* Copy the `bytes` of one entry in a column; a column without any may be NULL. */
static void copy(void *column, int64_t to, int64_t from, int64_t bytes)
{
    if (bytes)
        memcpy((char *)column + to * bytes, (char *)column + from * bytes, (size_t)bytes);
}

#define COPY_COLUMN(type, name, bytes) copy(c->name, to, from, bytes);
static void move(struct cache *c, int64_t to, int64_t from) { COLUMNS(COPY_COLUMN) }

/* The columns that this library was built with, for a test to compare with Python's. */
#define COLUMN_TEXT(type, name, bytes) #type " *" #name ";"
EXPORT const char *mmkv_columns(void) { return COLUMNS(COLUMN_TEXT); }

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
