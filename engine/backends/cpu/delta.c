/* The gated delta rule (Yang et al., arXiv 2412.06464) and the short convolution before it;
 * engine/model/delta.py has the formulas.
 *
 * A column of a value head's state does not know the others: a step takes some columns at a time, which
 * stay in the nearest cache between their reading and their change. A chunk takes BLOCK tokens at a time,
 * so that a state is read and written once for all of them; more would cost more products among tokens
 * than they spare. A head's numbers do not depend, not in one bit, on threads, nor on other sequences. */
#include <math.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "native.h"
#include "vectors.h"
#include "vmath.h"

#define BLOCK 16
#define ROWS 4     /* rows of a product that are summed together */
#define SPAN 256   /* channels that are convolved together */
#define EPS 1e-6f  /* added to the squared length of a query or key */
#if LANES == 16
#define COLUMN_VECTORS 2 /* of a state in a step: with 128 rows 16 KiB */
#define VECTORS 4        /* of a product: ROWS times as many sums fit the registers */
#else
#define COLUMN_VECTORS 4
#define VECTORS 2
#endif

static int64_t filled_up(int64_t count, int64_t to)
{
    return (count + to - 1) / to * to;
}

/* exp(x) for x <= 0, of 0 where it would only make subnormal numbers of what it multiplies. */
static float decay_of(double x)
{
    return x < -60 ? 0.0f : exp_float((float)x);
}

/* to [dim] = x / |x| * scale. */
static void unit(const float *x, int64_t dim, float scale, float *to)
{
    float square;
    dot_rows(x, 1, dim, x, &square);
    scale /= sqrtf(square + EPS);
    for (int64_t i = 0; i < dim; i++)
        to[i] = x[i] * scale;
}

INLINE void step_columns(float *state, int64_t dk, int64_t dv, const float *q, const float *k,
                         const float *v, float decay, float beta, float kq, int vectors, float *out)
{
    lanes of_key[COLUMN_VECTORS] = {{0}}, of_query[COLUMN_VECTORS] = {{0}};
    for (int64_t i = 0; i < dk; i++)
        for (int n = 0; n < vectors; n++) {
            lanes held = load(state + i * dv + n * LANES);
            of_key[n] += held * k[i];
            of_query[n] += held * q[i];
        }
    for (int n = 0; n < vectors; n++) {
        of_key[n] = (load(v + n * LANES) - of_key[n] * decay) * beta; /* delta */
        of_query[n] = of_query[n] * decay + of_key[n] * kq;
        memcpy(out + n * LANES, &of_query[n], sizeof of_query[n]);
    }
    for (int64_t i = 0; i < dk; i++)
        for (int n = 0; n < vectors; n++) {
            float *at = state + i * dv + n * LANES;
            lanes held = load(at) * decay + of_key[n] * k[i];
            memcpy(at, &held, sizeof held);
        }
}

/* One token and one value head: state [dk, dv], q and k [dk] of unit length, q over the root of dk. */
static void step_head(float *state, int64_t dk, int64_t dv, const float *q, const float *k,
                      const float *v, float g, float beta, float *out)
{
    float decay = decay_of(g), kq;
    int64_t at = 0;
    dot_rows(k, 1, dk, q, &kq);
    for (; at + COLUMN_VECTORS * LANES <= dv; at += COLUMN_VECTORS * LANES)
        step_columns(state + at, dk, dv, q, k, v + at, decay, beta, kq, COLUMN_VECTORS, out + at);
    for (; at + LANES <= dv; at += LANES)
        step_columns(state + at, dk, dv, q, k, v + at, decay, beta, kq, 1, out + at);
    for (; at < dv; at++) {
        float of_key = 0, of_query = 0;
        for (int64_t i = 0; i < dk; i++) {
            of_key += state[i * dv + at] * k[i];
            of_query += state[i * dv + at] * q[i];
        }
        float delta = (v[at] - of_key * decay) * beta;
        out[at] = of_query * decay + delta * kq;
        for (int64_t i = 0; i < dk; i++)
            state[i * dv + at] = state[i * dv + at] * decay + delta * k[i];
    }
}

/* One token and one key head, with the value heads that it serves. q, k [dk]; v, out [group, dv]; g, beta
 * [group]; state [group, dk, dv]. */
void delta_group(float *state, int64_t group, int64_t dk, int64_t dv, const float *q, const float *k,
                 const float *v, const float *g, const float *beta, float *out)
{
    float query[dk], key[dk];
    unit(q, dk, 1 / sqrtf((float)dk), query);
    unit(k, dk, 1, key);
    for (int64_t head = 0; head < group; head++)
        step_head(state + head * dk * dv, dk, dv, query, key, v + head * dv, g[head], beta[head],
                  out + head * dv);
}

