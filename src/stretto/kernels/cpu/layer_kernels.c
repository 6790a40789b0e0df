/* RMS norms, gates and rotary positions of decoder layers: one pass over each row, forward and backward.
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

/* A head rotated by its position. */
static inline void rotate_head(const number *head, const number *cosine, const number *sine, number *out, long half) {
#pragma omp simd
    for (long i = 0; i < half; i++) {
        float low = wide(head[i]), high = wide(head[i + half]);
        out[i] = narrow(rounded(low * wide(cosine[i])) + rounded(-high * wide(sine[i])));
        out[i + half] = narrow(rounded(high * wide(cosine[i + half])) + rounded(low * wide(sine[i + half])));
    }
}

/* The slopes of a head, from those of what it was rotated to. */
static inline void rotate_back(const number *slopes, const number *cosine, const number *sine, number *out, long half) {
#pragma omp simd
    for (long i = 0; i < half; i++) {
        float low = wide(slopes[i]), high = wide(slopes[i + half]);
        out[i] = narrow(low * wide(cosine[i]) + high * wide(sine[i + half]));
        out[i + half] = narrow(high * wide(cosine[i + half]) - low * wide(sine[i]));
    }
}

/* Queries and keys of tokens that begin a stride after each other, rotated by the angles of each token. */
void rotate_heads(const number *query, const number *key, const number *cosine, const number *sine, number *query_out,
                number *key_out, long tokens, long query_heads, long key_heads, long size, long query_stride,
                long key_stride, long back) {
    long heads = query_heads + key_heads;
#pragma omp parallel for schedule(static) if (tokens * heads * size > WORTH_THREADS)
    for (long token = 0; token < tokens; token++)
        for (long head = 0; head < heads; head++) {
            int asks = head < query_heads;
            long place = asks ? head : head - query_heads;
            const number *from = (asks ? query + token * query_stride : key + token * key_stride) + place * size;
            number *to = (asks ? query_out + token * query_heads * size : key_out + token * key_heads * size) + place * size;
            (back ? rotate_back : rotate_head)(from, cosine + token * size, sine + token * size, to, size / 2);
        }
}
