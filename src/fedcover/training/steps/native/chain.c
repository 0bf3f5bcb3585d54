/* One client's SGD steps on a chain of linear layers, ReLU and dropout, with cross entropy as the loss.

A step on a small batch is bound by memory bandwidth, so weights and momenta are read and written only once per step:
each block of the first layer's weights is multiplied by the next batch as soon as it is updated.

Layouts, with L lanes per vector:
  rows     [tile][f / DEPTH][row in tile][f % DEPTH]   activations and their gradients, one row for each example
  weights  [k / DEPTH][h / L][k % DEPTH][2][h % L]     a weight, then its momentum, for input k and output h
Padding in lanes and rows is zero. Sums are computed in a fixed order: equal input gives equal bits. */

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#if defined(__AVX512F__)
#define L 16
#define MOST 12 /* rows per tile: two vectors of outputs for each row must stay in registers */
#elif defined(__AVX__)
#define L 8
#define MOST 6
#else
#define L 4
#define MOST 6
#endif
#define DEPTH 128 /* features per block, a multiple of 2 L */
#define OPS 64
_Static_assert(DEPTH % (2 * L) == 0, "two vectors of outputs must be in one block");
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

typedef float vf __attribute__((vector_size(4 * L), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * L), may_alias));
typedef uint32_t vu __attribute__((vector_size(4 * L), may_alias));

enum { LINEAR, RELU, DROPOUT };

typedef struct {
    int64_t kind, in, out;
    int64_t weight, bias;  /* their first entries in theta; -1 if there is no bias */
    int64_t layer, least;  /* dropout: its number, and the smallest hash that is kept */
    double scale;          /* dropout: 1 / (1 - p) */
} Op;

typedef struct {
    float *theta, *velocity;
    const float *kept; /* 0 where an entry is pruned; NULL if none is */
    const float *inputs;
    const int64_t *labels, *order;
    int64_t examples, count, batch;
    int64_t step;
    uint64_t key;
    double lr, momentum;
    int64_t first, last; /* whether to load theta and velocity before, and to store them after */
    float *losses, *work;
} Job;

typedef struct {
    Op op;
    float *value, *scale, *grad; /* in rows: output, dropout's multipliers, gradient of a linear layer's output */
    float *weight, *bias;        /* with momenta; the bias is a weight matrix with one input */
    uint16_t *kept, *bias_kept;  /* one bit per lane */
} Stage;

typedef struct {
    Stage stages[OPS];
    int64_t ops, head;   /* the head is the first linear layer */
    int64_t tile, tiles; /* rows per tile, tiles per batch */
    float *x[2];         /* inputs of the head: this batch and the next */
    int masked;
    float lr, momentum;
} Chain;