/* One token of each of `tokens` sequences, whose states [heads, dk, dv] lie in their slots. */
EXPORT void mmkv_delta_step(const struct delta_tokens *what, float *states, const int64_t *slot, int64_t threads)
{
    int64_t group = what->value_heads / what->key_heads, dk = what->dk, dv = what->dv;
#pragma omp parallel for num_threads((int)threads) schedule(static) if (threads > 1)
    for (int64_t item = 0; item < what->tokens * what->key_heads; item++) {
        int64_t token = item / what->key_heads, head = item % what->key_heads;
        int64_t first = head * group, at = token * what->value_heads + first;
        delta_group(states + (slot[token] * what->value_heads + first) * dk * dv, group, dk, dv,
                    what->query + token * what->stride[0] + head * dk,
                    what->key + token * what->stride[1] + head * dk,
                    what->value + token * what->stride[2] + first * dv, what->g + at,
                    what->beta + at, what->out + at * dv);
    }
}

/* What one thread works in; `deep` and `filled` are dk and dv, up to whole ROWS and vectors. */
struct room {
    int64_t deep, filled;
    float *rows;     /* [2 BLOCK, deep]: keys, then queries */
    float *columns;  /* [deep, BLOCK]: keys */
    float *products; /* [2 BLOCK, BLOCK]: of rows with keys */
    float *seen;     /* [2 BLOCK, filled]: of rows with the state */
    float *deltas;   /* [BLOCK, filled] */
    float *state;    /* [deep, filled] */
};

/* Cut a thread's room from `base` (NULL: to measure); returns its size in floats. */
static int64_t carve(int64_t dk, int64_t dv, float *base, struct room *room)
{
    int64_t deep = filled_up(dk, ROWS), filled = filled_up(dv, LANES), at = 0;
    int64_t size[] = {2 * BLOCK * deep, deep * BLOCK,   2 * BLOCK * BLOCK,
                      2 * BLOCK * filled, BLOCK * filled, deep * filled};
    float **part[] = {&room->rows, &room->columns, &room->products,
                      &room->seen, &room->deltas,  &room->state};
    room->deep = deep, room->filled = filled;
    for (int i = 0; i < 6; i++) {
        *part[i] = base ? base + at : 0;
        at += filled_up(size[i], 16); /* a cache line */
    }
    return at;
}

/* c = keep c + a b, of ROWS rows of a [depth] and some vectors of b; keep 0: c is not read. */
INLINE void product_tile(const float *a, int64_t a_stride, const float *b, int64_t b_stride,
                         int64_t depth, float keep, int vectors, float *c, int64_t c_stride)
{
    lanes sums[ROWS][VECTORS] = {{{0}}};
    for (int r = 0; keep != 0 && r < ROWS; r++)
        for (int n = 0; n < vectors; n++)
            sums[r][n] = load(c + r * c_stride + n * LANES) * keep;
    for (int64_t i = 0; i < depth; i++)
        for (int n = 0; n < vectors; n++) {
            lanes x = load(b + i * b_stride + n * LANES);
            for (int r = 0; r < ROWS; r++)
                sums[r][n] += x * a[r * a_stride + i];
        }
    for (int r = 0; r < ROWS; r++)
        memcpy(c + r * c_stride, sums[r], sizeof(lanes) * (size_t)vectors);
}

/* c [rows, width] = keep c + a [rows, depth] b [depth, width]; rows and width are whole tiles'. */
static void product(const float *a, int64_t a_stride, int64_t rows, const float *b, int64_t width,
                    int64_t depth, float keep, float *c)
{
    int64_t at = 0, step;
    for (; at < width; at += step) {
        step = width - at >= VECTORS * LANES ? VECTORS * LANES : LANES;
        for (int64_t row = 0; row < rows; row += ROWS) {
            const float *from = a + row * a_stride;
            if (step == LANES)
                product_tile(from, a_stride, b + at, width, depth, keep, 1, c + row * width + at, width);
            else
                product_tile(from, a_stride, b + at, width, depth, keep, VECTORS, c + row * width + at,
                             width);
        }
    }
}

/* to [width] = times (from + sum of share[i] rows[i]) over `count` rows [width]; `to` may be `from`. */
static void mix(const float *from, const float *share, const float *rows, int64_t count, int64_t width,
                float times, float *to)
{
    for (int64_t at = 0; at < width; at += LANES) {
        lanes sum = load(from + at);
        for (int64_t i = 0; i < count; i++)
            sum += load(rows + i * width + at) * share[i];
        sum *= times;
        memcpy(to + at, &sum, sizeof sum);
    }
}

