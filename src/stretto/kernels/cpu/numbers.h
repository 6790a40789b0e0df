/* Numbers of the type of states, and what all kernels compute with them. BF16 says which type that is. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef BF16
typedef uint16_t number;

static inline float wide(number bits) {
    uint32_t all = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &all, sizeof value);
    return value;
}

static inline number narrow(float value) {
    uint32_t all;
    memcpy(&all, &value, sizeof all);
    uint32_t even = (all + 0x7fff + ((all >> 16) & 1)) >> 16;
    return value != value ? 0x7fc0 : (number)even;
}
#else
typedef float number;

static inline float wide(number value) { return value; }

static inline number narrow(float value) { return value; }
#endif

static inline float rounded(float value) { return wide(narrow(value)); }

/* Rows that are worth a second thread have this many numbers. */
enum { WORTH_THREADS = 1 << 16 };

/* e^x to the precision of fp32, in operations that a compiler can do on many numbers at once; 0 where it would take
 * numbers that processors are slow at. */
static inline float exponential(float given) {
    float x = given < -87.0f ? -87.0f : given;
    x = x > 88.0f ? 88.0f : x;
    float halves = x * 1.44269504f + 12582912.0f; /* the nearest whole number is in its last bits */
    float whole = halves - 12582912.0f;
    float rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    float sum = 1.9875691500e-4f;
    sum = sum * rest + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    uint32_t power = (uint32_t)((int32_t)whole + 127) << 23;
    float scale;
    memcpy(&scale, &power, sizeof scale);
    return given < -87.0f ? 0.0f : sum * scale;
}

static inline void normed_row(const number *states, const number *weight, number *out, long width, float eps) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (long i = 0; i < width; i++) sum += wide(states[i]) * wide(states[i]);
    float rate = 1.0f / sqrtf(sum / (float)width + eps);
#pragma omp simd
    for (long i = 0; i < width; i++) out[i] = narrow(wide(weight[i]) * rounded(wide(states[i]) * rate));
}

/* Numbers that are computed with at once; heads are filled up with zeros to multiples of it. */
enum { LANES = 16 };
typedef float lanes __attribute__((vector_size(LANES * sizeof(float)), may_alias));

/* Some numbers of two vectors, by their places in both. */
#ifdef __clang__
#define HALVES(one, other, ...) __builtin_shufflevector(one, other, __VA_ARGS__)
#else
typedef int32_t places __attribute__((vector_size(LANES * sizeof(int32_t))));
#define HALVES(one, other, ...) __builtin_shuffle(one, other, (places){__VA_ARGS__})
#endif
