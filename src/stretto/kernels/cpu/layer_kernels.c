/* RMS norms and gates of decoder layers: one pass over each row, forward and backward.
 *
 * Numbers are rounded where Llama's layers in transformers round them; slopes are rounded once, at the end. */

#include "numbers.h"

void norm(const number *states, const number *weight, number *out, long rows, long width, float eps) {
#pragma omp parallel for schedule(static) if (rows * width > WORTH_THREADS)
    for (long row = 0; row < rows; row++)
        normed_row(states + row * width, weight, out + row * width, width, eps);
}

/* The slopes of states, and for every `block` of rows what they add to the slope of the weight, if it is trained. */
void norm_backward(const number *states, const number *weight, const number *outgoing, number *slopes, float *sums,
                   long rows, long width, long block, float eps) {
#pragma omp parallel for schedule(static) if (rows * width > WORTH_THREADS)
    for (long first = 0; first < rows; first += block) {
        float *sum = sums ? sums + first / block * width : NULL;
        if (sum) memset(sum, 0, width * sizeof *sum);
        for (long row = first; row < rows && row < first + block; row++) {
            const number *mine = states + row * width, *above = outgoing + row * width;
            float squares = 0, along = 0;
#pragma omp simd reduction(+ : squares, along)
            for (long i = 0; i < width; i++) {
                squares += wide(mine[i]) * wide(mine[i]);
                along += wide(above[i]) * wide(weight[i]) * wide(mine[i]);
            }
            float rate = 1.0f / sqrtf(squares / (float)width + eps);
            along *= rate * rate / (float)width;
#pragma omp simd
            for (long i = 0; i < width; i++)
                slopes[row * width + i] = narrow((wide(above[i]) * wide(weight[i]) - wide(mine[i]) * along) * rate);
            if (!sum) continue;
#pragma omp simd
            for (long i = 0; i < width; i++) sum[i] += wide(above[i]) * (wide(mine[i]) * rate);
        }
    }
}

static inline float sigmoid(float value) { return value < -88.0f ? 0.0f : 1.0f / (1.0f + exponential(-value)); }

/* silu(gate) * up, of rows that begin `stride` numbers after each other. */
void gate(const number *gates, const number *ups, number *out, long rows, long width, long stride) {
#pragma omp parallel for schedule(static) if (rows * width > WORTH_THREADS)
    for (long row = 0; row < rows; row++)
#pragma omp simd
        for (long i = 0; i < width; i++) {
            float value = wide(gates[row * stride + i]);
            out[row * width + i] = narrow(rounded(value * sigmoid(value)) * wide(ups[row * stride + i]));
        }
}

/* The slopes of gates and of what passes through them. */
void gate_backward(const number *gates, const number *ups, const number *outgoing, number *gate_slopes,
                   number *up_slopes, long count) {
#pragma omp parallel for simd schedule(static) if (count > WORTH_THREADS)
    for (long i = 0; i < count; i++) {
        float value = wide(gates[i]), slope = wide(outgoing[i]), share = sigmoid(value), silu = value * share;
        up_slopes[i] = narrow(slope * silu);
        gate_slopes[i] = narrow(slope * wide(ups[i]) * (share + silu * (1.0f - share)));
    }
}