INLINE int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to; }
INLINE int64_t least_of(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE vf load(const float *at) { return *(const vf *)at; }
INLINE void store(float *at, vf value) { *(vf *)at = value; }
INLINE vf all(float value) { return value - (vf){}; } /* not + 0, which would turn -0 into 0 */
INLINE vf zero_where(vi where, vf value) { return (vf)(~where & (vi)value); }

INLINE vi iota(void) {
    vi lanes;
    for (int i = 0; i < L; i++) lanes[i] = i;
    return lanes;
}

INLINE vf keep(vf value, uint16_t bits) {
    vi lanes = (vi){} + 1;
    lanes <<= iota();
    return zero_where((lanes & (int32_t)bits) == 0, value);
}

/* Return the position of feature f of a row, in rows of ``width`` features. */
INLINE int64_t place(const Chain *c, int64_t width, int64_t row, int64_t f) {
    const int64_t tile = c->tiles > 1 ? row / c->tile : 0; /* avoids the division, which takes longer than the rest */
    return ((tile * up(width, DEPTH) + f / DEPTH - tile) * c->tile + row) * DEPTH + f % DEPTH;
}

/* ---- weights ---- */

/* Update the weights of ``depth`` inputs and one or two vectors of outputs.

The weights of the second vector are ``apart`` floats after those of the first. The two share loads from x, since
loads take longer than arithmetic. */
INLINE void update(const int rows, const int vectors, const int apply, const int masked, int64_t depth, int64_t apart,
                   float *restrict w, const uint16_t *restrict kept, const float *restrict x, const float *restrict d,
                   float beta, float lr) {
    vf g[MOST][2];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int i = 0; i < vectors; i++) g[r][i] = load(d + r * DEPTH + i * L);
    for (int64_t k = 0; k < depth; k++, w += 2 * L) {
        vf v[2];
        UNROLL for (int i = 0; i < vectors; i++) v[i] = load(w + i * apart + L) * beta;
        UNROLL for (int r = 0; r < rows; r++) {
            const vf each = all(x[r * DEPTH + k]);
            UNROLL for (int i = 0; i < vectors; i++) v[i] += each * g[r][i];
        }
        UNROLL for (int i = 0; i < vectors; i++) {
            store(w + i * apart + L, v[i]);
            if (!apply) continue;
            const vf weight = load(w + i * apart) - lr * v[i];
            store(w + i * apart, masked ? keep(weight, kept[k + i * apart / (2 * L)]) : weight);
        }
    }
}

INLINE void forward(const int rows, const int vectors, int64_t depth, int64_t apart, const float *restrict w,
                    const float *restrict x, float *restrict out) {
    vf sum[MOST][2];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int i = 0; i < vectors; i++) sum[r][i] = load(out + r * DEPTH + i * L);
    for (int64_t k = 0; k < depth; k++, w += 2 * L) {
        vf weight[2];
        UNROLL for (int i = 0; i < vectors; i++) weight[i] = load(w + i * apart);
        UNROLL for (int r = 0; r < rows; r++) {
            const vf each = all(x[r * DEPTH + k]);
            UNROLL for (int i = 0; i < vectors; i++) sum[r][i] += each * weight[i];
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int i = 0; i < vectors; i++) store(out + r * DEPTH + i * L, sum[r][i]);
}

typedef void Update(int64_t, int64_t, float *, const uint16_t *, const float *, const float *, float, float);
typedef void Forward(int64_t, int64_t, const float *, const float *, float *);
typedef struct {
    Update *update[3]; /* only momentum; momentum and weight; momentum and masked weight */
    Forward *forward;
} Kernels;

#define UPDATE(name, rows, vectors, apply, masked)                                                                    \
    static void name(int64_t depth, int64_t apart, float *w, const uint16_t *kept, const float *x, const float *d,    \
                     float beta, float lr) {                                                                          \
        update(rows, vectors, apply, masked, depth, apart, w, kept, x, d, beta, lr);                                  \
    }
#define FORWARD(name, rows, vectors)                                                                                  \
    static void name(int64_t depth, int64_t apart, const float *w, const float *x, float *out) {                      \
        forward(rows, vectors, depth, apart, w, x, out);                                                              \
    }
