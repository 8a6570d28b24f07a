/* The steps of dense Adam with a gradient of zero, for rows that have missed them.
 *
 * A row makes its steps one by one, in the cache, until it has caught up or rests. Rows do not depend on each other nor on
 * the number of threads: the results are the same bits in every run. */

#include <math.h>
#include <stdint.h>

typedef struct {
    float new1, kept2, new2, floor, root2, size, fade, pull; /* factors of the step */
    float reach, left; /* of the steps after this one: bound of a move, and what decay leaves of a weight */
} Step;

typedef struct {
    float *weight, *mean, *square, *largest; /* largest is NULL without amsgrad */
    const int64_t *begin;                    /* last step of each row */
    int64_t *stop;                           /* out: the step at which each row rests, or the last one */
    const Step *steps;                       /* steps[n] is step first + n */
    int64_t rows, columns, first, end;
    int64_t nesterov, fades, pulls, uncorrected, rests;
    float least, fraction, tiny; /* smallest epsilon; rounding of a weight, relative and absolute */
} Job;

/* Steps between two looks at whether a row rests. */
enum { CHUNK = 32 };

static int at_rest(const Job *job, int64_t offset, const Step *last) {
    const float *weight = job->weight + offset, *mean = job->mean + offset, *square = job->square + offset;
    const float *largest = job->largest ? job->largest + offset : square;
    int moves = 0;
#pragma omp simd reduction(| : moves)
    for (int64_t j = 0; j < job->columns; j++) {
        const float root = sqrtf(largest[j] > square[j] ? largest[j] : square[j]);
        const float travel = last->reach * fabsf(mean[j]) / (root > job->least ? root : job->least);
        moves |= !(travel <= fabsf(weight[j]) * (last->left * job->fraction) + job->tiny);
    }
    return !moves;
}

/* Called with constants, so that the compiler makes a loop without branches for each form. */
static inline __attribute__((always_inline)) void advance(const Job *job, int64_t offset, const Step *step, int fades,
                                                          int pulls, int nesterov, int uncorrected, int amsgrad) {
    float *restrict weight = job->weight + offset, *restrict mean = job->mean + offset;
    float *restrict square = job->square + offset, *restrict largest = amsgrad ? job->largest + offset : 0;
    const Step s = *step;
    const float divisor = 1 / s.root2;
#pragma omp simd
    for (int64_t j = 0; j < job->columns; j++) {
        const float w = fades ? weight[j] * s.fade : weight[j];
        const float grad = pulls ? w * s.pull : 0;
        const float m = mean[j] + s.new1 * (grad - mean[j]);
        const float v = pulls ? square[j] * s.kept2 + grad * grad * s.new2 : square[j] * s.kept2;
        float most = v;
        mean[j] = m;
        square[j] = v;
        if (amsgrad) {
            most = largest[j] > v || largest[j] != largest[j] ? largest[j] : v;
            largest[j] = most;
        }
        const float ahead = nesterov ? m + s.new1 * (grad - m) : m;
        const float root = uncorrected ? sqrtf(most) + s.floor : sqrtf(most) * divisor + s.floor;
        weight[j] = w + ahead * s.size / root;
    }
}

static void make_step(const Job *job, int64_t offset, const Step *step) {
    if (job->pulls || job->nesterov || job->uncorrected || job->largest)
        advance(job, offset, step, job->fades != 0, job->pulls != 0, job->nesterov != 0, job->uncorrected != 0,
                job->largest != 0);
    else if (job->fades)
        advance(job, offset, step, 1, 0, 0, 0, 0);
    else
        advance(job, offset, step, 0, 0, 0, 0, 0);
}

void replay(const Job *job, int threads) {
#pragma omp parallel for schedule(dynamic, 64) num_threads(threads)
    for (int64_t r = 0; r < job->rows; r++) {
        int64_t step = job->begin[r];
        while (step < job->end) {
            if (job->rests && at_rest(job, r * job->columns, job->steps + step - job->first))
                break;
            const int64_t until = step + CHUNK < job->end ? step + CHUNK : job->end;
            while (step < until)
                make_step(job, r * job->columns, job->steps + ++step - job->first);
        }
        job->stop[r] = step;
    }
}
