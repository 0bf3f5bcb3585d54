/* Convolutions of a group of images: vectors hold neighbouring pixels of all examples of the group.

Images are [channel][y][x][example], and rows are padded to whole vectors. So a kernel's column is a shift by whole
pixels, whatever the number of examples, and few lanes are unused. With a stride, the columns of the padded input are
sorted by their remainder, so that the outputs of one kernel column are still neighbours. */

#if defined(__AVX512F__)
#define PIXELS 4 /* vectors of pixels per block */
#define SLOPES 4 /* output channels per block of the weights' gradient */
#else
#define PIXELS 2
#define SLOPES 2
#endif
#define CHANNELS 6 /* channels per block: these and the pixels must stay in registers */
#define COLUMNS 5  /* kernel columns per block of the weights' gradient */
#define NEAR 20480 /* bytes of gradients that should stay in the L1 cache */

typedef struct {
    int64_t channels, plane;             /* channels of the source, and floats between them */
    int64_t rows, step;                  /* kernel rows in use, and floats between their sources */
    int64_t columns, shift[KERNEL];      /* kernel columns, and where their sources begin in a row */
    int64_t weight_channel, weight_row;  /* weights between two channels and between two kernel rows in use */
} Walk;

/* Compute some vectors of pixels of some output channels. */
INLINE void products(const int channels, const int pixels, const Walk *k, const float *restrict from,
                     const float *restrict w, const float *restrict bias, float *restrict out, int64_t plane,
                     int relu) {
    vf sum[CHANNELS][PIXELS];
    UNROLL for (int c = 0; c < channels; c++)
        UNROLL for (int i = 0; i < pixels; i++) sum[c][i] = bias ? all(bias[c]) : (vf){};
    for (int64_t channel = 0; channel < k->channels; channel++)
        for (int64_t row = 0; row < k->rows; row++) {
            const float *x = from + channel * k->plane + row * k->step;
            const float *weight = w + (channel * k->weight_channel + row * k->weight_row) * channels;
            for (int64_t column = 0; column < k->columns; column++, weight += channels) {
                vf pixel[PIXELS];
                UNROLL for (int i = 0; i < pixels; i++) pixel[i] = load_any(x + k->shift[column] + i * L);
                UNROLL for (int c = 0; c < channels; c++) {
                    const vf each = all(weight[c]);
                    UNROLL for (int i = 0; i < pixels; i++) sum[c][i] += each * pixel[i];
                }
            }
        }
    UNROLL for (int c = 0; c < channels; c++)
        UNROLL for (int i = 0; i < pixels; i++)
            store(out + c * plane + i * L, relu ? zero_where(sum[c][i] < 0, sum[c][i]) : sum[c][i]);
}

/* Add the products of ``d`` and shifted ``x`` over some rows to the gradient of some weights of one kernel row. */
INLINE void correlate(const int channels, const int columns, int64_t rows, int64_t vectors, const float *restrict d,
                      int64_t plane, int64_t d_step, const float *restrict x, int64_t x_step,
                      const int64_t *restrict shift, float *restrict slope, int64_t apart) {
    vf sum[SLOPES * COLUMNS + L];
    UNROLL for (int i = 0; i < (channels * columns + L - 1) / L * L; i++) sum[i] = (vf){};
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < vectors; i++) {
            vf each[SLOPES];
            UNROLL for (int c = 0; c < channels; c++) each[c] = load(d + c * plane + row * d_step + i * L);
            UNROLL for (int k = 0; k < columns; k++) {
                const vf pixel = in_register(load_any(x + row * x_step + shift[k] + i * L));
                UNROLL for (int c = 0; c < channels; c++) sum[c * columns + k] += pixel * each[c];
            }
        }
    float sums[SLOPES * COLUMNS + L] __attribute__((aligned(64)));
    UNROLL for (int i = 0; i < channels * columns; i += L) store(sums + i, lane_sums(sum + i));
    for (int c = 0; c < channels; c++)
        for (int k = 0; k < columns; k++) slope[c * apart + k] += sums[c * columns + k];
}

typedef void Products(const Walk *, const float *, const float *, const float *, float *, int64_t, int);
typedef void Correlate(int64_t, int64_t, const float *, int64_t, int64_t, const float *, int64_t, const int64_t *,
                       float *, int64_t);