/* Lay out the keys and queries of `count` tokens from `first` on; those missing to a block are zeros. */
static void lay_out(const struct delta_tokens *what, int64_t head, int64_t first, int64_t count,
                    const struct room *room)
{
    int64_t dk = what->dk, deep = room->deep;
    memset(room->rows, 0, sizeof(float) * (size_t)(2 * BLOCK * deep));
    for (int64_t t = 0; t < count; t++) {
        float *key = room->rows + t * deep;
        unit(what->key + (first + t) * what->stride[1] + head * dk, dk, 1, key);
        unit(what->query + (first + t) * what->stride[0] + head * dk, dk, 1 / sqrtf((float)dk),
             key + BLOCK * deep);
    }
    for (int64_t t = 0; t < BLOCK; t++)
        for (int64_t i = 0; i < deep; i++)
            room->columns[i * BLOCK + t] = room->rows[t * deep + i];
}

/* `count` tokens from `first` on, of one value head. */
static void take_block(const struct delta_tokens *what, int64_t head, int64_t first, int64_t count,
                       const struct room *room)
{
    int64_t heads = what->value_heads, dv = what->dv, filled = room->filled, deep = room->deep;
    double total[BLOCK], sum = 0; /* of g: in the thousands where a head forgets at once */
    const float *g = what->g + first * heads + head, *beta = what->beta + first * heads + head;
    for (int64_t t = 0; t < count; t++)
        total[t] = sum += g[t * heads];
    product(room->rows, deep, 2 * BLOCK, room->columns, BLOCK, deep, 0, room->products);
    product(room->rows, deep, 2 * BLOCK, room->state, filled, deep, 0, room->seen);
    for (int64_t t = 0; t < count; t++) {
        float *key = room->products + t * BLOCK, *query = key + BLOCK * BLOCK;
        float *delta = room->deltas + t * filled, *seen = room->seen + t * filled, out[filled];
        float decay = decay_of(total[t]);
        const float *value = what->value + (first + t) * what->stride[2] + head * dv;
        for (int64_t i = 0; i <= t; i++) {
            float since = decay_of(total[t] - total[i]);
            key[i] *= -since;
            query[i] *= since;
        }
        for (int64_t d = 0; d < filled; d++)
            delta[d] = (d < dv ? value[d] : 0) - decay * seen[d];
        mix(delta, key, room->deltas, t, filled, beta[t * heads], delta);
        seen += BLOCK * filled;
        for (int64_t d = 0; d < filled; d++)
            seen[d] *= decay;
        mix(seen, query, room->deltas, t + 1, filled, 1, out);
        memcpy(what->out + ((first + t) * heads + head) * dv, out, sizeof *out * (size_t)dv);
    }
    for (int64_t t = 0; t < count; t++) {
        float left = decay_of(sum - total[t]);
        for (int64_t d = 0; d < filled; d++)
            room->deltas[t * filled + d] *= left;
    }
    float keep = decay_of(sum);
    if (keep == 0)
        memset(room->state, 0, sizeof(float) * (size_t)(deep * filled));
    product(room->columns, BLOCK, deep, room->deltas, filled, count, keep, room->state);
}

static void take_head(const struct delta_tokens *what, int64_t head, float *state, const struct room *room)
{
    int64_t dk = what->dk, dv = what->dv, filled = room->filled;
    int64_t key_head = head / (what->value_heads / what->key_heads);
    memset(room->state, 0, sizeof(float) * (size_t)(room->deep * filled));
    for (int64_t i = 0; i < dk; i++)
        memcpy(room->state + i * filled, state + i * dv, sizeof(float) * (size_t)dv);
    for (int64_t first = 0; first < what->tokens; first += BLOCK) {
        int64_t left = what->tokens - first, count = left < BLOCK ? left : BLOCK;
        lay_out(what, key_head, first, count, room);
        take_block(what, head, first, count, room);
    }
    for (int64_t i = 0; i < dk; i++)
        memcpy(state + i * dv, room->state + i * filled, sizeof(float) * (size_t)dv);
}

/* Floats that each thread of mmkv_delta_chunk works in. */
EXPORT int64_t mmkv_delta_scratch(int64_t dk, int64_t dv)
{
    struct room unused;
    return carve(dk, dv, 0, &unused);
}

