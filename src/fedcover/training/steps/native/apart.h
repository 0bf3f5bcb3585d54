/* Steps for which gradients are computed apart from momenta: clipping needs the norm of all of them, and Nesterov momentum
each of them. */

/* Return the sum of squares of the gradients of some vectors of weights, inside the mask. */
static double squares(const Chain *c, int64_t vectors, const float *grads, const uint16_t *kept) {
    double total = 0;
    for (int64_t begins = 0; begins < vectors; begins += DEPTH) { /* few in float32, all in float64 */
        vf sum = {};
        for (int64_t i = begins; i < least_of(vectors, begins + DEPTH); i++) {
            const vf g = load(grads + (2 * i + 1) * L), inside = c->masked ? keep((vf){}, g, kept[i]) : g;
            sum += inside * inside;
        }
        for (int lane = 0; lane < L; lane++) total += sum[lane];
    }
    return total;
}

/* Take a step of some vectors of weights. */
static void step_vectors(const Chain *c, int64_t vectors, float scale, int nesterov, float *restrict w,
                         const float *restrict grads, const float *restrict fixed, const uint16_t *restrict kept) {
    for (int64_t i = 0; i < vectors; i++) {
        const int64_t at = 2 * i * L;
        const vf old = load(w + at);
        vf g = scale * load(grads + at + L);
        if (fixed) g += c->pull * (old - load(fixed + at)) + load(fixed + at + L);
        const vf v = load(w + at + L) * c->momentum + g;
        if (nesterov) g += c->momentum * v;
        else g = v;
        const vf value = old - c->lr * g;
        store(w + at + L, v);
        store(w + at, c->masked ? keep(old, value, kept[i]) : value);
    }
}

/* Return the sum of squares of a convolution's gradients, inside the mask. */
static double conv_squares(const Job *job, int64_t at, int64_t size, const float *slope) {
    double total = 0;
    for (int64_t i = 0; i < size; i++)
        if (!job->kept || job->kept[at + i] != 0) total += (double)slope[i] * slope[i];
    return total;
}

/* Take a step of a convolution's weights or bias. */
static void step_conv(const Chain *c, const Job *job, float scale, int64_t at, int64_t size, const float *slope) {
    for (int64_t i = at; i < at + size; i++) {
        float g = scale * slope[i - at];
        if (c->corrected)
            g += c->pull * (job->theta[i] - (job->anchor ? job->anchor[i] : 0)) + (job->shift ? job->shift[i] : 0);
        const float v = c->momentum * job->velocity[i] + g;
        job->velocity[i] = v;
        if (!job->kept || job->kept[i] != 0) job->theta[i] -= c->lr * (job->nesterov ? g + c->momentum * v : v);
    }
}

/* Take the step of all weights from their gradients. */
static void step_apart(const Chain *c, const Job *job) {
    const Stage *end = c->stages + c->ops;
    double total = 0;
    for (const Stage *s = c->stages; s < end; s++) {
        const int64_t outputs = up(s->op.out, L), weights = s->slope ? slope_size(&s->op) - s->op.channels[1] : 0;
        if (s->slope) {
            total += conv_squares(job, s->op.weight, weights, s->slope);
            if (s->op.bias >= 0) total += conv_squares(job, s->op.bias, s->op.channels[1], s->slope + weights);
        } else if (s->weight) {
            total += squares(c, up(s->op.in, L) * L * outputs, s->grads, s->kept);
            if (s->bias) total += squares(c, outputs, s->bias_grads, s->bias_kept);
        }
    }
    const double norm = sqrt(total);
    const float scale = (float)(job->clip > 0 && !(norm <= job->clip) ? job->clip / norm : 1);
    for (const Stage *s = c->stages; s < end; s++) {
        const int64_t outputs = up(s->op.out, L), weights = s->slope ? slope_size(&s->op) - s->op.channels[1] : 0;
        if (s->slope) {
            step_conv(c, job, scale, s->op.weight, weights, s->slope);
            if (s->op.bias >= 0) step_conv(c, job, scale, s->op.bias, s->op.channels[1], s->slope + weights);
        } else if (s->weight) {
            step_vectors(c, up(s->op.in, L) * L * outputs, scale, job->nesterov != 0, s->weight, s->grads, s->fixed,
                         s->kept);
            if (s->bias)
                step_vectors(c, outputs, scale, job->nesterov != 0, s->bias, s->bias_grads, s->bias_fixed,
                             s->bias_kept);
        }
    }
}
