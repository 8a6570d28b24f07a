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
    float beta1, gain1;        /* mean = beta1 * mean + gain1 * x, where gain1 is 1 - beta1 in double, then rounded: */
    float beta2, gain2;        /* in float32, 1 - 0.9999 is off by 1 in 10,000. The same of the squares. */
    float ahead;               /* numerator: mean + ahead * (x - mean) */
    float rate, root, eps;     /* weight -= rate * numerator / (root * sqrt(square) + eps) */
    float padding;
} Block;

/* A row as the loops want it: its own pointers, which do not overlap, and numbers that no store can change. */
#define ROW(b, start)                                                                                                  \
    const float *restrict grad = (b).grad + (start);                                                                   \
    float *restrict weight = (b).weight + (start);                                                                     \
    const float unscale = (b).unscale, decay = (b).decay;                                                              \
    const int64_t columns = (b).columns;

static inline float center_of(const float *restrict grad, const float *restrict weight, int64_t columns, float unscale,
                              float decay) {
    float sum = 0;
    if (decay != 0) {
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < columns; j++)
            sum += unscale * grad[j] + decay * weight[j];
    } else {
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < columns; j++)
            sum += unscale * grad[j];
    }
    return sum / (float)columns;
}

/* squares[i]: sum of the squares of x over block i, before any clipping */
void sum_squares(const Block *blocks, int64_t count, double *squares, int threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t i = 0; i < count; i++) {
        const Block b = blocks[i];
        double total = 0;
        for (int64_t r = 0; r < b.rows; r++) {
            ROW(b, r * b.columns)
            const float center = b.centralize ? center_of(grad, weight, columns, unscale, decay) : 0;
            float sum = 0;
            if (decay != 0) {
#pragma omp simd reduction(+ : sum)
                for (int64_t j = 0; j < columns; j++) {
                    const float x = unscale * grad[j] + decay * weight[j] - center;
                    sum += x * x;
                }
            } else {
#pragma omp simd reduction(+ : sum)
                for (int64_t j = 0; j < columns; j++) {
                    const float x = unscale * grad[j] - center;
                    sum += x * x;
                }
            }
            total += sum;
        }
        squares[i] = total;
    }
}

/* The whole update; clip is the factor that clipping by norm came to. */
void adam(const Block *blocks, int64_t count, float clip, int threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t i = 0; i < count; i++) {
        const Block b = blocks[i];
        const float limit = b.limit, coupled = b.coupled, keep = b.keep, ahead = b.ahead;
        const float beta1 = b.beta1, gain1 = b.gain1, beta2 = b.beta2, gain2 = b.gain2;
        const float rate = b.rate, root = b.root, eps = b.eps;
        for (int64_t r = 0; r < b.rows; r++) {
            ROW(b, r * b.columns)
            float *restrict mean = b.mean + r * columns;
            float *restrict square = b.square + r * columns;
            const float center = b.centralize ? center_of(grad, weight, columns, unscale, decay) : 0;
/* One entry; SECOND is what stands under the root, an expression of its second moment v. */
#define UPDATE(SECOND)                                                                                                 \
    const float w = weight[j];                                                                                         \
    float x = (unscale * grad[j] + decay * w - center) * clip;                                                         \
    x = x > limit ? limit : (x < -limit ? -limit : x);                                                                 \
    x += coupled * w;                                                                                                  \
    const float m = beta1 * mean[j] + gain1 * x;                                                                       \
    const float v = beta2 * square[j] + gain2 * x * x;                                                                 \
    mean[j] = m;                                                                                                       \
    square[j] = v;                                                                                                     \
    weight[j] = keep * w - rate * (m + ahead * (x - m)) / (root * sqrtf(SECOND) + eps);
            if (b.largest) {
                float *restrict largest = b.largest + r * columns;
#pragma omp simd
                for (int64_t j = 0; j < columns; j++) {
                    UPDATE(largest[j] = v > largest[j] ? v : largest[j])
                }
            } else {
#pragma omp simd
                for (int64_t j = 0; j < columns; j++) {
                    UPDATE(v)
                }
            }
        }
    }
}
