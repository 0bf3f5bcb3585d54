/* The layers before the head of a chain with convolutions: a batch is computed in groups of examples. */

#define GROUP L /* the largest number of examples per group, so that a vector holds one pixel of all of them */

/* The part of a pooling window that lies inside the image, along one axis. */
typedef struct {
    int64_t from, to;
} Window;

INLINE Window window(const Op *op, int axis, int64_t at) {
    const int64_t size = axis ? op->width[0] : op->height[0], from = at * op->stride[axis] - op->pad[axis];
    return (Window){from < 0 ? 0 : from, least_of(size, from + op->kernel[axis])};
}

/* Pool images. Vectors overrun the examples of a pixel; the next pixel overwrites what they wrote there. */
INLINE void pool_by(const int max, const Op *op, const float *in, int64_t n, float *out) {
    const int64_t row = row_size(op->width[0], n), to_row = row_size(op->width[1], n);
    const float area = (float)(op->kernel[0] * op->kernel[1]);
    for (int64_t at = 0; at < op->channels[0] * op->height[1]; at++) {
        const Window high = window(op, 0, at % op->height[1]);
        const float *plane = in + at / op->height[1] * op->height[0] * row;
        for (int64_t x = 0; x < op->width[1]; x++) {
            const Window wide = window(op, 1, x);
            vf sum = max ? all(-INFINITY) : (vf){};
            for (int64_t y = high.from; y < high.to; y++)
                for (int64_t k = wide.from; k < wide.to; k++) {
                    const vf each = load_any(plane + y * row + k * n);
                    if (max) sum = choose((each > sum) | (each != each), each, sum);
                    else sum += each;
                }
            if (!max) sum /= area;
            store_any(out + at * to_row + x * n, sum);
        }
    }
}

static void pool(const Op *op, const float *in, int64_t n, float *out) {
    if (op->kind == MAX_POOL) pool_by(1, op, in, n, out);
    else pool_by(0, op, in, n, out);
}

/* Compute the gradients of images from those of the pooled images; of equal maxima, the first gets the gradient. */
INLINE void pool_back_by(const int max, const int apart, const Op *op, const float *in, const float *out,
                         const float *d, int64_t n, float *dx) {
    const int64_t row = row_size(op->width[0], n), to_row = row_size(op->width[1], n);
    const float area = (float)(op->kernel[0] * op->kernel[1]);
    for (int64_t at = 0; at < op->channels[0] * op->height[1]; at++) {
        const Window high = window(op, 0, at % op->height[1]);
        const int64_t plane = at / op->height[1] * op->height[0] * row;
        for (int64_t x = 0; x < op->width[1]; x++) {
            const Window wide = window(op, 1, x);
            const vf best = load_any(out + at * to_row + x * n);
            vf rest = load_any(d + at * to_row + x * n);
            if (!apart) rest = zero_where(iota() >= (int32_t)n, rest); /* the lanes of other pixels */
            if (!max) rest /= area;
            for (int64_t y = high.from; y < high.to; y++)
                for (int64_t k = wide.from; k < wide.to; k++) {
                    const int64_t to = plane + y * row + k * n;
                    const vf each = load_any(in + to);
                    vi misses = {};
                    if (max) misses = (each < best) | (each > best);
                    vf part = zero_where(misses, rest);
                    if (!apart) part += load_any(dx + to);
                    store_any(dx + to, part);
                    if (max) rest = zero_where(~misses, rest);
                }
        }
    }
}

static void pool_back(const Op *op, const float *in, const float *out, const float *d, int64_t n, float *dx) {
    int apart = !op->pad[0] && !op->pad[1]; /* whether each pixel is in one window */
    for (int i = 0; i < 2; i++) {
        const int64_t *size = i ? op->width : op->height;
        apart = apart && op->kernel[i] == op->stride[i] && size[0] == size[1] * op->stride[i];
    }
    if (!apart || op->kind == MEAN_POOL)
        memset(dx, 0, sizeof(float) * (size_t)(op->channels[0] * op->height[0] * row_size(op->width[0], n)));
    if (op->kind == MEAN_POOL) pool_back_by(0, 0, op, in, out, d, n, dx);
    else if (apart) pool_back_by(1, 1, op, in, out, d, n, dx);
    else pool_back_by(1, 0, op, in, out, d, n, dx);
}

