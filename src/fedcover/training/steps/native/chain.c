/* One client's SGD steps on a chain of layers, with cross entropy as the loss.

A chain is linear layers, ReLU and dropout; convolutions and poolings may come before the first linear layer, the head.
A step on a small batch is bound by memory bandwidth, so weights and momenta of linear layers are read and written only
once per step. Without convolutions, each block of the head's weights is multiplied by the next batch as soon as it is
updated.

Layouts, with L lanes per vector:
  rows     [tile][f / DEPTH][row in tile][f % DEPTH]   activations and their gradients, one row for each example
  weights  [k / DEPTH][h / L][k % DEPTH][2][h % L]     a weight, then its momentum, for input k and output h
  images   [channel][y][x][example in group]           activations before the head and their gradients (see conv.h)
Padding in lanes and rows is zero in rows and weights. Sums are computed in a fixed order: equal input gives equal
bits. */

#include "vectors.h"

#include "chain.h"

#include "conv.h"
#include "images.h"
#include "linear.h"
#include "apart.h"

/* ---- operations on rows, without weights ---- */

/* Apply dropout with the bits of dropout.py, and store the multipliers in ``scale`` unless it is NULL. */
static void drop(const Chain *c, const Op *op, uint64_t key, int64_t step, const float *in, float *out, float *scale) {
    const uint32_t base = dropout_base(op, key, step);
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

/* Return whether there are convolutions or poolings, which are before the head. */
static int has_images(const Chain *c, const Op *ops) { return c->head && ops[0].channels[0]; }

/* Lay out a chain in ``work``, and return the number of floats that it takes. */
static int64_t lay_out(Chain *c, const Op *ops, int64_t n, const Job *job, float *work) {
    const int64_t batch = job->batch;
    float *at = work;
    c->corrected = is_corrected(job);
    c->apart = is_apart(job);
    c->tiles = up(batch, MOST);
    c->tile = up(batch, c->tiles);
    if (c->tile > 1) c->tile += c->tile % 2;
    c->ops = n;
    for (c->head = 0; ops[c->head].kind != LINEAR;) c->head++;
    const int64_t rows = c->tile * c->tiles * DEPTH;
    for (int i = 0; i < 2; i++) c->x[i] = TAKE(up(ops[c->head].in, DEPTH) * rows);
    if (has_images(c, ops)) at = lay_out_images(c, ops, batch, at);
    for (int64_t i = 0; i < n; i++) {
        Stage *s = &c->stages[i];
        if (i < c->head && has_images(c, ops)) continue;
        const int64_t out = up(ops[i].out, DEPTH) * rows, entries = up(ops[i].in, L) * L * up(ops[i].out, L);
        *s = (Stage){.op = ops[i]};
        s->value = i < c->head ? 0 : TAKE(out);
        if (ops[i].kind == DROPOUT && i > c->head) s->scale = TAKE(out);
        if (ops[i].kind != LINEAR) continue;
        s->grad = TAKE(out);
        s->weight = TAKE(entries * 2 * L);
        if (c->corrected) s->fixed = TAKE(entries * 2 * L);
        if (c->apart) s->grads = TAKE(entries * 2 * L);
        s->kept = (uint16_t *)TAKE(up(entries, 2));
        if (ops[i].bias >= 0) s->bias = TAKE(up(ops[i].out, L) * 2 * L);
        if (ops[i].bias >= 0 && c->corrected) s->bias_fixed = TAKE(up(ops[i].out, L) * 2 * L);
        if (ops[i].bias >= 0 && c->apart) s->bias_grads = TAKE(up(ops[i].out, L) * 2 * L);
        s->bias_kept = (uint16_t *)TAKE(up(ops[i].out, L));
    }
    return at - work;
}

/* Copy a matrix between theta and the chain's layout, in which inputs are padded to a multiple of ``pad``.

With ``fixed``, anchors and shifts go where weights and momenta are in ``w``. */
static void carry(const Job *job, int64_t from, int64_t in, int64_t out, int64_t pad, float *w, float *fixed,
                  uint16_t *kept, int back) {
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
                        if (fixed && job->anchor) fixed[k * 2 * L + lane] = job->anchor[at];
                        if (fixed && job->shift) fixed[k * 2 * L + L + lane] = job->shift[at];
                    }
                }
            const int64_t padded = up(depth, pad) * pad;
            w += padded * 2 * L;
            if (fixed) fixed += padded * 2 * L;
            kept += padded;
        }
}

