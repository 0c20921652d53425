/* One decode step of one or more sequences (batch slots), from embedding rows to logits.
 *
 * The step is a sequence of phases, each cut into chunks: some rows of a matrix for all batch slots,
 * or one KV head of one batch slot's attention. Threads claim chunks as they come free, and a phase
 * begins when all chunks of the
 * one before are done. Nobody waits for a thread that holds no chunk: on a busy machine one of
 * them may be off its core for milliseconds, and meeting at a barrier in every phase would cost
 * such a pause each time. Norms are so cheap that each thread takes its own. */
#include <math.h>
#include <sched.h>
#include <string.h>
#include <time.h>

#include "native.h"
#include "vectors.h"

#define PHASES 8 /* per layer, those of a mixture and of norms of what is added among them; the head is one more */
#define CHUNK_FLOATS (16 * 1024)  /* of weights in one chunk */
#define SPINS 2000                /* looks at a counter before the core is offered to others */

struct phase {
    int64_t next, done; /* chunks claimed and finished */
    int64_t line[6];    /* a cache line of its own */
};

/* Shared by all threads: rotation and activations, one vector per batch slot; then what belongs to one
 * thread. */
struct worker {
    const struct step *step;
    int64_t batch_slots;
    struct vectors cos, sin, hidden, qkv, mixed, act, trunk[MAX_TRUNK], rates, convolved, made, post, route;
    struct phase *phase; /* the current one */
    int64_t chunks, chunks_before;
    struct vectors normed;
    float *coded; /* room for what a phase reads of its vectors: codes, or rounded ones */
    float *scores;
};

static int64_t whole_lines(int64_t floats)
{
    return (floats + 15) / 16 * 16; /* whole cache lines: threads do not share one */
}

/* Channels that layers of the gated delta rule convolve: queries, keys, values. */
static int64_t channels_of(const struct model *model)
{
    return 2 * model->key_heads * model->key_dim + model->value_heads * model->value_dim;
}

static int norms_outputs(const struct model *model)
{
    return model->layers > 0 && model->layer->attention_out_norm;
}

/* The most experts of any layer. */
static int64_t most_experts(const struct model *model)
{
    int64_t most = 0;
    for (int64_t index = 0; index < model->layers; index++) {
        const struct layer *layer = model->layer + index;
        most = layer->experts && layer->router.out > most ? layer->router.out : most;
    }
    return most;
}

#define LARGEST 6

/* The most rows of any layer's qkv, what out reads, gate_up and each trunk stage, and the floats for
 * coded inputs. */
static void largest(const struct model *model, int64_t batch_slots, int64_t *found)
{
    for (int64_t index = 0; index < model->layers; index++) {
        const struct layer *layer = model->layer + index;
        const struct linear *maps[] = {&layer->qkv, &layer->out, &layer->down, &model->head};
        int64_t wide = layer->experts ? model->chosen * layer->experts->gate_up.out + layer->shared_gate_up.out
                                      : layer->gate_up.out;
        int64_t size[LARGEST] = {layer->qkv.out, layer->out.in, wide, layer->trunk[0].out,
                                 layer->trunk[1].out, 0};
        for (int i = 0; i < 4; i++) {
            int64_t room = carve_states(maps[i], batch_slots, 0, 0);
            size[LARGEST - 1] = room > size[LARGEST - 1] ? room : size[LARGEST - 1];
        }
        for (int i = 0; i < LARGEST; i++)
            found[i] = size[i] > found[i] ? size[i] : found[i];
    }
}

/* Lay out one thread's view of the scratch at `base`, a cache line's start (NULL to measure);
 * returns the floats needed for all threads. The phases come first. */