/* Apply dropout to images, with the bits of dropout.py, and store the multipliers. */
static void drop_images(const Op *op, uint64_t key, int64_t step, int64_t first, int64_t n, const float *in,
                        float *out, float *scale) {
    const uint32_t base = dropout_base(op, key, step);
    const int64_t row = row_size(op->width[0], n);
    for (int64_t f = 0; f < op->in; f++) {
        const int64_t at = f / op->width[0] * row + f % op->width[0] * n;
        const vu example = (vu)iota() + (uint32_t)first;
        const vu number = mix(example * (uint32_t)op->in + (base + (uint32_t)f));
        const vf multiplier = zero_where((vi)(number < (uint32_t)op->least), all((float)op->scale));
        store_any(scale + at, multiplier);
        store_any(out + at, load_any(in + at) * multiplier);
    }
}

/* Copy the images of a group from the client's data. */
static void gather(const Op *op, const Job *job, int64_t begins, int64_t n, float *to) {
    const int64_t width = op->width[0], row = row_size(width, n);
    for (int64_t i = 0; i < n; i++) {
        const float *from = job->inputs + job->order[begins + i] * op->in;
        for (int64_t at = 0; at < op->channels[0] * op->height[0]; at++)
            for (int64_t x = 0; x < width; x++) to[at * row + x * n + i] = from[at * width + x];
    }
}

/* Copy a group between the output of the last layer of images and the head's rows. */
static void exchange(const Chain *c, const Op *op, int64_t first, int64_t n, float *images, float *rows, int back) {
    const int64_t width = op->width[1], row = row_size(width, n), block = c->tile * DEPTH;
    for (int64_t i = 0; i < n; i++) {
        float *begin = rows + place(c, op->out, first + i, 0), *image = images + i;
        for (int64_t f = 0, x = 0; f < op->out; f++) {
            float *to = begin + f / DEPTH * block + f % DEPTH;
            if (back) image[x * n] = *to;
            else *to = image[x * n];
            if (++x == width) x = 0, image += row;
        }
    }
}

/* Return the number of a group's examples in a batch of ``n``. */
INLINE int64_t group_size(const Chain *c, int64_t g, int64_t n) {
    const int64_t rest = n - g * c->group;
    return rest < 0 ? 0 : least_of(c->group, rest);
}

/* Return the input of a layer for a group. */
INLINE float *input_of(const Chain *c, const Stage *s, int64_t g) {
    return s == c->stages ? c->images + g * c->input_size : s[-1].value + g * s[-1].size;
}

INLINE float *conv_input(const Chain *c, const Stage *s, int64_t g) {
    return s->padded ? s->padded + g * s->padded_size : input_of(c, s, g);
}

/* Compute the head's input from a batch of ``n`` images. */
static void enter_images(const Chain *c, const Job *job, int64_t batch, int64_t n, float *rows) {
    const Stage *head = &c->stages[c->head];
    memset(rows, 0, sizeof(float) * (size_t)(up(head->op.in, DEPTH) * DEPTH * c->tile * c->tiles));
    for (const Stage *s = c->stages; s < head; s++)
        if (s->op.kind == CONV) pack(&s->op, job->theta + s->op.weight, s->forward, s->backward);
    for (int64_t g = 0, size; (size = group_size(c, g, n)); g++) {
        gather(&c->stages[0].op, job, batch * job->batch + g * c->group, size, c->images + g * c->input_size);
        for (const Stage *s = c->stages; s < head; s++) {
            const Op *op = &s->op;
            float *in = input_of(c, s, g), *out = s->value + g * s->size;
            const float *bias = op->bias < 0 ? 0 : job->theta + op->bias;
            if (op->kind == CONV) {
                if (s->padded) pad_images(op, in, size, conv_input(c, s, g));
                convolve(s, conv_input(c, s, g), bias, size, out, s[1].value == s->value);
            } else if (op->kind == DROPOUT)
                drop_images(op, job->key, job->step + batch, g * c->group, size, in, out, s->scale + g * s->size);
            else if (op->kind != RELU) pool(op, in, size, out);
            else if (in != out)
                for (int64_t i = 0; i < s->size; i += L) store(out + i, zero_where(load(in + i) < 0, load(in + i)));
        }
        exchange(c, &head[-1].op, g * c->group, size, head[-1].value + g * head[-1].size, rows, 0);
    }
}

/* Set the lanes after each row of images to 0. */
static void clear_ends(const Op *op, int64_t n, float *images) {
    const int64_t row = row_size(op->width[1], n), used = op->width[1] * n;
    for (int64_t at = 0; at < op->channels[1] * op->height[1]; at++)
        memset(images + at * row + used, 0, sizeof(float) * (size_t)(row - used));
}

