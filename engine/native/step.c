/* One decode step of one sequence, from the embedding row to the logits.
 *
 * One parallel region spans the step. Threads split the rows of every matrix and the KV heads of
 * attention, and meet at a barrier wherever one needs what another computed; norms are so cheap
 * that each thread takes its own. */
#include <math.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "native.h"
#include "vmath.h"

#ifdef _OPENMP
#define BARRIER _Pragma("omp barrier")
#else
#define BARRIER
#endif

/* Shared activations, then one private block per thread. */
struct scratch {
    float *hidden, *qkv, *mixed, *act, *trunk[MAX_TRUNK]; /* shared */
    float *normed, *scores;                              /* this thread's */
};

static int64_t lines(int64_t floats)
{
    return (floats + 15) / 16 * 16; /* whole cache lines: threads do not share one */
}

/* Lay out the scratch of one thread at `base` (or only measure it); returns all floats needed. */
static int64_t carve(const struct model *model, int64_t longest, int64_t threads, int64_t thread,
                     float *base, struct scratch *to)
{
    const struct layer *layer = model->layer;
    int64_t at = 0;
    float **shared[] = {&to->hidden, &to->qkv, &to->mixed, &to->act, &to->trunk[0], &to->trunk[1]};
    int64_t size[] = {model->hidden,        layer->qkv.out,       model->heads * model->head_dim,
                      layer->gate_up.out,   layer->trunk[0].out,  layer->trunk[1].out};
    for (int i = 0; i < 6; i++) {
        *shared[i] = base ? base + at : 0;
        at += lines(size[i]);
    }
    int64_t normed = lines(model->hidden);
    int64_t own = normed + lines(model->heads / model->kv_heads * longest);
    to->normed = base ? base + at + thread * own : 0;
    to->scores = base ? to->normed + normed : 0;
    return at + threads * own;
}

/* Floats of scratch that mmkv_step needs for rows of up to `longest` entries. */
EXPORT int64_t mmkv_scratch(const struct model *model, int64_t longest, int64_t threads)
{
    struct scratch unused;
    return carve(model, longest, threads, 0, 0, &unused);
}

/* The first of `count` rows that thread `thread` of `threads` takes; see linear.c on the fours. */
static int64_t share(int64_t count, int64_t thread, int64_t threads)
{
    int64_t first = (count + 3) / 4 * thread / threads * 4;
    return first < count ? first : count;
}

static void rotate(float *x, const struct step *step, int64_t rotary)
{
    int64_t half = rotary / 2;
    for (int64_t i = 0; i < half; i++) {
        float low = x[i], high = x[i + half];
        x[i] = low * step->cos[i] + high * step->sin[i];
        x[i + half] = high * step->cos[i + half] + low * step->sin[i + half];
    }
}

/* Finish one KV head: norm and turn its queries and key, store key and value, attend. */
static void attend_head(const struct model *model, const struct layer *layer, struct cache *cache,
                        const struct step *step, int64_t index, int64_t head, struct scratch *at)
{
    int64_t dim = model->head_dim, group = model->heads / model->kv_heads;
    int64_t row = index * model->kv_heads + head;
    float *query = at->qkv + head * group * dim;
    float *key = at->qkv + (model->heads + head) * dim;
    const float *value = at->qkv + (model->heads + model->kv_heads + head) * dim;
    for (int64_t i = 0; i <= group; i++) {
        float *x = i < group ? query + i * dim : key;
        int64_t of = i < group ? head * group + i : model->heads + head;
        if (layer->qk_norm)
            rms_norm(x, layer->qk_norm + of * dim, dim, (float)model->eps, x);
        rotate(x, step, model->rotary);
    }
    int64_t slot = slot_of(cache, row, cache->length[row] - 1);
    memcpy(cache->keys + slot * dim, key, sizeof(float) * dim);
    memcpy(cache->values + slot * dim, value, sizeof(float) * dim);
    attend_row(cache, row, query, group, at->scores, at->mixed + head * group * dim);
}

static void silu(float *x, int64_t from, int64_t to)
{
#pragma omp simd
    for (int64_t i = from; i < to; i++)
        x[i] = x[i] / (1.0f + exp_float(-x[i]));
}

static void trunk_rows(const struct linear *map, const float *x, float *y, int64_t thread,
                       int64_t threads)
{
    int64_t from = share(map->out, thread, threads), to = share(map->out, thread + 1, threads);
    linear_rows(map, x, y, from, to);
    silu(y, from, to);
}

/* Rows of silu(gate) * up, left in the first half of `y`; the two halves of the matrix are the
 * gate and the up projection. */