static int64_t carve(const struct model *model, int64_t longest, int64_t threads, int64_t thread,
                     int64_t batch_slots, float *base, struct worker *to)
{
    int64_t longest_of[LARGEST] = {0};
    largest(model, batch_slots, longest_of);
    struct vectors *shared[] = {&to->cos,      &to->sin,      &to->hidden, &to->qkv,   &to->mixed,
                                &to->act,      &to->trunk[0], &to->trunk[1], &to->rates, &to->convolved,
                                &to->made,     &to->post,     &to->route};
    int64_t routed = most_experts(model);
    int64_t turned = model->angles * model->rotary / 2;
    int64_t size[] = {turned,              turned,              model->hidden,       longest_of[0],
                      longest_of[1],       longest_of[2],       longest_of[3],       longest_of[4],
                      2 * model->value_heads, channels_of(model), norms_outputs(model) ? model->hidden : 0,
                      routed ? model->hidden : 0, routed ? routed + 2 * model->chosen + 1 : 0};
    int64_t at = (PHASES * model->layers + 1) * (int64_t)(sizeof(struct phase) / sizeof(float));
    to->batch_slots = batch_slots;
    to->phase = (struct phase *)base;
    for (int i = 0; i < 13; i++) {
        int64_t stride = whole_lines(size[i]);
        *shared[i] = (struct vectors){.at = base ? base + at : 0, .stride = stride};
        at += batch_slots * stride;
    }
    int64_t stride = whole_lines(model->hidden), normed = batch_slots * stride;
    int64_t scores = whole_lines(model->heads / model->kv_heads * longest), coded = longest_of[5];
    int64_t own = normed + scores + coded;
    to->normed = (struct vectors){.at = base ? base + at + thread * own : 0, .stride = stride};
    to->scores = base ? to->normed.at + normed : 0;
    to->coded = base ? to->scores + scores : 0;
    return at + threads * own;
}

/* Floats of scratch that mmkv_step needs; `longest`: the entries of a row, where mass is asked for. */
EXPORT int64_t mmkv_scratch(const struct model *model, int64_t longest, int64_t threads,
                            int64_t batch_slots)
{
    struct worker unused;
    return carve(model, longest, threads, 0, batch_slots, 0, &unused);
}

static float *of_batch_slot(struct vectors x, int64_t batch_slot)
{
    return x.at + batch_slot * x.stride;
}

/* Whether a batch slot's token follows that of the one before it in the same sequence. */
static int goes_on(const struct cache *caches, int64_t batch_slot)
{
    return batch_slot > 0 && caches[batch_slot - 1].behind > 0;
}

/* Slot of the entry that a batch slot's token has in a row. */
static int64_t newest_slot(const struct cache *cache, int64_t row)
{
    return slot_of(cache, row, cache->length[row] - 1 - cache->behind);
}

static void begin(struct worker *me, int64_t chunks)
{
    me->chunks = chunks;
}

static void end(struct worker *me)
{
    me->chunks_before = me->chunks;
    me->phase++;
}

/* Claim a chunk of the current phase: its number, or -1 when none is left. What the chunk reads
 * stays as it is until the chunk is finished. */
static int64_t claim(struct worker *me)
{
    struct phase *now = me->phase, *before = now - 1;
    if (__atomic_load_n(&now->next, __ATOMIC_RELAXED) >= me->chunks)
        return -1;
    if (me->chunks_before)
        for (int spin = 0; __atomic_load_n(&before->done, __ATOMIC_ACQUIRE) < me->chunks_before;)
            if (++spin > SPINS)
                sched_yield();
    int64_t chunk = __atomic_fetch_add(&now->next, 1, __ATOMIC_RELAXED);
    return chunk < me->chunks ? chunk : -1;
}

static void finish(struct worker *me)
{
    __atomic_fetch_add(&me->phase->done, 1, __ATOMIC_RELEASE);
}

/* Rows in one chunk of a matrix; whole tiles of linear.c, or panels. */
static int64_t chunk_rows(const struct linear *map)
{
    int64_t weights = map->codes ? 2 * CHUNK_FLOATS : CHUNK_FLOATS, tile = rows_together(map);
    int64_t rows = weights / map->in / tile * tile;
    return rows > tile ? rows : tile;
}

/* Chunks of the first `rows` rows. */
static int64_t chunks_of(const struct linear *map, int64_t rows)
{
    return (rows + chunk_rows(map) - 1) / chunk_rows(map);
}

struct span {
    int64_t from, to;
};

static struct span rows_of(const struct linear *map, int64_t rows, int64_t chunk)
{
    int64_t from = chunk * chunk_rows(map), to = from + chunk_rows(map);
    return (struct span){from, to < rows ? to : rows};
}

static float logistic(float x)
{
    return 1.0f / (1.0f + exp_float(-x));
}

