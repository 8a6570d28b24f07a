/* Adam behind a gradient pipeline, in as few passes over memory as the mathematics allows: one read of the gradients (and
 * of the weights, where these decay into them) for the norm, and one read and write of everything for the update.
 *
 * A block is a number of whole rows of one parameter, so that a row is still in the cache when its mean is known. Blocks
 * do not depend on each other nor on the number of threads: the results are the same bits in every run. */

#include <math.h>
#include <stdint.h>

typedef struct {
    float *weight, *mean, *square, *largest; /* largest: of AMSGrad, or null */
    const float *grad;
    int64_t rows, columns, centralize;
    float unscale, decay;      /* x = unscale * grad + decay * weight; minus its mean over the row where centralised */
    float limit;               /* of the magnitude of x, after clipping by norm */
    float coupled, keep;       /* what L2 decay adds to x, and what decoupled decay leaves of a weight */
    float beta1, beta2, ahead; /* numerator: mean + ahead * (x - mean) */
    float rate, root, eps;     /* weight -= rate * numerator / (root * sqrt(square) + eps) */
    float padding;
} Block;

static inline float raw(const Block *b, int64_t at) {
    return b->unscale * b->grad[at] + (b->decay != 0 ? b->decay * b->weight[at] : 0);
}

static inline float center_of(const Block *b, int64_t start) {
    float sum = 0;
    if (!b->centralize)
        return 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < b->columns; j++)
        sum += raw(b, start + j);
    return sum / (float)b->columns;
}

/* squares[i]: sum of the squares of x over block i, before any clipping */
void sum_squares(const Block *blocks, int64_t count, double *squares, int threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t i = 0; i < count; i++) {
        const Block b = blocks[i];
        double total = 0;
        for (int64_t r = 0; r < b.rows; r++) {
            const int64_t start = r * b.columns;
            const float center = center_of(&b, start);
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t j = 0; j < b.columns; j++) {
                const float x = raw(&b, start + j) - center;
                sum += x * x;
            }
            total += sum;
        }
        squares[i] = total;
    }
}

/* Update the moments of one entry and return the numerator of its step. */
static inline float moments(const Block *b, int64_t at, float center, float clip) {
    float x = (raw(b, at) - center) * clip;
    x = x > b->limit ? b->limit : (x < -b->limit ? -b->limit : x);
    x += b->coupled * b->weight[at];
    const float mean = b->mean[at] + (x - b->mean[at]) * (1 - b->beta1);
    b->mean[at] = mean;
    b->square[at] = b->beta2 * b->square[at] + (1 - b->beta2) * x * x;
    return mean + b->ahead * (x - mean);
}

static inline void move(const Block *b, int64_t at, float numerator, float second) {
    b->weight[at] = b->keep * b->weight[at] - b->rate * numerator / (b->root * sqrtf(second) + b->eps);
}

/* The whole update; clip is the factor that clipping by norm came to. */
void adam(const Block *blocks, int64_t count, float clip, int threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t i = 0; i < count; i++) {
        const Block b = blocks[i];
        for (int64_t r = 0; r < b.rows; r++) {
            const int64_t start = r * b.columns;
            const float center = center_of(&b, start);
            if (b.largest) {
#pragma omp simd
                for (int64_t j = start; j < start + b.columns; j++) {
                    const float numerator = moments(&b, j, center, clip);
                    const float second = b.square[j] > b.largest[j] ? b.square[j] : b.largest[j];
                    b.largest[j] = second;
                    move(&b, j, numerator, second);
                }
            } else {
#pragma omp simd
                for (int64_t j = start; j < start + b.columns; j++) {
                    const float numerator = moments(&b, j, center, clip);
                    move(&b, j, numerator, b.square[j]);
                }
            }
        }
    }
}
