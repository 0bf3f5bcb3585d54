/* The parts of a chain: its layers, a client's job, and where values are in memory. */

#define DEPTH 128 /* features per block, a multiple of 2 L */
#define OPS 64
#define KERNEL 16 /* the largest side of a convolution's kernel */
_Static_assert(DEPTH % (2 * L) == 0, "two vectors of outputs must be in one block");

enum { LINEAR, RELU, DROPOUT, CONV, MAX_POOL, MEAN_POOL };

typedef struct {
    int64_t kind, in, out;
    int64_t weight, bias;                     /* their first entries in theta; -1 if there is no bias */
    int64_t layer, least;                     /* dropout: its number, and the smallest hash that is kept */
    int64_t channels[2], height[2], width[2]; /* of images: before and after the layer; 0 in chains without images */
    int64_t kernel[2], stride[2], pad[2];     /* convolutions and poolings: along the height and along the width */
    double scale;                             /* dropout: 1 / (1 - p) */
} Op;

typedef struct {
    float *theta, *velocity;
    const float *kept; /* 0 where an entry does not change; NULL if all do */
    const float *anchor, *shift; /* gradients are corrected by pull (theta - anchor) + shift; NULL for 0 */
    const float *inputs;
    const int64_t *labels, *order;
    int64_t examples, count, batch;
    int64_t step;
    uint64_t key;
    double lr, momentum, pull, clip; /* clip: the largest norm of a gradient; 0 for none */
    int64_t nesterov;
    int64_t first, last; /* whether to load theta and velocity before, and to store them after */
    float *losses, *work;
} Job;

typedef struct {
    Op op;
    float *value, *scale, *grad; /* in rows: output, dropout's multipliers, gradient of a linear layer's output */
    float *weight, *bias;        /* with momenta; the bias is a weight matrix with one input */
    float *fixed, *bias_fixed;   /* anchors with shifts, in the same layout; NULL if gradients are not corrected */
    float *grads, *bias_grads;   /* gradients in place of momenta, in the same layout; NULL if steps are not apart */
    uint16_t *kept, *bias_kept;  /* one bit per lane */
    /* Of layers of images, in which value and scale have one part of ``size`` floats for each group: */
    int64_t size, padded_size;
    float *padded;             /* input of a convolution with padding or strides; one part for each group */
    float *forward, *backward; /* weights in the order in which the two passes read them */
    float *slope;              /* gradient of the weights, then of the bias */
} Stage;

typedef struct {
    Stage stages[OPS];
    int64_t ops, head;          /* the head is the first linear layer */
    int64_t tile, tiles;        /* rows per tile, tiles per batch */
    float *x[2];                /* inputs of the head: this batch and the next, or this batch and its gradient */
    int64_t group, groups;      /* of images: examples per group, groups per batch */
    float *images;              /* the input of all groups */
    int64_t input_size;         /* floats of one group's input */
    float *grads[2], *spread;   /* gradients of one group: before and after a layer; spread for a convolution */
    int masked, corrected;
    int apart; /* whether all gradients are computed before weights change: their norm is needed, or they are */
    float lr, momentum, pull;
} Chain;

INLINE int is_corrected(const Job *job) { return job->anchor || job->shift || job->pull != 0; }
INLINE int is_apart(const Job *job) { return job->clip > 0 || job->nesterov; }

/* Return the position of feature f of a row, in rows of ``width`` features. */
INLINE int64_t place(const Chain *c, int64_t width, int64_t row, int64_t f) {
    const int64_t tile = c->tiles > 1 ? row / c->tile : 0; /* avoids the division, which takes longer than the rest */
    return ((tile * up(width, DEPTH) + f / DEPTH - tile) * c->tile + row) * DEPTH + f % DEPTH;
}

/* Return the vectors that the pixels of a row of images fill, the floats of a row, and those of a group of images.

Vectors of the examples of one pixel may overrun the pixel, but not the row. */
INLINE int64_t row_vectors(int64_t width, int64_t n) { return up(width * n, L); }
INLINE int64_t row_size(int64_t width, int64_t n) { return up((width - 1) * n + L, L) * L; }
INLINE int64_t image_size(int64_t channels, int64_t height, int64_t width, int64_t n) {
    return up(channels * height * row_size(width, n) + L, 16) * 16;
}

/* Return the number from which the hashes of a dropout layer's entries count, as in dropout.py. */
INLINE uint32_t dropout_base(const Op *op, uint64_t key, int64_t step) {
    const uint32_t client = mix_one(mix_one((uint32_t)key) ^ (uint32_t)(key >> 32));
    return mix_one(client + (uint32_t)step * 0x9E3779B1u + (uint32_t)op->layer);
}