/* Where a batch slot's heads that share a row have their queries. */
static float *query_of(const struct model *model, int64_t head, int64_t batch_slot, const struct worker *me)
{
    int64_t queries = (model->output_gate ? 2 : 1) * model->heads;
    return of_batch_slot(me->qkv, batch_slot) + queries / model->kv_heads * head * model->head_dim;
}

/* Norm and turn one KV head's queries and key of a batch slot, and store key and value. Queries and gates lie
 * side by side in the projection; the gates go to `gate`. */
static void store_head(const struct model *model, const struct layer *layer, struct cache *cache,
                       int64_t head, int64_t batch_slot, float *gate, struct worker *me)
{
    int64_t dim = model->head_dim, group = model->heads / model->kv_heads;
    int64_t row = layer->entry * model->kv_heads + head, gated = model->output_gate;
    int64_t queries = (gated ? 2 : 1) * model->heads;
    float *qkv = of_batch_slot(me->qkv, batch_slot);
    float *query = query_of(model, head, batch_slot, me);
    float *key = qkv + (queries + head) * dim;
    float *value = qkv + (queries + model->kv_heads + head) * dim;
    for (int64_t i = 0; gated && i < group; i++) {
        memcpy(gate + i * dim, query + (2 * i + 1) * dim, sizeof *gate * (size_t)dim);
        memmove(query + i * dim, query + 2 * i * dim, sizeof *gate * (size_t)dim);
    }
    for (int64_t i = 0; i <= group; i++) {
        float *x = i < group ? query + i * dim : key;
        int64_t of = i < group ? head * group + i : model->heads + head;
        if (layer->qk_norm)
            rms_norm(x, layer->qk_norm + of * dim, dim, (float)model->eps, x);
        rotate(x, of_batch_slot(me->cos, batch_slot) + layer->angle,
               of_batch_slot(me->sin, batch_slot) + layer->angle, model->rotary / 2);
        if (i < group)
            turn_features(cache, x);
    }
    const struct batch_slot *mine = me->step->batch_slot + batch_slot;
    for (int64_t i = 0, size = me->step->window; mine->queries && i < group; i++)
        memcpy(mine->queries + ((row * group + i) * size + mine->position % size) * dim,
               query + i * dim, sizeof(float) * dim);
    mmkv_store(cache, newest_slot(cache, row), key, value);
}

/* Finish one KV head of a sequence: of a batch slot, and of those after it that are later tokens of the same
 * sequence. */
static void attend_head(const struct model *model, const struct layer *layer, struct cache *caches,
                        int64_t head, int64_t batch_slot, struct worker *me)
{
    int64_t dim = model->head_dim, group = model->heads / model->kv_heads, gated = model->output_gate;
    int64_t tokens = caches[batch_slot].behind + 1, each = group * dim;
    float gate[gated ? tokens * each : 1], queries[tokens > 1 ? tokens * each : 1];
    float outputs[tokens > 1 ? tokens * each : 1], *query = query_of(model, head, batch_slot, me);
    float *mixed = of_batch_slot(me->mixed, batch_slot) + head * each;
    int64_t oldest[tokens];
    for (int64_t t = 0; t < tokens; t++) {
        int64_t slot = batch_slot + t, position = me->step->batch_slot[slot].position;
        store_head(model, layer, caches + slot, head, slot, gate + (gated ? t * each : 0), me);
        oldest[t] = layer->window ? position - layer->window + 1 : 0;
        if (tokens > 1)
            memcpy(queries + t * each, query_of(model, head, slot, me), sizeof *query * (size_t)each);
    }
    attend_tokens(caches + batch_slot, layer->entry * model->kv_heads + head, tokens > 1 ? queries : query,
                  tokens, group, me->step->mass, oldest, me->scores, tokens > 1 ? outputs : mixed);
    for (int64_t t = 0; t < tokens; t++) {
        float *to = of_batch_slot(me->mixed, batch_slot + t) + head * each;
        if (tokens > 1)
            memcpy(to, outputs + t * each, sizeof *to * (size_t)each);
        for (int64_t i = 0; i < group; i++)
            turn_features(caches + batch_slot, to + i * dim);
        for (int64_t i = 0; gated && i < each; i++)
            to[i] *= logistic(gate[t * each + i]);
    }
}