#define KERNELS(rows, vectors)                                                                                        \
    UPDATE(add_##rows##_##vectors, rows, vectors, 0, 0)                                                               \
    UPDATE(apply_##rows##_##vectors, rows, vectors, 1, 0)                                                             \
    UPDATE(masked_##rows##_##vectors, rows, vectors, 1, 1)                                                            \
    FORWARD(forward_##rows##_##vectors, rows, vectors)
#define BOTH(rows) KERNELS(rows, 1) KERNELS(rows, 2)
#define NAMES(rows, vectors)                                                                                          \
    {{add_##rows##_##vectors, apply_##rows##_##vectors, masked_##rows##_##vectors}, forward_##rows##_##vectors}
#define ROW(rows) {NAMES(rows, 1), NAMES(rows, 2)}

BOTH(1) BOTH(2) BOTH(4) BOTH(6)
#if MOST > 6
BOTH(8) BOTH(10) BOTH(12)
#endif
static const Kernels kernels[][2] = {
    ROW(1), ROW(2), ROW(4), ROW(6),
#if MOST > 6
    ROW(8), ROW(10), ROW(12),
#endif
};

/* Update all of a layer's weights by (x, d) unless x is NULL, then multiply them by ``next`` unless it is NULL.

A block of weights is small enough to be still in the L1 cache when it is multiplied. Every other step runs
backwards, so that it begins with the blocks that were used last and may still be in the L2 cache. */
static void pass(const Chain *c, const Stage *s, const float *x, const float *next, int backwards) {
    const int64_t in = s->op.in, vectors = up(s->op.out, L), blocks = up(in, DEPTH), tile = c->tile * DEPTH;
    const int64_t x_step = blocks * tile, out_step = up(s->op.out, DEPTH) * tile, pairs = up(vectors, 2);
    for (int64_t i = 0; i < blocks * pairs; i++) {
        const int64_t at = backwards ? blocks * pairs - 1 - i : i, kb = at / pairs, hv = at % pairs * 2;
        const int64_t depth = least_of(DEPTH, in - kb * DEPTH), padded = up(depth, L) * L, apart = padded * 2 * L;
        const int64_t first = kb * DEPTH * vectors + hv * padded, out = hv * L / DEPTH * tile + hv * L % DEPTH;
        const Kernels *kernel = &kernels[c->tile / 2][hv + 1 < vectors];
        float *w = s->weight + first * 2 * L;
        for (int64_t t = 0; x && t < c->tiles; t++)
            kernel->update[t < c->tiles - 1 ? 0 : c->masked ? 2 : 1](
                depth, apart, w, s->kept + first, x + kb * tile + t * x_step, s->grad + out + t * out_step,
                t ? 1.0f : c->momentum, c->lr);
        for (int64_t t = 0; next && t < c->tiles; t++)
            kernel->forward(depth, apart, w, next + kb * tile + t * x_step, s->value + out + t * out_step);
    }
}

/* Initialise every row of a layer's output with the bias. */
static void begin(const Chain *c, const Stage *s) {
    for (int64_t h = 0; h < s->op.out; h += L)
        for (int64_t row = 0; row < c->tile * c->tiles; row++)
            store(s->value + place(c, s->op.out, row, h), s->bias ? load(s->bias + 2 * h) : (vf){});
}

static void update_bias(const Chain *c, const Stage *s) {
    for (int64_t h = 0; s->bias && h < s->op.out; h += L) {
        vf g = {};
        for (int64_t row = 0; row < c->tile * c->tiles; row++) g += load(s->grad + place(c, s->op.out, row, h));
        vf v = load(s->bias + 2 * h + L) * c->momentum + g, value = load(s->bias + 2 * h) - c->lr * v;
        store(s->bias + 2 * h + L, v);
        store(s->bias + 2 * h, c->masked ? keep(value, s->bias_kept[h / L]) : value);
    }
}

#if defined(__GNUC__) && !defined(__clang__)
#define PICK(a, b, from) __builtin_shuffle(a, b, from)
#else
INLINE vf pick(vf a, vf b, vi from) {
    vf out;
    UNROLL for (int i = 0; i < L; i++) out[i] = from[i] < L ? a[from[i]] : b[from[i] - L];
    return out;
}
#define PICK(a, b, from) pick(a, b, from)
#endif

/* Return the sums over the lanes of L vectors, as one vector. */
INLINE vf lane_sums(vf *v) {
    UNROLL for (int half = 1; half < L; half *= 2) {
        const vi from = iota() + ((iota() / half) & 1) * (L - half);
        UNROLL for (int i = 0; i < L / 2 / half; i++)
            v[i] = PICK(v[2 * i], v[2 * i + 1], from) + PICK(v[2 * i], v[2 * i + 1], from + half);
    }
    return v[0];
}

/* Compute the gradient of a layer's input: d W. */
static void input_gradient(const Chain *c, const Stage *s, float *dx) {
    const int64_t vectors = up(s->op.out, L);
    for (int64_t k = 0; k < s->op.in; k += L) {
        const int64_t kb = k / DEPTH, padded = up(least_of(DEPTH, s->op.in - kb * DEPTH), L) * L;
        const float *w = s->weight + (kb * DEPTH * vectors + k % DEPTH) * 2 * L;
        for (int64_t row = 0; row < c->tile * c->tiles; row++) {
            vf sum[L] = {};
            for (int64_t hv = 0; hv < vectors; hv++) {
                const vf d = load(s->grad + place(c, s->op.out, row, hv * L));
                UNROLL for (int i = 0; i < L; i++) sum[i] += load(w + (hv * padded + i) * 2 * L) * d;
            }
            store(dx + place(c, s->op.in, row, k), lane_sums(sum));
        }
    }
}

/* ---- operations without weights ---- */

INLINE vu mix(vu x) {
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

static uint32_t mix_one(uint32_t x) { return mix((vu){} + x)[0]; }

/* Apply dropout with the bits of dropout.py, and store the multipliers in ``scale`` unless it is NULL. */
static void drop(const Chain *c, const Op *op, uint64_t key, int64_t step, const float *in, float *out, float *scale) {
    const uint32_t client = mix_one(mix_one((uint32_t)key) ^ (uint32_t)(key >> 32));
    const uint32_t base = mix_one(client + (uint32_t)step * 0x9E3779B1u + (uint32_t)op->layer);
    const vf stays = all((float)op->scale);
    for (int64_t row = 0; row < c->tile * c->tiles; row++)
        for (int64_t f = 0; f < op->in; f += L) {
            const vu number = mix((vu)iota() + (base + (uint32_t)(row * op->in + f)));
            const vf multiplier = zero_where((vi)(number < (uint32_t)op->least), stays);
            const int64_t at = place(c, op->in, row, f);
            if (scale) store(scale + at, multiplier);
            store(out + at, load(in + at) * multiplier);
        }
}

static void relu(const Chain *c, const Op *op, const float *in, float *out) {
    for (int64_t row = 0; row < c->tile * c->tiles; row++)
        for (int64_t f = 0; f < op->in; f += L) {
            const int64_t at = place(c, op->in, row, f);
            store(out + at, zero_where(load(in + at) < 0, load(in + at)));
        }
}

/* Propagate a gradient back through ReLU or dropout, in place. */
static void backward(const Chain *c, const Stage *s, float *d) {
    for (int64_t row = 0; row < c->tile * c->tiles; row++)
        for (int64_t f = 0; f < s->op.in; f += L) {
            const int64_t at = place(c, s->op.in, row, f);
            if (s->op.kind == RELU) store(d + at, zero_where(load(s->value + at) <= 0, load(d + at)));
            else store(d + at, load(d + at) * load(s->scale + at));
        }
}

/* Return the mean loss of a batch, and store its gradient in d. */
static float cross_entropy(const Chain *c, int64_t classes, const float *scores, const int64_t *labels,
                           const int64_t *order, int64_t n, float *d) {
    double total = 0;
    for (int64_t row = 0; row < c->tile * c->tiles; row++) {
        float top = -INFINITY, sum = 0;
        for (int64_t k = 0; k < up(classes, L) * L; k++) d[place(c, classes, row, k)] = 0;
        if (row >= n) continue;
        const int64_t own = place(c, classes, row, labels[order[row]]);
        for (int64_t k = 0; k < classes; k++) {
            const float score = scores[place(c, classes, row, k)];
            if (score > top) top = score;
        }
        for (int64_t k = 0; k < classes; k++) {
            const int64_t at = place(c, classes, row, k);
            sum += d[at] = expf(scores[at] - top);
        }
        for (int64_t k = 0; k < classes; k++) d[place(c, classes, row, k)] /= sum * (float)n;
        d[own] -= 1.0f / (float)n;
        total += logf(sum) - (scores[own] - top);
    }
    return (float)(total / (double)n);
}

/* ---- one client ---- */

/* Lay out a chain in ``work``, and return the number of floats that it takes. */
static int64_t lay_out(Chain *c, const Op *ops, int64_t n, int64_t batch, float *work) {
    float *at = work;
    c->tiles = up(batch, MOST);
    c->tile = up(batch, c->tiles);
    if (c->tile > 1) c->tile += c->tile % 2;
    c->ops = n;
#define TAKE(floats) (at += up(floats, 16) * 16, at - up(floats, 16) * 16)
    for (c->head = 0; ops[c->head].kind != LINEAR;) c->head++;
    const int64_t rows = c->tile * c->tiles * DEPTH;
    for (int i = 0; i < 2; i++) c->x[i] = TAKE(up(ops[c->head].in, DEPTH) * rows);
    for (int64_t i = 0; i < n; i++) {
        Stage *s = &c->stages[i];
        const int64_t out = up(ops[i].out, DEPTH) * rows, entries = up(ops[i].in, L) * L * up(ops[i].out, L);
        *s = (Stage){.op = ops[i]};
        s->value = i < c->head ? 0 : TAKE(out);
        if (ops[i].kind == DROPOUT && i > c->head) s->scale = TAKE(out);
        if (ops[i].kind != LINEAR) continue;
        s->grad = TAKE(out);
        s->weight = TAKE(entries * 2 * L);
        s->kept = (uint16_t *)TAKE(up(entries, 2));
        if (ops[i].bias >= 0) s->bias = TAKE(up(ops[i].out, L) * 2 * L);
        s->bias_kept = (uint16_t *)TAKE(up(ops[i].out, L));
    }
    return at - work;
}

/* Copy a matrix between theta and the chain's layout, in which inputs are padded to a multiple of ``pad``. */
static void carry(const Job *job, int64_t from, int64_t in, int64_t out, int64_t pad, float *w, uint16_t *kept,
                  int back) {
    for (int64_t kb = 0; kb < in; kb += DEPTH)
        for (int64_t h0 = 0; h0 < out; h0 += L) {
            const int64_t depth = least_of(DEPTH, in - kb), lanes = least_of(L, out - h0);
            for (int64_t lane = 0; lane < lanes; lane++)
                for (int64_t k = 0; k < depth; k++) {
                    const int64_t at = from + (h0 + lane) * in + kb + k;
                    if (back) {
                        job->theta[at] = w[k * 2 * L + lane];
                        job->velocity[at] = w[k * 2 * L + L + lane];
                    } else {
                        w[k * 2 * L + lane] = job->theta[at];
                        w[k * 2 * L + L + lane] = job->velocity[at];
                        if (job->kept && job->kept[at] != 0) kept[k] |= (uint16_t)(1u << lane);
                    }
                }
            const int64_t padded = up(depth, pad) * pad;
            w += padded * 2 * L;
            kept += padded;
        }
}

static void carry_all(const Chain *c, const Job *job, int back) {
    for (int64_t i = c->head; i < c->ops; i++) {
        const Stage *s = &c->stages[i];
        if (s->op.kind != LINEAR) continue;
        carry(job, s->op.weight, s->op.in, s->op.out, L, s->weight, s->kept, back);
        if (s->bias) carry(job, s->op.bias, 1, s->op.out, 1, s->bias, s->bias_kept, back);
    }
}

/* Copy a batch into the head's input, through the layers before the head. */
static void enter(const Chain *c, const Job *job, int64_t batch, float *x) {
    const int64_t width = c->stages[c->head].op.in, begins = batch * job->batch;
    const int64_t n = least_of(job->batch, job->count - begins);
    for (int64_t row = 0; row < c->tile * c->tiles; row++)
        for (int64_t f = 0; f < width; f += DEPTH) {
            const size_t bytes = sizeof(float) * (size_t)least_of(DEPTH, width - f);
            float *to = x + place(c, width, row, f);
            if (row < n) memcpy(to, job->inputs + job->order[begins + row] * width + f, bytes);
            else memset(to, 0, bytes);
        }
    for (int64_t i = 0; i < c->head; i++) {
        const Op *op = &c->stages[i].op;
        if (op->kind == RELU) relu(c, op, x, x);
        else drop(c, op, job->key, job->step + batch, x, x, 0);
    }
}

int64_t fedcover_chain_size(const Op *ops, int64_t n, int64_t batch) {
    Chain c;
    return lay_out(&c, ops, n, batch, 0) + 16;
}

static int epoch(const Op *ops, int64_t n, const Job *job) {
    Chain chain, *c = &chain;
    const int64_t classes = ops[n - 1].out, batches = up(job->count, job->batch);
    for (int64_t i = 0; i < job->count; i++) {
        if (job->order[i] < 0 || job->order[i] >= job->examples) return 1;
        if (job->labels[job->order[i]] < 0 || job->labels[job->order[i]] >= classes) return 1;
    }
    float *work = (float *)(((uintptr_t)job->work + 63) / 64 * 64);
    const int64_t size = lay_out(c, ops, n, job->batch, work);
    c->masked = job->kept != 0;
    c->lr = (float)job->lr;
    c->momentum = (float)job->momentum;
    if (job->first) {
        memset(work, 0, sizeof(float) * (size_t)size);
        carry_all(c, job, 0);
    }
    const Stage *head = &c->stages[c->head], *end = &c->stages[n - 1];
    enter(c, job, 0, c->x[0]);
    begin(c, head);
    pass(c, head, 0, c->x[0], 0);
    for (int64_t batch = 0; batch < batches; batch++) {
        const int64_t begins = batch * job->batch, step = job->step + batch;
        for (const Stage *s = head + 1; s <= end; s++) {
            if (s->op.kind == RELU) relu(c, &s->op, s[-1].value, s->value);
            else if (s->op.kind == DROPOUT) drop(c, &s->op, job->key, step, s[-1].value, s->value, s->scale);
            else begin(c, s), pass(c, s, 0, s[-1].value, 0);
        }
        const Stage *layer = end;
        while (layer->op.kind != LINEAR) layer--;
        job->losses[batch] = cross_entropy(c, classes, end->value, job->labels, job->order + begins,
                                           least_of(job->batch, job->count - begins), layer->grad);
        for (const Stage *s = end; s > head; s--) {
            if (s->op.kind != LINEAR) {
                backward(c, s, layer->grad);
                continue;
            }
            while ((--layer)->op.kind != LINEAR) {}
            input_gradient(c, s, layer->grad);
            update_bias(c, s);
            pass(c, s, s[-1].value, 0, 0);
        }
        update_bias(c, head);
        float *x = c->x[batch % 2], *next = batch + 1 < batches ? c->x[(batch + 1) % 2] : 0;
        if (next) {
            enter(c, job, batch + 1, next);
            begin(c, head);
        }
        pass(c, head, x, next, batch % 2);
    }
    if (job->last) carry_all(c, job, 1);
    return 0;
}

/* Take the steps of one epoch; return 1, with nothing done, if a label or an index is out of range.

Denormal numbers (below 1e-38) count as 0: the momenta of a unit that has long been inactive become that small, and
arithmetic on them is slow. */
int fedcover_chain_epoch(const Op *ops, int64_t n, const Job *job) {
#if defined(__SSE__)
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040);
    const int failed = epoch(ops, n, job);
    _mm_setcsr(before);
    return failed;
#else
    return epoch(ops, n, job);
#endif
}
