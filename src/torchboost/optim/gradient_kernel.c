/* The first part of a gradient pipeline in one pass over memory: unscale, decay, centralise, and the sum of squares
 * from which the factor of clipping follows.
 *
 * A block is a number of whole rows of one gradient, so that a row is still in the cache when its mean is known. Blocks
 * do not depend on each other nor on the number of threads: the results are the same bits in every run. */

#include <stdint.h>

typedef struct {
    float *grad;
    const float *weight; /* of the decay */
    int64_t rows, columns, centralize;
    float unscale, decay; /* x = unscale * grad + decay * weight; minus its mean over the row if centralised */
    float measure;        /* the squares are those of measure * x */
    float padding;
} Block;

/* Vectors do not pay for rows shorter than this. */
enum { SHORT = 16 };

static inline float short_row(float *restrict grad, const float *restrict weight, int64_t columns, float unscale,
                              float decay, float measure) {
    float row[SHORT], center = 0, sum = 0;
    for (int64_t j = 0; j < columns; j++) {
        row[j] = decay != 0 ? unscale * grad[j] + decay * weight[j] : unscale * grad[j];
        center += row[j];
    }
    center /= (float)columns;
    for (int64_t j = 0; j < columns; j++) {
        const float x = row[j] - center;
        grad[j] = x;
        sum += measure * x * (measure * x);
    }
    return sum;
}

/* squares[i]: sum of the squares of x over block i. Gradients that stay as they are, are only read. */
void prepare(const Block *blocks, int64_t count, double *squares, int threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t i = 0; i < count; i++) {
        const Block b = blocks[i];
        const float unscale = b.unscale, decay = b.decay, measure = b.measure;
        const int64_t columns = b.columns;
        double total = 0;
        for (int64_t r = 0; r < b.rows; r++) {
            float *restrict grad = b.grad + r * columns;
            const float *restrict weight = b.weight + r * columns;
            float center = 0, sum = 0;
            if (b.centralize && columns < SHORT) {
                total += short_row(grad, weight, columns, unscale, decay, measure);
                continue;
            }
            if (b.centralize) {
                if (decay != 0) {
#pragma omp simd reduction(+ : center)
                    for (int64_t j = 0; j < columns; j++)
                        center += unscale * grad[j] + decay * weight[j];
                } else {
#pragma omp simd reduction(+ : center)
                    for (int64_t j = 0; j < columns; j++)
                        center += unscale * grad[j];
                }
                center /= (float)columns;
            }
            if (decay != 0) {
#pragma omp simd reduction(+ : sum)
                for (int64_t j = 0; j < columns; j++) {
                    const float x = unscale * grad[j] + decay * weight[j] - center;
                    grad[j] = x;
                    sum += measure * x * (measure * x);
                }
            } else if (b.centralize || unscale != 1) {
#pragma omp simd reduction(+ : sum)
                for (int64_t j = 0; j < columns; j++) {
                    const float x = unscale * grad[j] - center;
                    grad[j] = x;
                    sum += measure * x * (measure * x);
                }
            } else {
#pragma omp simd reduction(+ : sum)
                for (int64_t j = 0; j < columns; j++)
                    sum += measure * grad[j] * (measure * grad[j]);
            }
            total += sum;
        }
        squares[i] = total;
    }
}