/* Finish one key head of a batch slot, and the value heads that it serves, in a layer of the gated delta
 * rule: convolve, take the token into the states, norm and gate what is read of them. */
static void mix_head(const struct model *model, const struct layer *layer, int64_t head,
                     int64_t batch_slot, struct worker *me)
{
    int64_t dk = model->key_dim, dv = model->value_dim, heads = model->value_heads;
    int64_t group = heads / model->key_heads, first = head * group, channels = channels_of(model);
    int64_t slot = me->step->batch_slot[batch_slot].states;
    const float *qkv = of_batch_slot(me->qkv, batch_slot), *rates = of_batch_slot(me->rates, batch_slot);
    float *x = of_batch_slot(me->convolved, batch_slot), g[group], beta[group];
    float *mixed = of_batch_slot(me->mixed, batch_slot) + first * dv;
    int64_t key = model->key_heads * dk, start[] = {head * dk, key + head * dk, 2 * key + first * dv};
    for (int i = 0; i < 3; i++)
        conv_token(qkv, layer->conv, model->taps,
                   layer->conv_states + slot * channels * (model->taps - 1), start[i],
                   start[i] + (i < 2 ? dk : group * dv), x);
    for (int64_t i = 0; i < group; i++) {
        float step = rates[heads + first + i] + layer->step_bias[first + i];
        beta[i] = logistic(rates[first + i]);
        g[i] = -expf(layer->log_decay[first + i]) * (step > 20 ? step : log1pf(expf(step)));
    }
    delta_group(layer->delta_states + (slot * heads + first) * dk * dv, group, dk, dv, x + start[0],
                x + start[1], x + start[2], g, beta, mixed);
    const float *z = qkv + channels + first * dv;
    for (int64_t i = 0; i < group; i++)
        rms_norm(mixed + i * dv, layer->gain, dv, (float)model->eps, mixed + i * dv);
    for (int64_t i = 0; i < group * dv; i += LANES) {
        int64_t some = group * dv - i < LANES ? group * dv - i : LANES;
        store_some(load_some(mixed + i, some, 0) * silu_lanes(load_some(z + i, some, 0)), some, mixed + i);
    }
}

static void trunk_chunk(const struct linear *map, struct vectors x, struct vectors y,
                        int64_t batch_slots, int64_t chunk)
{
    struct span rows = rows_of(map, map->out, chunk);
    linear_rows(map, x, y, batch_slots, rows.from, rows.to);
    for (int64_t batch_slot = 0; batch_slot < batch_slots; batch_slot++)
        silu(of_batch_slot(y, batch_slot), rows.from, rows.to);
}

/* activation(gate) * up into the first half of `y`; the matrix is the gate above the up projection. */
static void gated_chunk(const struct linear *map, int64_t is_gelu, struct vectors x, struct vectors y,
                        int64_t batch_slots, int64_t chunk)
{
    int64_t inner = map->out / 2;
    struct span rows = rows_of(map, inner, chunk);
    linear_rows(map, x, y, batch_slots, rows.from, rows.to);
    linear_rows(map, x, y, batch_slots, inner + rows.from, inner + rows.to);
    for (int64_t batch_slot = 0; batch_slot < batch_slots; batch_slot++) {
        float *act = of_batch_slot(y, batch_slot);
        (is_gelu ? gelu : silu)(act, rows.from, rows.to);
#pragma omp simd
        for (int64_t i = rows.from; i < rows.to; i++)
            act[i] *= act[inner + i];
    }
}

/* log_beta = logsigmoid(z) of this layer's heads, in the form that keeps 1 - beta = 1.5e-8. */
static void store_gates(const struct model *model, const struct layer *layer, struct cache *cache,
                        const float *trunk, float *made)
{
    for (int64_t head = 0; head < model->kv_heads; head++) {
        float z[1];
        dot_rows(layer->readout.weight + head * layer->readout.in, 1, layer->readout.in, trunk, z);
        z[0] += layer->readout.bias[head];
        int64_t row = layer->entry * model->kv_heads + head;
        made[row] = cache->log_beta[newest_slot(cache, row)] =
            (z[0] < 0 ? z[0] : 0.0f) - log1pf(expf(-fabsf(z[0])));
    }
}

