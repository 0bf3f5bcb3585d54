/* Linear layers on rows of features. */

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
            const vf old = load(w + i * apart), weight = old - lr * v[i];
            store(w + i * apart, masked ? keep(old, weight, kept[k + i * apart / (2 * L)]) : weight);
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

/* Decay the momenta of the same weights, and add to them what corrects gradients. */
static void correct(const Chain *c, int64_t vectors, int64_t depth, int64_t apart, float *restrict w,
                    const float *restrict fixed) {
    for (int64_t i = 0; i < vectors; i++)
        for (int64_t at = i * apart; at < i * apart + depth * 2 * L; at += 2 * L) {
            const vf added = c->pull * (load(w + at) - load(fixed + at)) + load(fixed + at + L);
            store(w + at + L, load(w + at + L) * c->momentum + added);
        }
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

If steps are apart, an update only computes the gradients, and nothing is multiplied in the same call.

A block of weights is small enough to be still in the L1 cache when it is multiplied. Every other step runs
backwards, so that it begins with the blocks that were used last and may still be in the L2 cache. */
static void pass(const Chain *c, const Stage *s, const float *x, const float *next, int backwards) {
    const int64_t in = s->op.in, vectors = up(s->op.out, L), blocks = up(in, DEPTH), tile = c->tile * DEPTH;
    const int64_t x_step = blocks * tile, out_step = up(s->op.out, DEPTH) * tile, pairs = up(vectors, 2);
    for (int64_t i = 0; i < blocks * pairs; i++) {
        const int64_t at = backwards ? blocks * pairs - 1 - i : i, kb = at / pairs, hv = at % pairs * 2;
        const int64_t depth = least_of(DEPTH, in - kb * DEPTH), padded = up(depth, L) * L, apart = padded * 2 * L;
        const int64_t first = kb * DEPTH * vectors + hv * padded, out = hv * L / DEPTH * tile + hv * L % DEPTH;
        const int64_t both = hv + 1 < vectors;
        const Kernels *kernel = &kernels[c->tile / 2][both];
        const float beta = c->corrected ? 1.0f : c->momentum;
        float *w = (x && c->apart ? s->grads : s->weight) + first * 2 * L;
        for (int64_t t = 0; x && c->apart && t < c->tiles; t++)
            kernel->update[0](depth, apart, w, 0, x + kb * tile + t * x_step, s->grad + out + t * out_step,
                              t ? 1.0f : 0.0f, 0);
        if (x && c->apart) continue;
        if (x && c->corrected) correct(c, 1 + both, depth, apart, w, s->fixed + first * 2 * L);
        for (int64_t t = 0; x && t < c->tiles; t++)
            kernel->update[t < c->tiles - 1 ? 0 : c->masked ? 2 : 1](
                depth, apart, w, s->kept + first, x + kb * tile + t * x_step, s->grad + out + t * out_step,
                t ? 1.0f : beta, c->lr);
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
        if (c->apart) {
            store(s->bias_grads + 2 * h + L, g);
            continue;
        }
        if (c->corrected) correct(c, 1, 1, 0, s->bias + 2 * h, s->bias_fixed + 2 * h);
        const vf v = load(s->bias + 2 * h + L) * (c->corrected ? 1.0f : c->momentum) + g;
        const vf old = load(s->bias + 2 * h), value = old - c->lr * v;
        store(s->bias + 2 * h + L, v);
        store(s->bias + 2 * h, c->masked ? keep(old, value, s->bias_kept[h / L]) : value);
    }
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
