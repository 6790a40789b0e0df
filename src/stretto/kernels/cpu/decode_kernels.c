/* What a decode step computes between its products with weights, one call for each part of a layer.
 *
 * The processor spends a decode step on reading weights, which push everything else out of its caches. So a layer of
 * a hundred small operations spends most of its time on calling them and on fetching their code and their rows anew.
 * Here each part is one pass over rows that stay where they are, on the threads of torch (one OpenMP runtime serves
 * both). Numbers are rounded where the layers of transformers round them.
 *
 * Compiled once for each type of states: BF16 says which. n sequences of w new tokens each, K key heads with G queries
 * each, D numbers a head. */

#include "numbers.h"

#if defined(BF16) && defined(__AVX512BF16__)
#include <immintrin.h>
#endif

/* Keys that are looked at together. */
enum { BLOCK = 32 };

/* Turns a head by its position, in place; its norm comes first where a model has one. The sines of the first half have
 * their sign changed. */
static inline void turn(number *states, const number *norm, const number *cosine, const number *sine, long size,
                        float eps) {
    if (norm) normed_row(states, norm, states, size, eps);
    long half = size / 2;
#pragma omp simd
    for (long i = 0; i < half; i++) {
        float low = wide(states[i]), high = wide(states[i + half]);
        states[i] = narrow(rounded(low * wide(cosine[i])) + rounded(high * wide(sine[i])));
        states[i + half] = narrow(rounded(high * wide(cosine[i + half])) + rounded(low * wide(sine[i + half])));
    }
}

#if defined(BF16) && defined(__AVX512BF16__)
/* Numbers that the processor multiplies as they are, two by two. */
#define PAIRS 32

static inline lanes paired(lanes sums, const number *one, const number *other) {
    __m512bh left = (__m512bh)_mm512_loadu_si512(one), right = (__m512bh)_mm512_loadu_si512(other);
    return (lanes)_mm512_dpbf16_ps((__m512)sums, left, right);
}
#endif