/* Input of a phase as `map` reads it: in codes, or rounded; made with a thread's first chunk. */
static struct vectors coded(const struct linear *map, struct vectors x, struct worker *me, int *taken)
{
    if (carve_states(map, me->batch_slots, me->coded, &x) > 0 && !*taken)
        states_part(map, x, me->batch_slots, 0, 1);
    *taken = 1;
    return x;
}

/* Normed input of a phase, taken with a thread's first chunk of it. */
static struct vectors normed(const struct model *model, const float *gain, const struct linear *map,
                             struct worker *me, int *taken)
{
    for (int64_t batch_slot = 0; batch_slot < me->batch_slots && !*taken; batch_slot++)
        rms_norm(of_batch_slot(me->hidden, batch_slot), gain, model->hidden, (float)model->eps,
                 of_batch_slot(me->normed, batch_slot));
    struct vectors x = coded(map, me->normed, me, taken);
    *taken = 1;
    return x;
}

/* Copy out the states after layer `after`, where they are asked for. They stay as they are until all
 * chunks of the phase are done. */
static void copy_taps(int64_t after, int64_t hidden, struct worker *me)
{
    const struct step *step = me->step;
    for (int64_t i = 0; i < step->taps; i++)
        for (int64_t slot = 0; step->tap_layer[i] == after && slot < me->batch_slots; slot++)
            memcpy(step->tapped + (i * me->batch_slots + slot) * hidden,
                   of_batch_slot(me->hidden, slot), sizeof(float) * hidden);
}

static void project(const struct model *model, int64_t index, struct worker *me)
{
    const struct layer *layer = model->layer + index;
    const struct linear *beside = layer->entry < 0 ? &layer->rates : &layer->trunk[0];
    int64_t qkv = chunks_of(&layer->qkv, layer->qkv.out);
    int64_t both = qkv;
    if (layer->entry < 0 || model->trunk > 0)
        both += chunks_of(beside, beside->out);
    int taken = 0;
    begin(me, both + (me->step->taps > 0));
    for (int64_t chunk; (chunk = claim(me)) >= 0; finish(me)) {
        if (chunk == both) {
            copy_taps(index - 1, model->hidden, me);
            continue;
        }
        struct vectors x = normed(model, layer->input_norm, &layer->qkv, me, &taken);
        struct span rows = rows_of(&layer->qkv, layer->qkv.out, chunk);
        if (chunk < qkv)
            linear_rows(&layer->qkv, x, me->qkv, me->batch_slots, rows.from, rows.to);
        else if (layer->entry >= 0)
            trunk_chunk(beside, x, me->trunk[0], me->batch_slots, chunk - qkv);
        else {
            rows = rows_of(beside, beside->out, chunk - qkv);
            linear_rows(beside, x, me->rates, me->batch_slots, rows.from, rows.to);
        }
    }
    end(me);
}

static void mix(const struct model *model, const struct layer *layer, struct worker *me)
{
    int64_t heads = model->key_heads;
    begin(me, me->batch_slots * heads);
    for (int64_t chunk; (chunk = claim(me)) >= 0; finish(me))
        mix_head(model, layer, chunk % heads, chunk / heads, me);
    end(me);
}

static void attend(const struct model *model, struct cache *caches, const struct layer *layer,
                   struct worker *me)
{
    const struct linear *trunk = &layer->trunk[1];
    int64_t heads = model->kv_heads, rows = me->batch_slots * heads;
    begin(me, rows + (model->trunk > 1 ? chunks_of(trunk, trunk->out) : 0));
    for (int64_t chunk; (chunk = claim(me)) >= 0; finish(me)) {
        int64_t batch_slot = chunk / heads;
        if (chunk >= rows)
            trunk_chunk(trunk, me->trunk[0], me->trunk[1], me->batch_slots, chunk - rows);
        else if (!goes_on(caches, batch_slot))
            attend_head(model, layer, caches, chunk % heads, batch_slot, me);
    }
    end(me);
}

