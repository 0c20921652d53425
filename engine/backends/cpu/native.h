/* The structures that Python fills and C reads. engine/backends/cpu/binding.py mirrors them field by
 * field; the loader compares their sizes, so a library built from older sources is refused. */
#ifndef MMKV_NATIVE_H
#define MMKV_NATIVE_H

#include <stdint.h>

#ifdef _WIN32
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

#define MAX_TRUNK 2 /* stages of a gate's trunk: 1 (rg) or 2 (tied, rg10) */

/* y = weight x + bias; weight [out, in] row-major, bias [out] or NULL. `bf16` holds weights in
 * bfloat16, panel by panel, [panels, pairs of columns, BF16_PANEL, 2], else NULL; where `rounds` is
 * not 0, they are multiplied by states that are rounded to bfloat16, too.
 * `codes` holds weights as whole numbers of `bits`, 8 or 4, panel by panel, [panels, blocks, bits,
 * INT8_PANEL, 4] bytes, and `scales` their steps in bfloat16, [panels, blocks, INT8_PANEL]; else NULL.
 * With one of them, `weight` is not read. */
struct linear {
    const float *weight, *bias;
    const uint16_t *bf16;
    const int8_t *codes;
    const uint16_t *scales;
    int64_t out, in, bits, rounds;
};

#define CODE_BLOCK 32 /* numbers of a row, or of a vector of states, that share a scale */
#define INT8_PANEL 16 /* rows whose codes lie together; the last panel is filled with zeros */
#define BF16_PANEL 32 /* rows in bfloat16 that lie together, likewise */
#define ROWS_TOGETHER 4 /* rows in float32 that a product takes at a time */
#define LEAST_CODED 1e-30f /* a block of states whose greatest number is below this is all zeros */

struct expert {
    struct linear gate_up, down;
};

struct layer {
    const float *input_norm, *post_norm; /* [hidden] */
    const float *qk_norm;                /* [heads + kv_heads, head_dim] or NULL */
    /* [hidden], of what attention and MLP add to the states, or NULL */
    const float *attention_out_norm, *mlp_out_norm;
    int64_t angle;  /* where its own stand among a batch slot's, in frequencies */
    int64_t window; /* tokens that are seen; 0: all */
    struct linear qkv, out, gate_up, down;
    struct linear trunk[MAX_TRUNK], readout;
    int64_t entry; /* its number among the layers with entries; -1: it follows the gated delta rule */
    /* Of the latter, whose qkv makes queries, keys, values and z [value heads, value_dim]. */
    struct linear rates;                         /* [2 value heads, hidden]: beta, then the decay's step */
    const float *conv;                           /* [channels, taps] */
    const float *log_decay, *step_bias, *gain;   /* [value heads] twice, [value_dim] */
    float *conv_states, *delta_states;           /* of all sequences, each with its own slot */
    /* Of a mixture: router [experts, hidden], `experts` NULL in a dense layer, whose gate_up and down
     * are not read otherwise; and of the expert that every token goes through, or empty. */
    struct linear router;
    const struct expert *experts;
    struct linear shared_gate, shared_gate_up, shared_down;
};

struct model {
    int64_t layers, hidden, heads, kv_heads, head_dim, rotary, trunk; /* trunk 0: no gates */
    int64_t angles; /* sets of rotary / 2 frequencies: layers may have one or another */
    int64_t gelu;   /* whether the MLP's gate goes through GELU, not SiLU */
    int64_t output_gate; /* whether each query head of qkv is followed by a gate of its output */
    int64_t key_heads, value_heads, key_dim, value_dim, taps; /* of the gated delta rule, or 0 */
    int64_t chosen, normalized; /* experts of a token; whether their weights sum to 1 */
    double eps, embed_scale; /* the latter: on the rows of embed */
    struct linear embed; /* [vocab, hidden]: its rows are read */
    const float *norm;
    struct linear head;
    const struct layer *layer;
};

/* The columns of the pool, as engine/cache/layout.py has them, in its order: the type of a pointer to
 * one, its name, and the bytes of an entry in it, of a cache `c`. Whatever moves an entry goes through
 * this list. */
#define COLUMNS(column)                                                                          \
    /* codes [pages, P, D]; two of 4 bits share a byte */                                        \
    column(void, keys, c->head_dim * c->key_bits / 8)                                            \
    column(void, values, c->head_dim * c->value_bits / 8)                                        \
    /* float16 [pages, P, scales_of(bits)] */                                                    \
    column(uint16_t, key_scale, 2 * scales_of(c->key_bits))                                      \
    column(uint16_t, value_scale, 2 * scales_of(c->value_bits))                                  \
    /* [pages, P] */                                                                             \
    column(float, log_beta, 4)                                                                   \
    column(int32_t, position, 4)                                                                 \
    column(uint8_t, modality, 1)                                                                 \
    column(float, state, 4 * c->state_size) /* [pages, P, state_size] */

#define COLUMN_MEMBER(type, name, bytes) type *name;