static void swiglu_rows(const struct linear *map, const float *x, float *y, int64_t thread,
                        int64_t threads)
{
    int64_t inner = map->out / 2;
    int64_t from = share(inner, thread, threads), to = share(inner, thread + 1, threads);
    linear_rows(map, x, y, from, to);
    linear_rows(map, x, y, inner + from, inner + to);
    silu(y, from, to);
#pragma omp simd
    for (int64_t i = from; i < to; i++)
        y[i] *= y[inner + i];
}

static void add_rows(const struct linear *map, const float *x, float *y, int64_t thread,
                     int64_t threads)
{
    linear_add_rows(map, x, y, share(map->out, thread, threads),
                    share(map->out, thread + 1, threads));
}

/* log_beta = logsigmoid(z) of this layer's heads, in the form that keeps 1 - beta = 1.5e-8. */
static void store_gates(const struct model *model, const struct layer *layer, struct cache *cache,
                        int64_t index, const float *trunk)
{
    for (int64_t head = 0; head < model->kv_heads; head++) {
        float z[1];
        dot_rows(layer->readout.weight + head * layer->readout.in, 1, layer->readout.in, trunk, z);
        z[0] += layer->readout.bias[head];
        int64_t row = index * model->kv_heads + head;
        cache->log_beta[slot_of(cache, row, cache->length[row] - 1)] =
            (z[0] < 0 ? z[0] : 0.0f) - log1pf(expf(-fabsf(z[0])));
    }
}

static void run_layer(const struct model *model, struct cache *cache, const struct step *step,
                      int64_t index, int64_t thread, int64_t threads, struct scratch *at)
{
    const struct layer *layer = model->layer + index;
    float eps = (float)model->eps;
    rms_norm(at->hidden, layer->input_norm, model->hidden, eps, at->normed);
    linear_rows(&layer->qkv, at->normed, at->qkv, share(layer->qkv.out, thread, threads),
                share(layer->qkv.out, thread + 1, threads));
    if (model->trunk > 0)
        trunk_rows(&layer->trunk[0], at->normed, at->trunk[0], thread, threads);
    BARRIER;
    for (int64_t head = thread; head < model->kv_heads; head += threads)
        attend_head(model, layer, cache, step, index, head, at);
    if (model->trunk > 1)
        trunk_rows(&layer->trunk[1], at->trunk[0], at->trunk[1], thread, threads);
    BARRIER;
    add_rows(&layer->out, at->mixed, at->hidden, thread, threads);
    if (model->trunk > 0 && thread == threads - 1)
        store_gates(model, layer, cache, index, at->trunk[model->trunk - 1]);
    BARRIER;
    rms_norm(at->hidden, layer->post_norm, model->hidden, eps, at->normed);
    swiglu_rows(&layer->gate_up, at->normed, at->act, thread, threads);
    BARRIER;
    add_rows(&layer->down, at->act, at->hidden, thread, threads);
    BARRIER;
}

static void run_thread(const struct model *model, struct cache *cache, const struct step *step,
                       int64_t thread, int64_t threads)
{
    struct scratch at;
    carve(model, step->longest, threads, thread, step->scratch, &at);
    if (thread == 0)
        memcpy(at.hidden, model->embed + step->token * model->hidden,
               sizeof(float) * model->hidden);
    BARRIER;
    for (int64_t index = 0; index < model->layers; index++)
        run_layer(model, cache, step, index, thread, threads, &at);
    rms_norm(at.hidden, model->norm, model->hidden, (float)model->eps, at.normed);
    linear_rows(&model->head, at.normed, step->logits, share(model->head.out, thread, threads),
                share(model->head.out, thread + 1, threads));
}

/* Append one token and compute its logits. mmkv_plan has been asked and its wishes granted. */
EXPORT void mmkv_step(const struct model *model, struct cache *cache, const struct step *step)
{
    append_entry(cache, step->position);
#ifdef _OPENMP
#pragma omp parallel num_threads((int)step->threads)
    run_thread(model, cache, step, omp_get_thread_num(), omp_get_num_threads());
#else
    run_thread(model, cache, step, 0, 1);
#endif
}

/* Sizes of the structures, for the loader to compare with its own. */
EXPORT int64_t mmkv_layout(int64_t *sizes)
{
    int64_t of[] = {sizeof(struct linear), sizeof(struct layer), sizeof(struct model),
                    sizeof(struct cache),  sizeof(struct step),  sizeof(struct eviction)};
    memcpy(sizes, of, sizeof of);
    return (int64_t)(sizeof of / sizeof *of);
}