#define PRODUCTS(c, p)                                                                                                \
    static void products_##c##_##p(const Walk *k, const float *from, const float *w, const float *bias, float *out,   \
                                   int64_t plane, int relu) {                                                         \
        products(c, p, k, from, w, bias, out, plane, relu);                                                           \
    }
#define CORRELATE(c, k)                                                                                               \
    static void correlate_##c##_##k(int64_t rows, int64_t vectors, const float *d, int64_t plane, int64_t d_step,     \
                                    const float *x, int64_t x_step, const int64_t *shift, float *slope,               \
                                    int64_t apart) {                                                                  \
        correlate(c, k, rows, vectors, d, plane, d_step, x, x_step, shift, slope, apart);                             \
    }
#define EACH_COLUMN(c) CORRELATE(c, 1) CORRELATE(c, 2) CORRELATE(c, 3) CORRELATE(c, 4) CORRELATE(c, 5)
#define COLUMN_NAMES(c) {correlate_##c##_1, correlate_##c##_2, correlate_##c##_3, correlate_##c##_4, correlate_##c##_5}
#if defined(__AVX512F__)
#define EACH_PIXELS(c) PRODUCTS(c, 1) PRODUCTS(c, 2) PRODUCTS(c, 3) PRODUCTS(c, 4)
#define PIXELS_NAMES(c) {products_##c##_1, products_##c##_2, products_##c##_3, products_##c##_4}
EACH_COLUMN(3) EACH_COLUMN(4)
#else
#define EACH_PIXELS(c) PRODUCTS(c, 1) PRODUCTS(c, 2)
#define PIXELS_NAMES(c) {products_##c##_1, products_##c##_2}
#endif
EACH_PIXELS(1) EACH_PIXELS(2) EACH_PIXELS(3) EACH_PIXELS(4) EACH_PIXELS(5) EACH_PIXELS(6)
EACH_COLUMN(1) EACH_COLUMN(2)

static Products *const products_of[CHANNELS][PIXELS] = {
    PIXELS_NAMES(1), PIXELS_NAMES(2), PIXELS_NAMES(3), PIXELS_NAMES(4), PIXELS_NAMES(5), PIXELS_NAMES(6),
};
static Correlate *const correlate_of[SLOPES][COLUMNS] = {
    COLUMN_NAMES(1), COLUMN_NAMES(2),
#if SLOPES > 2
    COLUMN_NAMES(3), COLUMN_NAMES(4),
#endif
};

/* Blocks of at most ``most`` of ``n`` things, as equal as possible: block i begins at start(n, most, i). */
INLINE int64_t start(int64_t n, int64_t most, int64_t i) { return n * i / up(n, most); }

/* Compute one row of all output channels. */
static void convolve_row(const Walk *k, const float *from, const float *w, int64_t first_row, const float *bias,
                         float *out, int64_t channels, int64_t plane, int64_t vectors, int relu) {
    const int64_t kernel = k->channels * k->weight_channel;
    for (int64_t b = 0; b < up(channels, CHANNELS); b++) {
        const int64_t c = start(channels, CHANNELS, b), many = start(channels, CHANNELS, b + 1) - c;
        for (int64_t p = 0; p < up(vectors, PIXELS); p++) {
            const int64_t i = start(vectors, PIXELS, p), pixels = start(vectors, PIXELS, p + 1) - i;
            products_of[many - 1][pixels - 1](k, from + i * L, w + c * kernel + first_row * many,
                                              bias ? bias + c : 0, out + c * plane + i * L, plane, relu);
        }
    }
}