/* hidden += the norm of what is made; a norm reads all rows, so that it is a phase of its own. */
static void add_normed(const struct model *model, const float *gain, struct worker *me)
{
    begin(me, me->batch_slots);
    for (int64_t slot; (slot = claim(me)) >= 0; finish(me)) {
        float *made = of_batch_slot(me->made, slot), *restrict hidden = of_batch_slot(me->hidden, slot);
        rms_norm(made, gain, model->hidden, (float)model->eps, made);
#pragma omp simd
        for (int64_t i = 0; i < model->hidden; i++)
            hidden[i] += made[i];
    }
    end(me);
}

/* hidden += map x, normed if there is a gain; one chunk more reads the gates when `caches` are given. */
static void add(const struct model *model, const struct layer *layer, const struct linear *map,
                const float *gain, struct vectors x, struct cache *caches, struct worker *me)
{
    int64_t chunks = chunks_of(map, map->out);
    int taken = 0;
    begin(me, chunks + (caches != 0));
    for (int64_t chunk; (chunk = claim(me)) >= 0; finish(me)) {
        struct span rows = rows_of(map, map->out, chunk);
        if (chunk < chunks)
            (gain ? linear_rows : linear_add_rows)(map, coded(map, x, me, &taken), gain ? me->made : me->hidden,
                                                   me->batch_slots, rows.from, rows.to);
        else
            for (int64_t batch_slot = 0; batch_slot < me->batch_slots; batch_slot++)
                store_gates(model, layer, caches + batch_slot,
                            of_batch_slot(me->trunk[model->trunk - 1], batch_slot),
                            me->step->log_beta + batch_slot * caches->rows);
    }
    end(me);
    if (gain)
        add_normed(model, gain, me);
}

static void widen(const struct model *model, const struct layer *layer, struct worker *me)
{
    int taken = 0;
    begin(me, chunks_of(&layer->gate_up, layer->gate_up.out / 2));
    for (int64_t chunk; (chunk = claim(me)) >= 0; finish(me))
        gated_chunk(&layer->gate_up, model->gelu,
                    normed(model, layer->post_norm, &layer->gate_up, me, &taken), me->act,
                    me->batch_slots, chunk);
    end(me);
}

/* What `route` has of a batch slot: the experts' shares, the weights of those that are chosen and of the
 * one that every token goes through, and which are chosen. */
struct routed {
    float *share, *weight, *chosen;
};

static struct routed routed_of(const struct model *model, const struct layer *layer,
                               const struct worker *me, int64_t batch_slot)
{
    float *at = of_batch_slot(me->route, batch_slot);
    return (struct routed){at, at + layer->router.out, at + layer->router.out + model->chosen + 1};
}

/* Choose a batch slot's experts: the largest shares of a softmax, of equal ones the first. */
static void choose_experts(const struct model *model, const struct layer *layer, int64_t batch_slot,
                           struct worker *me)
{
    struct routed to = routed_of(model, layer, me, batch_slot);
    struct vectors x = {.at = of_batch_slot(me->post, batch_slot)}, y = {.at = to.share};
    int64_t experts = layer->router.out;
    float greatest = -INFINITY, total = 0, picked = 0;
    rms_norm(of_batch_slot(me->hidden, batch_slot), layer->post_norm, model->hidden, (float)model->eps,
             x.at);
    linear_rows(&layer->router, x, y, 1, 0, experts);
    for (int64_t i = 0; i < experts; i++)
        greatest = to.share[i] > greatest ? to.share[i] : greatest;
    for (int64_t i = 0; i < experts; i++)
        total += to.share[i] = expf(to.share[i] - greatest);
    for (int64_t k = 0; k < model->chosen; k++) {
        int64_t best = 0;
        for (int64_t i = 1; i < experts; i++)
            best = to.share[i] > to.share[best] ? i : best;
        to.chosen[k] = (float)best; /* whole up to 2^24 */
        picked += to.weight[k] = to.share[best];
        to.share[best] = -1;
    }
    for (int64_t k = 0; k < model->chosen; k++)
        to.weight[k] /= model->normalized ? picked : total;
    if (layer->shared_gate.out) {
        y.at = to.weight + model->chosen;
        linear_rows(&layer->shared_gate, x, y, 1, 0, 1);
        *y.at = logistic(*y.at);
    }
}