/* Take a step of a convolution's weights or bias, from their gradient. */
static void descend(const Chain *c, const Job *job, int64_t at, int64_t size, float *slope) {
    for (int64_t i = at; c->corrected && i < at + size; i++)
        slope[i - at] += c->pull * (job->theta[i] - (job->anchor ? job->anchor[i] : 0)) +
                         (job->shift ? job->shift[i] : 0);
    for (int64_t i = at; i < at + size; i++) {
        const float v = c->momentum * job->velocity[i] + slope[i - at], value = job->theta[i] - c->lr * v;
        job->velocity[i] = v;
        if (!job->kept || job->kept[i] != 0) job->theta[i] = value;
    }
}

/* Propagate the gradient of the head's input back through the layers of images, and update their weights. */
static void backward_images(const Chain *c, const Job *job, int64_t n, float *rows) {
    const Stage *head = &c->stages[c->head], *first = c->stages;
    while (first->op.kind != CONV) first++;
    for (const Stage *s = first; s < head; s++)
        if (s->op.kind == CONV) memset(s->slope, 0, sizeof(float) * (size_t)slope_size(&s->op));
    for (int64_t g = 0, size; (size = group_size(c, g, n)); g++) {
        float *d = c->grads[0], *other = c->grads[1], *spare;
        exchange(c, &head[-1].op, g * c->group, size, d, rows, 1);
        for (const Stage *s = head - 1; s >= first; s--) {
            const float *in = input_of(c, s, g), *out = s->value + g * s->size;
            if (s->op.kind == RELU)
                for (int64_t i = 0; i < s->size; i += L) store(d + i, zero_where(load(out + i) <= 0, load(d + i)));
            else if (s->op.kind == DROPOUT)
                for (int64_t i = 0; i < s->size; i += L) store(d + i, load(d + i) * load(s->scale + g * s->size + i));
            else {
                if (s->op.kind == CONV) {
                    clear_ends(&s->op, size, d);
                    add_slope(s, conv_input(c, s, g), d, size);
                    if (s > first) convolve_back(s, d, size, c->spread, other);
                } else pool_back(&s->op, in, out, d, size, other);
                spare = d, d = other, other = spare;
            }
        }
    }
    for (const Stage *s = first; s < head && !c->apart; s++)
        if (s->op.kind == CONV) {
            const int64_t weights = slope_size(&s->op) - s->op.channels[1];
            descend(c, job, s->op.weight, weights, s->slope);
            if (s->op.bias >= 0) descend(c, job, s->op.bias, s->op.channels[1], s->slope + weights);
        }
}

/* Return the position after ``floats`` more floats, aligned. */
#define TAKE(floats) (at += up(floats, 16) * 16, at - up(floats, 16) * 16)

/* Lay out the layers of images from ``at`` on, and return the position after them. */
static float *lay_out_images(Chain *c, const Op *ops, int64_t batch, float *at) {
    int64_t most = 0, spread = 0;
    c->groups = up(batch, GROUP);
    c->group = up(batch, c->groups);
    c->input_size = image_size(ops[0].channels[0], ops[0].height[0], ops[0].width[0], c->group);
    c->images = TAKE(c->input_size * c->groups);
    for (int64_t i = 0; i < c->head; i++) {
        Stage *s = &c->stages[i];
        const Op *op = &ops[i];
        *s = (Stage){.op = *op, .size = image_size(op->channels[1], op->height[1], op->width[1], c->group)};
        most = most_of(most, s->size);
        if (op->kind == RELU && i && ops[i - 1].kind == CONV) s->value = s[-1].value; /* computed with it */
        else s->value = TAKE(s->size * c->groups);
        if (op->kind == DROPOUT) s->scale = TAKE(s->size * c->groups);
        if (op->kind != CONV) continue;
        if (is_padded(op)) {
            s->padded_size = image_size(op->channels[0], padded_height(op), padded_width(op), c->group);
            s->padded = TAKE(s->padded_size * c->groups);
        }
        spread = most_of(spread, image_size(op->channels[1], op->height[1], spread_width(op), c->group));
        s->forward = TAKE(slope_size(op));
        s->backward = TAKE(slope_size(op));
        s->slope = TAKE(slope_size(op));
    }
    for (int i = 0; i < 2; i++) c->grads[i] = TAKE(most);
    c->spread = TAKE(spread);
    return at;
}