/* One step of adding up the numbers of two vectors: neighbors at this distance are added, and take turns. */
#define EIGHTS(one, other)                                                                       \
    (HALVES(one, other, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +                \
     HALVES(one, other, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
#define FOURS(one, other)                                                                        \
    (HALVES(one, other, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +              \
     HALVES(one, other, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31))
#define TWOS(one, other)                                                                         \
    (HALVES(one, other, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +              \
     HALVES(one, other, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31))
#define ONES(one, other)                                                                         \
    (HALVES(one, other, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +             \
     HALVES(one, other, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31))

/* The sums of 16 vectors' numbers, as one vector: a quarter of what it takes to add up one after the other. */
static inline lanes totals_of(lanes each[LANES]) {
    for (int i = 0; i < 8; i++) each[i] = EIGHTS(each[i], each[i + 8]);
    for (int i = 0; i < 4; i++) each[i] = FOURS(each[i], each[i + 4]);
    for (int i = 0; i < 2; i++) each[i] = TWOS(each[i], each[i + 2]);
    return ONES(each[0], each[1]);
}

static inline void widen(const number *rows, lanes *out, long count, long size, long chunks) {
    for (long row = 0; row < count; row++) {
        float *to = (float *)(out + row * chunks);
#pragma omp simd
        for (long i = 0; i < size; i++) to[i] = wide(rows[row * size + i]);
    }
}

/* What the queries of one token and one key head see of `count` keys: sums of values for each of G queries, and the
 * logarithm of what the weights add up to. The largest score so far is taken out as keys come, block by block. */
static inline __attribute__((always_inline)) void look(const number *queries, const number *keys, const number *values,
                                                       number *out, float *totals, long group, long count,
                                                       const long size, float scale) {
    const long chunks = (size + LANES - 1) / LANES;
    lanes query[group * chunks], sums[group * chunks], wide_keys[BLOCK * chunks], wide_values[BLOCK * chunks];
    float most[group], shares[group], weights[BLOCK];
    if (size < chunks * LANES) {
        memset(query, 0, sizeof query);
        memset(wide_keys, 0, sizeof wide_keys);
        memset(wide_values, 0, sizeof wide_values);
    }
    memset(sums, 0, sizeof sums);
    widen(queries, query, group, size, chunks);
    for (long each = 0; each < group; each++) most[each] = -INFINITY, shares[each] = 0;
    for (long start = 0; start < count; start += BLOCK) {
        long here = count - start < BLOCK ? count - start : BLOCK;
#ifdef PAIRS
        if (size % PAIRS)
#endif
            widen(keys + start * size, wide_keys, here, size, chunks);
        widen(values + start * size, wide_values, here, size, chunks);
        for (long each = 0; each < group; each++) {
            float top = most[each], share = 0;
            for (long first = 0; first < here; first += LANES) {
                lanes products[LANES];
#pragma GCC unroll 16
                for (long key = 0; key < LANES; key++) {
                    products[key] = (lanes){0};
#ifdef PAIRS
                    if (size % PAIRS == 0) {
                        long row = start + (first + key < here ? first + key : here - 1);
#pragma GCC unroll 8
                        for (long i = 0; i < size; i += PAIRS)
                            products[key] = paired(products[key], queries + each * size + i, keys + row * size + i);
                        continue;
                    }
#endif
#pragma GCC unroll 8
                    for (long i = 0; i < chunks; i++)
                        products[key] += query[each * chunks + i] * wide_keys[(first + key) * chunks + i];
                }
                lanes scores = totals_of(products) * scale;
                memcpy(weights + first, &scores, sizeof scores);
            }
#pragma omp simd reduction(max : top)
            for (long key = 0; key < here; key++) top = weights[key] > top ? weights[key] : top;
#pragma omp simd reduction(+ : share)
            for (long key = 0; key < here; key++) {
                weights[key] = exponential(weights[key] - top);
                share += weights[key];
            }
            float kept = start ? exponential(most[each] - top) : 0;
            shares[each] = shares[each] * kept + share;
            most[each] = top;
            lanes sum[chunks];
#pragma GCC unroll 8
            for (long i = 0; i < chunks; i++) sum[i] = sums[each * chunks + i] * kept;
            for (long key = 0; key < here; key++)
#pragma GCC unroll 8
                for (long i = 0; i < chunks; i++) sum[i] += weights[key] * wide_values[key * chunks + i];
#pragma GCC unroll 8
            for (long i = 0; i < chunks; i++) sums[each * chunks + i] = sum[i];
        }
    }
    for (long each = 0; each < group; each++) {
        const float *sum = (const float *)(sums + each * chunks);
        totals[each] = most[each] + logf(shares[each]);
#pragma omp simd
        for (long i = 0; i < size; i++) out[each * size + i] = narrow(sum[i] / shares[each]);
    }
}

/* Turns new queries and keys by their positions, unless there are no cosines, writes new keys and values into the
 * sequences' slots, and looks at what each has of its own there.
 *
 * A slot holds (K, capacity, D) keys; `before` are its tokens that are there already. A token sees as many of its
 * sequence as the `window` has, itself included; 0 is all. Rows of queries, keys and values are strided; the result,
 * (n*w, K*G, D) and (n*w, K*G) totals, is not. */
void attend(number *queries, number *keys, const number *values, const number *cosines, const number *sines,
            const number *query_norm, const number *key_norm, number *kept_keys, number *kept_values,
            const int64_t *before, number *out, float *totals, long sequences, long tokens, long heads, long group,
            long size, long capacity, long query_stride, long key_stride, long value_stride, long window, float scale,
            float eps) {
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (long sequence = 0; sequence < sequences; sequence++)
        for (long head = 0; head < heads; head++) {
            long slot = (sequence * heads + head) * capacity * size, first = sequence * tokens;
            number *my_keys = kept_keys + slot, *my_values = kept_values + slot;
            for (long token = first; token < first + tokens; token++) {
                number *asking = queries + token * query_stride + head * group * size;
                number *key = keys + token * key_stride + head * size;
                const number *value = values + token * value_stride + head * size;
                long place = (before[sequence] + token - first) * size;
                if (cosines) {
                    const number *cosine = cosines + token * size, *sine = sines + token * size;
                    for (long each = 0; each < group; each++)
                        turn(asking + each * size, query_norm, cosine, sine, size, eps);
                    turn(key, key_norm, cosine, sine, size, eps);
                }
                memcpy(my_keys + place, key, size * sizeof *key);
                memcpy(my_values + place, value, size * sizeof *value);
            }
            for (long token = 0; token < tokens; token++) {
                long end = before[sequence] + token + 1;
                long begin = window > 0 ? end - window : 0;
                long result = ((first + token) * heads + head) * group;
                if (begin < 0) begin = 0;
                const number *asking = queries + (first + token) * query_stride + head * group * size;
                const number *seen_keys = my_keys + begin * size, *seen_values = my_values + begin * size;
                number *found = out + result * size;
                float *total = totals + result;
                if (size == 64) /* sizes that the compiler is to know */
                    look(asking, seen_keys, seen_values, found, total, group, end - begin, 64, scale);
                else if (size == 128)
                    look(asking, seen_keys, seen_values, found, total, group, end - begin, 128, scale);
                else
                    look(asking, seen_keys, seen_values, found, total, group, end - begin, size, scale);
            }
        }
}

/* Logarithms of the summed exponentials of each block of a row's logits, which are products over their temperature. */
void weigh(const number *products, const float *temperatures, float *out, long rows, long vocabulary, long block) {
    long blocks = (vocabulary + block - 1) / block;
#pragma omp parallel for collapse(2) schedule(static)
    for (long row = 0; row < rows; row++)
        for (long each = 0; each < blocks; each++) {
            const number *mine = products + row * vocabulary + each * block;
            long count = vocabulary - each * block < block ? vocabulary - each * block : block;
            float cool = 1.0f / temperatures[row], top = -INFINITY, sum = 0;
            int wrong = 0;
#pragma omp simd reduction(max : top) reduction(| : wrong)
            for (long i = 0; i < count; i++) {
                float value = wide(mine[i]);
                top = value > top ? value : top;
                wrong |= value != value;
            }
#pragma omp simd reduction(+ : sum)
            for (long i = 0; i < count; i++) sum += exponential((wide(mine[i]) - top) * cool);
            out[row * blocks + each] = wrong ? NAN : top > -INFINITY ? top * cool + logf(sum) : top;
        }
}