/* `tokens` tokens of one sequence, whose state [heads, dk, dv] becomes that after them. */
EXPORT void mmkv_delta_chunk(const struct delta_tokens *what, float *state, int64_t threads, float *scratch)
{
    int64_t size = mmkv_delta_scratch(what->dk, what->dv);
#pragma omp parallel for num_threads((int)threads) schedule(static) if (threads > 1)
    for (int64_t head = 0; head < what->value_heads; head++) {
        int64_t thread = 0;
        struct room room;
#ifdef _OPENMP
        thread = omp_get_thread_num();
#endif
        carve(what->dk, what->dv, scratch + thread * size, &room);
        take_head(what, head, state + head * what->dk * what->dv, &room);
    }
}

/* One token and the usual width of 4, of which compilers make vector code. */
static void conv_of_4(const float *restrict x, const float *restrict weight, float *restrict state,
                       int64_t count, float *restrict y)
{
#pragma omp simd
    for (int64_t c = 0; c < count; c++) {
        const float *by = weight + 4 * c;
        float *past = state + 3 * c, one = past[1], two = past[2], now = x[c];
        y[c] = past[0] * by[0] + one * by[1] + two * by[2] + now * by[3];
        past[0] = one, past[1] = two, past[2] = now;
    }
    silu(y, 0, count);
}

/* Channels from .. to-1, at most SPAN: y = silu(convolution) of x [tokens, channels], rows x_stride and
 * y_stride floats apart. weight [channels, taps], the newest token's last; state [channels, taps - 1], the
 * tokens before, which becomes that after them. */
static void conv_span(const float *x, int64_t x_stride, int64_t tokens, const float *weight, int64_t taps,
               float *state, int64_t from, int64_t to, float *y, int64_t y_stride)
{
    int64_t past = taps - 1, count = to - from;
    if (tokens == 1 && taps == 4) {
        conv_of_4(x + from, weight + 4 * from, state + 3 * from, count, y + from);
        return;
    }
    float by[taps][SPAN], before[taps][SPAN];
    for (int64_t c = 0; c < count; c++) {
        for (int64_t j = 0; j < taps; j++)
            by[j][c] = weight[(from + c) * taps + j];
        for (int64_t j = 0; j < past; j++)
            before[j][c] = state[(from + c) * past + j];
    }
    for (int64_t t = 0; t < tokens; t++) {
        float *restrict out = y + t * y_stride + from;
        const float *in[taps];
        for (int64_t j = 0; j < taps; j++) {
            int64_t at = t - past + j;
            in[j] = at < 0 ? before[past + at] : x + at * x_stride + from;
        }
        if (taps == 4) { /* the usual: summed up in registers */
            const float *a = in[0], *b = in[1], *c = in[2], *d = in[3];
#pragma omp simd
            for (int64_t i = 0; i < count; i++)
                out[i] = a[i] * by[0][i] + b[i] * by[1][i] + c[i] * by[2][i] + d[i] * by[3][i];
            silu(out, 0, count);
            continue;
        }
        for (int64_t j = 0; j < taps; j++)
#pragma omp simd
            for (int64_t i = 0; i < count; i++)
                out[i] = (j ? out[i] : 0.0f) + in[j][i] * by[j][i];
        silu(out, 0, count);
    }
    for (int64_t j = 0; j < past; j++) {
        int64_t at = tokens - past + j;
        const float *in = at < 0 ? before[past + at] : x + at * x_stride + from;
        for (int64_t c = 0; c < count; c++)
            state[(from + c) * past + j] = in[c];
    }
}

/* One token: y [channels] in the place of channels from .. to-1. */
void conv_token(const float *x, const float *weight, int64_t taps, float *state, int64_t from, int64_t to,
                float *y)
{
    for (int64_t at = from; at < to; at += SPAN)
        conv_span(x, 0, 1, weight, taps, state, at, at + SPAN < to ? at + SPAN : to, y, 0);
}

/* y [batch, tokens, channels] of x alike, its rows `stride` floats apart, after the states of their slots. */
EXPORT void mmkv_conv(const float *x, int64_t stride, int64_t batch, int64_t tokens, int64_t channels,
                      const float *weight, int64_t taps, float *states, const int64_t *slot,
                      int64_t threads, float *y)
{
    int64_t spans = (channels + SPAN - 1) / SPAN;
#pragma omp parallel for num_threads((int)threads) schedule(static) if (threads > 1)
    for (int64_t item = 0; item < batch * spans; item++) {
        int64_t one = item / spans, from = item % spans * SPAN;
        int64_t to = from + SPAN < channels ? from + SPAN : channels;
        conv_span(x + one * tokens * stride, stride, tokens, weight, taps,
                  states + slot[one] * channels * (taps - 1), from, to, y + one * tokens * channels,
                  channels);
    }
}