/* Copy the weights of a convolution into the orders of the two passes; ``backward`` may be NULL. */
static void pack(const Op *op, const float *weight, float *forward, float *backward) {
    const int64_t in = op->channels[0], out = op->channels[1], area = op->kernel[0] * op->kernel[1];
    for (int64_t b = 0; b < up(out, CHANNELS); b++) {
        const int64_t c = start(out, CHANNELS, b), many = start(out, CHANNELS, b + 1) - c;
        for (int64_t tap = 0; tap < in * area; tap++)
            for (int64_t i = 0; i < many; i++)
                forward[c * in * area + tap * many + i] = weight[(c + i) * in * area + tap];
    }
    for (int64_t b = 0; backward && b < up(in, CHANNELS); b++) {
        const int64_t c = start(in, CHANNELS, b), many = start(in, CHANNELS, b + 1) - c;
        for (int64_t o = 0; o < out; o++)
            for (int64_t row = 0; row < op->kernel[0]; row++)
                for (int64_t column = 0; column < op->kernel[1]; column++) {
                    float *to = backward + c * out * area + ((o * op->kernel[0] + row) * op->kernel[1] + column) * many;
                    const int64_t tap = row * op->kernel[1] + op->kernel[1] - 1 - column;
                    for (int64_t i = 0; i < many; i++) to[i] = weight[(o * in + c + i) * area + tap];
                }
    }
}

/* Return the number of a convolution's weights and of its output channels, which may have biases. */
INLINE int64_t slope_size(const Op *op) {
    return op->channels[1] * (op->channels[0] * op->kernel[0] * op->kernel[1] + 1);
}

/* Return the width of a convolution's padded input, in which columns are sorted by their remainder. */
INLINE int64_t padded_width(const Op *op) {
    return up(op->width[0] + 2 * op->pad[1], op->stride[1]) * op->stride[1];
}
INLINE int64_t padded_height(const Op *op) { return op->height[0] + 2 * op->pad[0]; }
INLINE int is_padded(const Op *op) { return op->pad[0] || op->pad[1] || op->stride[1] > 1; }

/* Copy images into the padded input of a convolution. */
static void pad_images(const Op *op, const float *from, int64_t n, float *to) {
    const int64_t row = row_size(op->width[0], n), padded = row_size(padded_width(op), n), stride = op->stride[1];
    const int64_t apart = padded_width(op) / stride;
    memset(to, 0, sizeof(float) * (size_t)(op->channels[0] * padded_height(op) * padded));
    for (int64_t c = 0; c < op->channels[0]; c++)
        for (int64_t y = 0; y < op->height[0]; y++) {
            const float *source = from + (c * op->height[0] + y) * row;
            float *target = to + (c * padded_height(op) + y + op->pad[0]) * padded;
            const int64_t run = stride > 1 ? 1 : op->width[0]; /* neighbouring pixels that stay neighbours */
            for (int64_t x = 0; x < op->width[0]; x += run) {
                const int64_t at = x + op->pad[1], to_x = at % stride * apart + at / stride;
                memcpy(target + to_x * n, source + x * n, sizeof(float) * (size_t)(run * n));
            }
        }
}

/* Describe the walk over the input of a convolution. */
static Walk input_walk(const Op *op, int64_t n) {
    const int padded = is_padded(op);
    const int64_t row = row_size(padded ? padded_width(op) : op->width[0], n);
    Walk k = {.channels = op->channels[0], .plane = row * (padded ? padded_height(op) : op->height[0]),
              .rows = op->kernel[0], .step = row, .columns = op->kernel[1],
              .weight_channel = op->kernel[0] * op->kernel[1], .weight_row = op->kernel[1]};
    for (int64_t column = 0; column < k.columns; column++) {
        const int64_t stride = op->stride[1];
        k.shift[column] = (column % stride * (padded_width(op) / stride) + column / stride) * n;
    }
    return k;
}

/* Compute the output of a convolution from its (padded) input, and its ReLU if that follows. */
static void convolve(const Stage *s, const float *from, const float *bias, int64_t n, float *out, int relu) {
    const Op *op = &s->op;
    const Walk k = input_walk(op, n);
    const int64_t row = row_size(op->width[1], n), plane = op->height[1] * row;
    for (int64_t y = 0; y < op->height[1]; y++)
        convolve_row(&k, from + y * op->stride[0] * k.step, s->forward, 0, bias, out + y * row, op->channels[1], plane,
                     row_vectors(op->width[1], n), relu);
}