/* The pool, and the rows of one sequence (row = layer * kv_heads + head). */
struct cache {
    COLUMNS(COLUMN_MEMBER)
    int64_t *length, *table;         /* [rows], [rows, width] */
    int64_t *stack;                  /* free page ids; the last `free` pushed are on top */
    int64_t free, rows, width, page_size, head_dim, state_size;
    int64_t key_bits, value_bits; /* of a code: 32 (float), 16 (bfloat16), 8 or 4 */
    int64_t rotated;              /* whether keys, values and queries are turned by turn_features */
    int64_t behind; /* the last entries of each row that belong to later tokens of the same step */
};

/* One sequence's part of a step. */
struct batch_slot {
    int64_t token, position, rope_position;
    int64_t states; /* where layers of the gated delta rule have the sequence's states */
    const float *inv_freq; /* [angles, rotary / 2] */
    float *queries;        /* the sequence's ring, as in struct window; NULL: none */
};

struct eviction;

struct step {
    int64_t batch_slots, threads;
    double rope_scale[2]; /* on cos and sin, of each set of frequencies */
    float *scratch, *logits; /* logits [batch slots, vocab] */
    const struct batch_slot *batch_slot;
    struct eviction *requests; /* [batch slots], each for after the append; NULL: nothing is evicted */
    int64_t window;            /* slots of a ring of queries */
    int64_t mass;              /* 1 + how heads are joined, where state 0 adds up attention; or 0 */
    const int64_t *tap_layer;  /* [taps]; after these, hidden goes to tapped */
    float *tapped;             /* [taps, batch slots, hidden] */
    float *log_beta;           /* [batch slots, rows]; NULL without gates */
    int64_t taps;
    int64_t room;            /* scores of a head that the scratch holds; read where mass is asked for */
    int64_t pages, width, longest; /* left behind: free pages, table columns and scratch it takes */
    int64_t done;     /* left behind: 1, or 0 if one of them was not there */
    int64_t evicting; /* nanoseconds of eviction, of all steps so far */
};

enum { JOIN_MEAN, JOIN_MAX, JOIN_SUM }; /* how the query heads of a KV group become one */

/* The last queries of one sequence. */
struct window {
    const float *queries; /* [rows, group, size, D]: the query of token p in slot p % size */
    int64_t group, size, seen, join;
    int64_t logits;   /* whether heads are joined before the softmax, not after it */
    int64_t greatest; /* whether the greatest over the queries is taken, not the mean */
    float *scratch, *out; /* out [entries] */
};

/* Queries, keys and values of pictures' patches, [batch, heads, tokens, dim], a patch's features side by
 * side; what they get goes to out [batch, tokens, heads, dim]. */
struct patches {
    const float *query, *key, *value;
    int64_t stride[3][3]; /* of queries, keys and values, floats from batch, head and token to the next */
    float *out;
    int64_t batch, heads, tokens, dim, parts;
    const int64_t *start; /* [parts + 1]: tokens start[p] .. start[p + 1] - 1 see each other */
    double scale;         /* on products of queries and keys */
    int64_t rounds;       /* whether all that is multiplied is rounded to bfloat16 */
};

/* Tokens that layers of the gated delta rule take: T of one sequence, or one of each of T. query, key
 * [T, key_heads, dk], value [T, value_heads, dv], g, beta [T, value_heads]; out [T, value_heads, dv]. */
struct delta_tokens {
    const float *query, *key, *value, *g, *beta;
    float *out;
    int64_t stride[3]; /* of queries, keys and values, floats from token to token */
    int64_t tokens, key_heads, value_heads, dk, dv;
};

enum { SCORE_RETENTION, SCORE_RECENCY, SCORE_STATE, SCORE_GIVEN };
enum { COMPETE_GLOBAL, COMPETE_HEAD, COMPETE_GROUPS };

struct eviction {
    int64_t scorer, allocation, seen, budget, protect_first, protect_recent;
    int64_t age_shift; /* an entry's age is seen - position + age_shift */
    double lookahead;  /* >= 1, or infinity */
    double guess;  /* which score no victim will pass, left for the next call; infinity: none */
    double margin; /* of the guess; grows where it was too low, shrinks where it held */
    int64_t slack; /* entries above the budget that are let be, the same part of it in each row */
    int64_t entries, most; /* held before; victims there is room for */
    int64_t found;         /* victims of this call, -1: refused */
    int64_t nan;           /* how many of them have a score that is not a number */
    const float *given;   /* SCORE_GIVEN: [entries] in the order of rows */
    /* COMPETE_GROUPS: rows first_row[g] .. first_row[g + 1] - 1 keep share[g] together, and each of
     * them floor[row] at least. */
    int64_t groups;
    const int64_t *first_row, *share, *floor;
    void *scratch;
    struct death *trace; /* room for `most` of them, or NULL: nobody wants to know */
};

/* An entry that an eviction has dropped; engine/trace.py reads it. */
struct death {
    int32_t row, position;
    float log_beta, score;
    int32_t cause; /* 0: its score */
};

/* Numbers beside the codes of one key or value: a scale, and a zero point for 4 bits. */
static inline int64_t scales_of(int64_t bits)
{
    return bits == 4 ? 2 : bits == 8;
}