/* The k-th MLP that a batch slot's token goes through; the last one may be the shared one. */
static struct expert expert_of(const struct model *model, const struct layer *layer, int64_t k,
                               int64_t batch_slot, struct worker *me)
{
    if (k == model->chosen)
        return (struct expert){layer->shared_gate_up, layer->shared_down};
    return layer->experts[(int64_t)routed_of(model, layer, me, batch_slot).chosen[k]];
}

/* Take each token through its experts, one after the other, whose weight goes to what is between their
 * matrices. No token's sums depend on its company. */
static void mixture(const struct model *model, const struct layer *layer, struct worker *me)
{
    int64_t each = layer->experts->gate_up.out, inner = each / 2, chosen = model->chosen;
    int64_t of_chosen = chunks_of(&layer->experts->gate_up, inner), shared = layer->shared_gate_up.out;
    int64_t of_slot = chosen * of_chosen + (shared ? chunks_of(&layer->shared_gate_up, shared / 2) : 0);
    begin(me, me->batch_slots);
    for (int64_t slot; (slot = claim(me)) >= 0; finish(me))
        choose_experts(model, layer, slot, me);
    end(me);
    begin(me, me->batch_slots * of_slot);
    for (int64_t chunk; (chunk = claim(me)) >= 0; finish(me)) {
        int64_t slot = chunk / of_slot, at = chunk % of_slot, k = at / of_chosen;
        k = k < chosen ? k : chosen;
        struct expert expert = expert_of(model, layer, k, slot, me);
        struct vectors x = {.at = of_batch_slot(me->post, slot)};
        struct vectors y = {.at = of_batch_slot(me->act, slot) + k * each};
        struct span rows = rows_of(&expert.gate_up, expert.gate_up.out / 2, at - k * of_chosen);
        float weight = routed_of(model, layer, me, slot).weight[k];
        gated_chunk(&expert.gate_up, model->gelu, x, y, 1, at - k * of_chosen);
        for (int64_t i = rows.from; i < rows.to; i++)
            y.at[i] *= weight;
    }
    end(me);
    int64_t chunks = chunks_of(&layer->experts->down, model->hidden), normed = layer->mlp_out_norm != 0;
    struct vectors to = normed ? me->made : me->hidden;
    begin(me, me->batch_slots * chunks);
    for (int64_t chunk; (chunk = claim(me)) >= 0; finish(me)) {
        int64_t slot = chunk / chunks;
        struct vectors y = {.at = of_batch_slot(to, slot)};
        struct span rows = rows_of(&layer->experts->down, model->hidden, chunk % chunks);
        for (int64_t k = 0; k < chosen + (shared > 0); k++) {
            struct expert expert = expert_of(model, layer, k, slot, me);
            struct vectors x = {.at = of_batch_slot(me->act, slot) + k * each};
            (normed && !k ? linear_rows : linear_add_rows)(&expert.down, x, y, 1, rows.from, rows.to);
        }
    }
    end(me);
    if (normed)
        add_normed(model, layer->mlp_out_norm, me);
}

static void read_out(const struct model *model, struct vectors logits, struct worker *me)
{
    const struct linear *head = &model->head;
    int64_t chunks = chunks_of(head, head->out);
    int taken = 0;
    begin(me, chunks + (me->step->taps > 0));
    for (int64_t chunk; (chunk = claim(me)) >= 0; finish(me)) {
        if (chunk == chunks) {
            copy_taps(model->layers - 1, model->hidden, me);
            continue;
        }
        struct span rows = rows_of(head, head->out, chunk);
        linear_rows(head, normed(model, model->norm, head, me, &taken), logits, me->batch_slots,
                    rows.from, rows.to);
    }
    end(me);
}

static void run_thread(const struct model *model, struct cache *caches, struct vectors logits,
                       struct worker *me)
{
    me->chunks_before = 0;
    for (int64_t index = 0; index < model->layers; index++) {
        const struct layer *layer = model->layer + index;
        project(model, index, me);
        if (layer->entry < 0)
            mix(model, layer, me);
        else
            attend(model, caches, layer, me);
        struct cache *gated = layer->entry >= 0 && model->trunk > 0 ? caches : 0;
        add(model, layer, &layer->out, layer->attention_out_norm, me->mixed, gated, me);
        if (layer->experts) {
            mixture(model, layer, me);
            continue;
        }
        widen(model, layer, me);
        add(model, layer, &layer->down, layer->mlp_out_norm, me->act, 0, me);
    }
    read_out(model, logits, me);
}

