/* Log-probabilities of tokens from rows of logits, and the slopes of the logits: they are read in their own type, and
 * never written in a wide one. */

#include "numbers.h"

/* Numbers of a row whose sum is made in fp32. */
enum { PART = 1024 };

/* Not 0 if a target is none of the vocabulary. */
int logprobs(const number *logits, const int64_t *targets, float *chosen, float *normalisers, float *entropies,
             long rows, long vocabulary, float temperature) {
    int failed = 0;
#pragma omp parallel for schedule(static) reduction(| : failed)
    for (long row = 0; row < rows; row++) {
        if (targets[row] < 0 || targets[row] >= vocabulary) {
            failed = 1;
            continue;
        }
        const number *mine = logits + row * vocabulary;
        float cool = 1.0f / temperature, top = -INFINITY;
        double total = 0, along = 0;
#pragma omp simd reduction(max : top)
        for (long i = 0; i < vocabulary; i++) top = wide(mine[i]) > top ? wide(mine[i]) : top;
        for (long first = 0; first < vocabulary; first += PART) {
            long end = first + PART < vocabulary ? first + PART : vocabulary;
            float sum = 0, moments = 0;
#pragma omp simd reduction(+ : sum, moments)
            for (long i = first; i < end; i++) {
                float below = (wide(mine[i]) - top) * cool;
                below = below < -100.0f ? -100.0f : below; /* nothing times infinity is no number */
                float share = exponential(below);
                sum += share;
                moments += share * below;
            }
            total += sum;
            along += moments;
        }
        double most = top * cool, size = log(total);
        normalisers[row] = (float)(most + size);
        chosen[row] = (float)(wide(mine[targets[row]]) * cool - most - size);
        entropies[row] = (float)(size - along / total);
    }
    return failed;
}

/* Logits become their slopes; targets are those that the forward has seen. */
void logprobs_backward(number *logits, const int64_t *targets, const float *normalisers, const float *outgoing,
                       long rows, long vocabulary, float temperature) {
#pragma omp parallel for schedule(static)
    for (long row = 0; row < rows; row++) {
        number *mine = logits + row * vocabulary;
        float cool = 1.0f / temperature, slope = outgoing[row] * cool, normaliser = normalisers[row];
        float share = expf(wide(mine[targets[row]]) * cool - normaliser);
#pragma omp simd
        for (long i = 0; i < vocabulary; i++)
            mine[i] = narrow(-slope * exponential(wide(mine[i]) * cool - normaliser));
        mine[targets[row]] = narrow(slope * (1.0f - share));
    }
}