static void carry_all(const Chain *c, const Job *job, int back) {
    for (int64_t i = c->head; i < c->ops; i++) {
        const Stage *s = &c->stages[i];
        if (s->op.kind != LINEAR) continue;
        carry(job, s->op.weight, s->op.in, s->op.out, L, s->weight, s->fixed, s->kept, back);
        if (s->bias) carry(job, s->op.bias, 1, s->op.out, 1, s->bias, s->bias_fixed, s->bias_kept, back);
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

int64_t fedcover_chain_size(const Op *ops, int64_t n, const Job *job) {
    Chain c;
    return lay_out(&c, ops, n, job, 0) + 16;
}

/* Compute the loss from the head's output, the gradients, and all updates after the head; return the loss. */
static float after_head(const Chain *c, const Job *job, int64_t batch, int64_t n) {
    const Stage *head = &c->stages[c->head], *end = &c->stages[c->ops - 1], *layer = end;
    for (const Stage *s = head + 1; s <= end; s++) {
        if (s->op.kind == RELU) relu(c, &s->op, s[-1].value, s->value);
        else if (s->op.kind == DROPOUT)
            drop(c, &s->op, job->key, job->step + batch, s[-1].value, s->value, s->scale);
        else begin(c, s), pass(c, s, 0, s[-1].value, 0);
    }
    while (layer->op.kind != LINEAR) layer--;
    const int64_t *order = job->order + batch * job->batch;
    const float loss = cross_entropy(c, end->op.out, end->value, job->labels, order, n, layer->grad);
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
    return loss;
}

/* Take the steps of one epoch of a chain of linear layers. */
static void rows_epoch(const Chain *c, const Job *job, int64_t batches) {
    const Stage *head = &c->stages[c->head];
    enter(c, job, 0, c->x[0]);
    begin(c, head);
    pass(c, head, 0, c->x[0], 0);
    for (int64_t batch = 0; batch < batches; batch++) {
        job->losses[batch] = after_head(c, job, batch, least_of(job->batch, job->count - batch * job->batch));
        update_bias(c, head);
        float *x = c->x[batch % 2], *next = batch + 1 < batches ? c->x[(batch + 1) % 2] : 0;
        if (next) enter(c, job, batch + 1, next);
        if (c->apart) {
            pass(c, head, x, 0, 0);
            step_apart(c, job);
        }
        if (next) begin(c, head);
        if (next || !c->apart) pass(c, head, c->apart ? 0 : x, next, batch % 2);
    }
}

/* Take the steps of one epoch of a chain with layers of images. */
static void images_epoch(const Chain *c, const Job *job, int64_t batches) {
    const Stage *head = &c->stages[c->head];
    for (int64_t batch = 0; batch < batches; batch++) {
        const int64_t n = least_of(job->batch, job->count - batch * job->batch);
        enter_images(c, job, batch, n, c->x[0]);
        begin(c, head);
        pass(c, head, 0, c->x[0], 0);
        job->losses[batch] = after_head(c, job, batch, n);
        input_gradient(c, head, c->x[1]);
        update_bias(c, head);
        pass(c, head, c->x[0], 0, 0);
        backward_images(c, job, n, c->x[1]);
        if (c->apart) step_apart(c, job);
    }
}

static int epoch(const Op *ops, int64_t n, const Job *job) {
    Chain chain, *c = &chain;
    const int64_t classes = ops[n - 1].out, batches = up(job->count, job->batch);
    for (int64_t i = 0; i < job->count; i++) {
        if (job->order[i] < 0 || job->order[i] >= job->examples) return 1;
        if (job->labels[job->order[i]] < 0 || job->labels[job->order[i]] >= classes) return 1;
    }
    float *work = (float *)(((uintptr_t)job->work + 63) / 64 * 64);
    const int64_t size = lay_out(c, ops, n, job, work);
    c->masked = job->kept != 0;
    c->lr = (float)job->lr;
    c->momentum = (float)job->momentum;
    c->pull = (float)job->pull;
    if (job->first) {
        memset(work, 0, sizeof(float) * (size_t)size);
        carry_all(c, job, 0);
    }
    if (has_images(c, ops)) images_epoch(c, job, batches);
    else rows_epoch(c, job, batches);
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