/* Append the batch slot's token; embedding row and rotation into the first thread's view. */
static void start_batch_slot(const struct model *model, const struct step *step, int64_t batch_slot,
                       struct worker *first)
{
    const struct batch_slot *mine = step->batch_slot + batch_slot;
    float *cos = of_batch_slot(first->cos, batch_slot), *sin = of_batch_slot(first->sin, batch_slot);
    float *hidden = of_batch_slot(first->hidden, batch_slot);
    copy_row(&model->embed, mine->token, hidden);
    for (int64_t i = 0; model->embed_scale != 1 && i < model->hidden; i++)
        hidden[i] *= (float)model->embed_scale;
    for (int64_t i = 0; i < model->angles * model->rotary / 2; i++) {
        float angle = (float)mine->rope_position * mine->inv_freq[i];
        float scale = (float)step->rope_scale[i >= model->rotary / 2];
        cos[i] = cosf(angle) * scale;
        sin[i] = sinf(angle) * scale;
    }
}

static int has_room(const struct cache *caches, struct step *step)
{
    step->pages = step->width = step->longest = 0;
    for (int64_t batch_slot = 0, before = 0; batch_slot < step->batch_slots; batch_slot++) {
        before = goes_on(caches, batch_slot) ? before + 1 : 0;
        plan_append(caches + batch_slot, before, step);
    }
    return step->pages <= caches->free && step->width <= caches->width &&
           step->longest <= step->room;
}

static int64_t nanoseconds(void)
{
    struct timespec now;
#ifdef CLOCK_MONOTONIC
    clock_gettime(CLOCK_MONOTONIC, &now);
#else
    timespec_get(&now, TIME_UTC);
#endif
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Append one token to each batch slot's sequence, compute its logits, [batch slots, vocab], and evict what
 * was ordered; or, without room, change nothing. Batch slots side by side may be tokens of one sequence, one
 * after the other (`behind` of its caches), where no layer keeps a state; each computes what it would alone.
 * The caches share one stack of free pages: the first says how many there are, and all of them afterwards. */
EXPORT void mmkv_step(const struct model *model, struct cache *caches, struct step *step)
{
    struct vectors logits = {.at = step->logits, .stride = model->head.out};
    struct worker first;
    step->done = has_room(caches, step);
    if (!step->done)
        return;
    memset(step->scratch, 0, sizeof(struct phase) * (size_t)(PHASES * model->layers + 1));
    carve(model, step->room, step->threads, 0, step->batch_slots, step->scratch, &first);
    for (int64_t batch_slot = 0; batch_slot < step->batch_slots; batch_slot++) {
        caches[batch_slot].free = caches[batch_slot ? batch_slot - 1 : 0].free;
        append_entry(caches + batch_slot, step->batch_slot[batch_slot].position);
        start_batch_slot(model, step, batch_slot, &first);
    }
    for (int64_t batch_slot = 0; batch_slot < step->batch_slots; batch_slot++)
        caches[batch_slot].free = caches[step->batch_slots - 1].free;
#pragma omp parallel for num_threads((int)step->threads) schedule(static, 1) if (step->threads > 1)
    for (int64_t thread = 0; thread < step->threads; thread++) {
        struct worker me;
        me.step = step;
        carve(model, step->room, step->threads, thread, step->batch_slots, step->scratch, &me);
        run_thread(model, caches, logits, &me);
    }
    if (step->requests) {
        int64_t begun = nanoseconds();
        mmkv_evict(caches, step->requests, step->batch_slots, step->threads);
        step->evicting += nanoseconds() - begun;
    }
}

/* Sizes of the structures, for the loader to compare with its own. */
EXPORT int64_t mmkv_layout(int64_t *sizes)
{
    int64_t of[] = {sizeof(struct linear), sizeof(struct layer), sizeof(struct model),
                    sizeof(struct cache),  sizeof(struct batch_slot),  sizeof(struct step),
                    sizeof(struct eviction), sizeof(struct window), sizeof(struct patches),
                    sizeof(struct delta_tokens), sizeof(struct expert)};
    memcpy(sizes, of, sizeof of);
    return (int64_t)(sizeof of / sizeof *of);
}