static inline int64_t pages_of(const struct cache *cache, int64_t length)
{
    return (length + cache->page_size - 1) / cache->page_size;
}

/* Flat slot of the entry with storage index `offset` in `row`. */
static inline int64_t slot_of(const struct cache *cache, int64_t row, int64_t offset)
{
    int64_t page = cache->table[row * cache->width + offset / cache->page_size];
    return page * cache->page_size + offset % cache->page_size;
}

/* Vectors of states in 8 bits. Those of a tile, n at a time, lie together as a product reads them: codes
 * [blocks, 8, n, 4]; scales, and -128 times the sums of codes, [blocks, n]. */
struct codes {
    int8_t *at;
    float *scale;
    int32_t *shift;
    int64_t blocks;
};

/* One vector per batch slot, `stride` floats apart; their codes where weights as whole numbers read them,
 * or what rounding to bfloat16 leaves of them (bf16.c). */
struct vectors {
    float *at;
    int64_t stride;
    struct codes codes;
    uint32_t *rounded;
};

#define DECODED 16 /* entries that are decoded at a time: they stay in the nearest cache */

/* Floats that DECODED entries take, where they have to be decoded at all. */
static inline int64_t decoded_room(const struct cache *cache)
{
    return cache->key_bits < 32 || cache->value_bits < 32 ? DECODED * cache->head_dim : 1;
}

/* Entries to take at a time of `left` ones that lie side by side with codes of `bits`. */
static inline int64_t at_a_time(int64_t bits, int64_t left)
{
    return bits < 32 && left > DECODED ? DECODED : left;
}

/* Rows of a matrix that are computed together, as far as they are asked for. */
static inline int64_t rows_together(const struct linear *map)
{
    return map->codes ? INT8_PANEL : map->bf16 ? BF16_PANEL : ROWS_TOGETHER;
}

/* forms.c */
const float *keys_at(const struct cache *cache, int64_t slot, int64_t count, float *wide);
const float *values_at(const struct cache *cache, int64_t slot, int64_t count, float *wide);
void scales_at(const uint16_t *scales, int64_t bits, int64_t slot, int64_t count, float *scale,
               float *zero);
void turn_features(const struct cache *cache, float *x);
void mmkv_store(const struct cache *cache, int64_t slot, float *key, float *value);

/* linear.c */
int64_t carve_states(const struct linear *map, int64_t count, float *base, struct vectors *x);
void states_part(const struct linear *map, struct vectors x, int64_t count, int64_t part, int64_t parts);
void linear_rows(const struct linear *map, struct vectors x, struct vectors y, int64_t batch_slots,
                 int64_t from, int64_t to);
void linear_add_rows(const struct linear *map, struct vectors x, struct vectors y, int64_t batch_slots,
                     int64_t from, int64_t to);
void put_rows(const struct linear *map, const float *sums, int64_t from, int64_t to, int add, float *y);
void copy_row(const struct linear *map, int64_t row, float *to);
void dot_rows(const float *weight, int64_t rows, int64_t width, const float *x, float *y);
void rms_norm(const float *x, const float *gain, int64_t size, float eps, float *y);

/* elementwise.c */
void rotate(float *x, const float *cos, const float *sin, int64_t half);
void silu(float *x, int64_t from, int64_t to);
void gelu(float *x, int64_t from, int64_t to);

/* bf16.c */
void bf16_rows(const struct linear *map, struct vectors x, struct vectors y, int64_t count,
               int64_t from, int64_t to, int add);
void bf16_row(const struct linear *map, int64_t row, float *to);
int64_t carve_rounded(int64_t width, int64_t count, float *base, struct vectors *x);
void round_part(struct vectors x, int64_t width, int64_t count, int64_t part, int64_t parts);

/* int8.c */
void code_part(struct vectors x, int64_t bits, int64_t width, int64_t count, int64_t part,
               int64_t parts, struct codes to);
int64_t carve_codes(int64_t width, int64_t count, float *base, struct codes *to);
void int8_rows(const struct linear *map, struct codes x, struct vectors y, int64_t count,
               int64_t from, int64_t to, int add);
void int8_row(const struct linear *map, int64_t row, float *to);

/* attention.c */
void mmkv_attend(const struct cache *cache, int64_t row, const float *query, int64_t group,
                int64_t mass, int64_t oldest, float *scores, float *out);
void attend_tokens(const struct cache *cache, int64_t row, const float *query, int64_t tokens, int64_t group,
                   int64_t mass, const int64_t *oldest, float *scores, float *out);

/* delta.c */
void delta_group(float *state, int64_t group, int64_t dk, int64_t dv, const float *q, const float *k,
                 const float *v, const float *g, const float *beta, float *out);
void conv_token(const float *x, const float *weight, int64_t taps, float *state, int64_t from, int64_t to,
                float *y);

/* pages.c */
void plan_append(const struct cache *cache, int64_t before, struct step *step);
void append_entry(struct cache *cache, int64_t position);
void drop_entries(struct cache *cache, int64_t *victims, int64_t count);

/* evict.c */
void mmkv_evict(struct cache *caches, struct eviction *requests, int64_t batch_slots,
                int64_t threads);

#endif