/* Add to the gradient of a convolution's weights and bias; ``d`` must be 0 in the lanes after each row. */
static void add_slope(const Stage *s, const float *from, const float *d, int64_t n) {
    const Op *op = &s->op;
    const Walk k = input_walk(op, n);
    const int64_t row = row_size(op->width[1], n), plane = op->height[1] * row, out = op->channels[1];
    const int64_t kernel = k.channels * k.weight_channel, vectors = row_vectors(op->width[1], n);
    int64_t most = NEAR / (int64_t)sizeof(float) / (row * least_of(out, SLOPES));
    most = most < 1 ? 1 : most;
    for (int64_t part = 0; part < up(op->height[1], most); part++) {
        const int64_t y = start(op->height[1], most, part), rows = start(op->height[1], most, part + 1) - y;
        for (int64_t b = 0; b < up(out, SLOPES); b++) {
            const int64_t c = start(out, SLOPES, b), many = start(out, SLOPES, b + 1) - c;
            for (int64_t i = 0; i < k.channels * k.rows * up(k.columns, COLUMNS); i++) {
                const int64_t at = i / up(k.columns, COLUMNS), b_column = i % up(k.columns, COLUMNS);
                const int64_t column = start(k.columns, COLUMNS, b_column);
                const int64_t columns = start(k.columns, COLUMNS, b_column + 1) - column;
                const float *x = from + at / k.rows * k.plane + (y * op->stride[0] + at % k.rows) * k.step;
                correlate_of[many - 1][columns - 1](rows, vectors, d + c * plane + y * row, plane, row, x,
                                                    op->stride[0] * k.step, k.shift + column,
                                                    s->slope + c * kernel + at * k.columns + column, kernel);
            }
        }
    }
    for (int64_t c = 0; op->bias >= 0 && c < out; c++) {
        vf sum[L] = {};
        for (int64_t i = 0; i < plane; i += L) sum[0] += load(d + c * plane + i);
        s->slope[out * kernel + c] += lane_sums(sum)[0];
    }
}

/* Return the width of the spread gradient: output x of the convolution is at x stride - pad + kernel - 1. */
INLINE int64_t spread_width(const Op *op) { return op->width[0] + op->kernel[1] - 1; }

/* Compute the gradient of a convolution's input: the convolution of the spread gradient with the flipped kernel. */
static void convolve_back(const Stage *s, const float *d, int64_t n, float *spread, float *dx) {
    const Op *op = &s->op;
    const int64_t row = row_size(op->width[1], n), wide = row_size(spread_width(op), n);
    const int64_t out = op->channels[1], height = op->height[1], shift = op->kernel[1] - 1 - op->pad[1];
    memset(spread, 0, sizeof(float) * (size_t)(out * height * wide));
    for (int64_t at = 0; at < out * height; at++) {
        const int64_t run = op->stride[1] > 1 ? 1 : op->width[1];
        for (int64_t x = 0; x < op->width[1]; x += run) {
            const int64_t to = x * op->stride[1] + shift, skip = to < 0 ? -to : 0; /* pixels that only padding saw */
            const int64_t pixels = least_of(run, spread_width(op) - to) - skip;
            if (pixels > 0)
                memcpy(spread + at * wide + (to + skip) * n, d + at * row + (x + skip) * n,
                       sizeof(float) * (size_t)(pixels * n));
        }
    }
    Walk k = {.channels = out, .plane = height * wide, .step = -wide, .columns = op->kernel[1],
              .weight_channel = op->kernel[0] * op->kernel[1], .weight_row = op->stride[0] * op->kernel[1]};
    for (int64_t column = 0; column < k.columns; column++) k.shift[column] = column * n;
    const int64_t input_row = row_size(op->width[0], n);
    for (int64_t y = 0; y < op->height[0]; y++) { /* kernel row r belongs to output row (y + pad - r) / stride */
        const int64_t at = y + op->pad[0], lowest = at - (height - 1) * op->stride[0];
        int64_t first = lowest > 0 ? lowest : 0;
        first += (at - first) % op->stride[0];
        const int64_t last = least_of(op->kernel[0] - 1, at);
        k.rows = last < first ? 0 : (last - first) / op->stride[0] + 1;
        const int64_t from = k.rows ? (at - first) / op->stride[0] : 0;
        convolve_row(&k, spread + from * wide, s->backward, first * op->kernel[1], 0, dx + y * input_row,
                     op->channels[0], op->height[0] * input_row, row_vectors(op->width[0], n), 0);
    }
}
