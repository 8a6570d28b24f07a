/* A few long rows times a vector, and vectors of coordinates times the rows, at the speed at which the rows are read.
 *
 * The columns are cut into parts that do not depend on the number of threads, nor on each other: the results are the same
 * bits in every run. In a part, groups of rows go through the processor side by side: as many streams as its prefetching
 * follows, while the vector (or what is summed up) stays in the cache. */

#include <stdint.h>

enum { AHEAD = 64, LANES = 16 }; /* columns to fetch ahead; numbers in a register */

typedef float Lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

/* Do work for groups of 8 rows, and of 4, 2 and 1 at the end: constants, which the compiler unrolls for. */
#define IN_GROUPS(i, count, WORK)                                                                                      \
    for (; i + 8 <= count; i += 8)                                                                                     \
        WORK(8);                                                                                                       \
    for (; i + 4 <= count; i += 4)                                                                                     \
        WORK(4);                                                                                                       \
    for (; i + 2 <= count; i += 2)                                                                                     \
        WORK(2);                                                                                                       \
    for (; i < count; i++)                                                                                             \
        WORK(1);

INLINE void dots(const float *rows, int64_t stride, const int group, const float *vector, int64_t width, double *sums) {
    Lanes sum[8] = {{0}};
    int64_t j = 0;
    for (; j + LANES <= width; j += LANES) {
        const Lanes x = *(const Lanes *)(vector + j);
        UNROLL for (int g = 0; g < group; g++) {
            const float *row = rows + g * stride + j;
            __builtin_prefetch(row + AHEAD);
            sum[g] += *(const Lanes *)row * x;
        }
    }
    UNROLL for (int g = 0; g < group; g++) {
        double total = 0;
        for (int lane = 0; lane < LANES; lane++)
            total += sum[g][lane];
        for (int64_t rest = j; rest < width; rest++)
            total += rows[g * stride + rest] * vector[rest];
        sums[g] = total;
    }
}

/* sums[p * count + i]: row i times the vector over part p, of which there are columns / part, rounded up */
void project(const float *rows, int64_t stride, int64_t count, int64_t columns, int64_t part, const float *vector,
             double *sums, int threads) {
    const int64_t parts = (columns + part - 1) / part;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t p = 0; p < parts; p++) {
        const int64_t start = p * part, width = columns - start < part ? columns - start : part;
        int64_t i = 0;
#define DOTS(group) dots(rows + i * stride + start, stride, group, vector + start, width, sums + p * count + i)
        IN_GROUPS(i, count, DOTS)
    }
}

/* Add rows times coordinates to one or two vectors; the first group of rows writes over what was there. */
INLINE void combine(const float *rows, int64_t stride, const int group, const float *coordinates, int64_t count,
                    const int vectors, float *out, int64_t apart, int64_t width, int first) {
    int64_t j = 0;
    for (; j + LANES <= width; j += LANES) {
        Lanes a = {0}, b = {0};
        if (!first) {
            a = *(const Lanes *)(out + j);
            if (vectors == 2)
                b = *(const Lanes *)(out + apart + j);
        }
        UNROLL for (int g = 0; g < group; g++) {
            const float *row = rows + g * stride + j;
            __builtin_prefetch(row + AHEAD);
            const Lanes x = *(const Lanes *)row;
            a += coordinates[g] * x;
            if (vectors == 2)
                b += coordinates[count + g] * x;
        }
        *(Lanes *)(out + j) = a;
        if (vectors == 2)
            *(Lanes *)(out + apart + j) = b;
    }
    for (int v = 0; v < vectors; v++)
        for (int64_t rest = j; rest < width; rest++) {
            float total = first ? 0 : out[v * apart + rest];
            for (int g = 0; g < group; g++)
                total += coordinates[v * count + g] * rows[g * stride + rest];
            out[v * apart + rest] = total;
        }
}

/* out[v]: the sum of coordinates[v][i] times row i; at least one row, vectors of length columns that lie apart */
void lift(const float *rows, int64_t stride, int64_t count, int64_t columns, int64_t part, const float *coordinates,
          int64_t vectors, float *out, int64_t apart, int threads) {
    const int64_t parts = (columns + part - 1) / part;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t p = 0; p < parts; p++) {
        const int64_t start = p * part, width = columns - start < part ? columns - start : part;
        for (int64_t v = 0; v < vectors; v += 2) {
            const float *own = coordinates + v * count;
            float *to = out + v * apart + start;
            int64_t i = 0;
#define TWO(group) combine(rows + i * stride + start, stride, group, own + i, count, 2, to, apart, width, i == 0)
#define ONE(group) combine(rows + i * stride + start, stride, group, own + i, count, 1, to, apart, width, i == 0)
            if (v + 1 < vectors) {
                IN_GROUPS(i, count, TWO)
            } else {
                IN_GROUPS(i, count, ONE)
            }
        }
    }
}
