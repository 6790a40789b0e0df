/* Attention over a packed row, forward and backward, stretch by stretch.
 *
 * A stretch is some consecutive tokens of a segment, with all that they see: what is before them on their branch, and
 * they themselves. Its rows are fetched once, in fp32; its products, masks and weights stay in the processor's cache.
 * One task has a stretch and a key head (forward), or a share of all stretches and a key head (backward), whose slopes
 * it adds up in its own memory: no two tasks write to one place, and sums do not depend on who comes first.
 *
 * T tokens of the row, K key heads with G queries each, D numbers a head; a stretch has L tokens, which see S. */

#include "numbers.h"
#include <stdlib.h>

/* What is multiplied in registers at once. */
#ifdef __AVX512F__
enum { ROWS = 6, VECTORS = 4 };
#else
enum { ROWS = 2, VECTORS = 2 };
#endif

static inline long filled_up(long count) { return (count + LANES - 1) / LANES * LANES; }

/* Where queries, keys and values are: numbers between the heads and between the tokens of each. */
typedef struct {
    const number *rows;
    long token, head;
} heads_of;

static inline const number *head_at(heads_of all, long token, long head) {
    return all.rows + token * all.token + head * all.head;
}

static inline __attribute__((always_inline)) void corner(const float *one, long row, long step, const float *other,
                                                         long other_row, float *out, long out_row, long depth,
                                                         const long rows, const long vectors) {
    lanes sums[ROWS][VECTORS];
#pragma GCC unroll 8
    for (long i = 0; i < rows; i++)
#pragma GCC unroll 8
        for (long j = 0; j < vectors; j++) sums[i][j] = (lanes){0};
    for (long k = 0; k < depth; k++) {
        const lanes *right = (const lanes *)(other + k * other_row);
#pragma GCC unroll 8
        for (long i = 0; i < rows; i++)
#pragma GCC unroll 8
            for (long j = 0; j < vectors; j++) sums[i][j] += one[i * row + k * step] * right[j];
    }
#pragma GCC unroll 8
    for (long i = 0; i < rows; i++)
#pragma GCC unroll 8
        for (long j = 0; j < vectors; j++) ((lanes *)(out + i * out_row))[j] = sums[i][j];
}

/* (rows, columns) out = (rows, depth) one, whose numbers lie `row` and `step` apart, times (depth, columns) other.
 * Columns are filled up. */
static void product(const float *one, long row, long step, const float *other, long other_row, float *out, long out_row,
                    long rows, long columns, long depth) {
#define CORNER(height, width) \
    corner(one + i * row, row, step, other + j, other_row, out + i * out_row + j, out_row, depth, height, width)
    long i, j = 0;
    for (; j + VECTORS * LANES <= columns; j += VECTORS * LANES) {
        for (i = 0; i + ROWS <= rows; i += ROWS) CORNER(ROWS, VECTORS);
        for (; i < rows; i++) CORNER(1, VECTORS);
    }
    for (; j < columns; j += LANES) {
        for (i = 0; i + ROWS <= rows; i += ROWS) CORNER(ROWS, 1);
        for (; i < rows; i++) CORNER(1, 1);
    }
#undef CORNER
}

/* Numbers of a head in fp32, filled up with zeros. */
static inline void fetch(const number *head, float *out, long size, float scale) {
#pragma omp simd
    for (long i = 0; i < size; i++) out[i] = wide(head[i]) * scale;
    for (long i = size; i < filled_up(size); i++) out[i] = 0;
}

#define FIRSTS(one, other) HALVES(one, other, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define LASTS(one, other) HALVES(one, other, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)

/* (rows, columns) -> (columns, rows), both filled up. */
static void transpose(const float *in, float *out, long rows, long columns) {
    for (long i = 0; i < rows; i += LANES)
        for (long j = 0; j < columns; j += LANES) {
            lanes block[LANES], turned[LANES];
            for (long k = 0; k < LANES; k++) block[k] = *(const lanes *)(in + (i + k) * columns + j);
            for (int round = 0; round < 4; round++) { /* each deals the rows out among twice as many */
#pragma GCC unroll 8
                for (long k = 0; k < LANES / 2; k++) {
                    turned[2 * k] = FIRSTS(block[k], block[k + LANES / 2]);
                    turned[2 * k + 1] = LASTS(block[k], block[k + LANES / 2]);
                }
                memcpy(block, turned, sizeof block);
            }
            for (long k = 0; k < LANES; k++) *(lanes *)(out + (j + k) * rows + i) = block[k];
        }
}

/* A stretch's rows of one key head, and what is computed of them; all are filled up. */
typedef struct {
    float *queries, *keys, *values, *turned, *scores, *found; /* (L*G, D), (S, D), (S, D), (D, S), (L*G, S), (L*G, D) */
    float *outgoing, *slopes, *moved;                         /* (L*G, D), (L*G, S), (S, D), for the backward */
} space;

/* A row, and how it is attended to. */
typedef struct {
    heads_of queries, keys, values, outgoing;
    const int64_t *known, *starts, *lengths; /* places of every stretch's keys, its own tokens last; their numbers */
    long heads, group, size, width, window;  /* the width is the size, filled up */
    float scale;
} row;

/* A stretch and a key head of it. */
typedef struct {
    const int64_t *known;
    long head, seen, own, before, columns, asked; /* columns are keys, filled up; queries are asked for */
} part;

static part part_of(const row *all, long stretch, long head) {
    long seen = all->starts[stretch + 1] - all->starts[stretch], own = all->lengths[stretch];
    return (part){all->known + all->starts[stretch], head, seen, own, seen - own, filled_up(seen), own * all->group};
}

/* Memory for any of a row's parts; nothing where there is none. */
static void *space_for(const row *all, long stretches, space *mine) {
    long rows = 0, keys = 0, pairs = 0;
    for (long stretch = 0; stretch < stretches; stretch++) {
        part here = part_of(all, stretch, 0);
        rows = here.asked > rows ? here.asked : rows;
        keys = here.columns > keys ? here.columns : keys;
        pairs = here.asked * here.columns > pairs ? here.asked * here.columns : pairs;
    }
    rows *= all->width, keys *= all->width;
    float *memory = aligned_alloc(sizeof(lanes), (3 * rows + 4 * keys + 2 * pairs) * sizeof *memory), *next = memory;
    mine->queries = next, next += rows;
    mine->found = next, next += rows;
    mine->outgoing = next, next += rows;
    mine->keys = next, next += keys;
    mine->values = next, next += keys;
    mine->turned = next, next += keys;
    mine->moved = next, next += keys;
    mine->scores = next, next += pairs;
    mine->slopes = next;
    return memory;
}

/* Where among the heads of all queries the one of a line of the part is. */
static inline long place_of(const row *all, const part *here, long line) {
    return (here->known[here->before + line / all->group] * all->heads + here->head) * all->group + line % all->group;
}

/* What of its keys the query of a line sees: from `begin` up to `end`. The rest weighs nothing. */
static inline void reach_of(const row *all, const part *here, long line, long *begin, long *end) {
    *end = here->before + line / all->group + 1;
    *begin = all->window > 0 && *end > all->window ? *end - all->window : 0;
}

static inline void clear_others(float *line, long begin, long end, long seen) {
    memset(line, 0, begin * sizeof *line);
    memset(line + end, 0, (seen - end) * sizeof *line);
}

/* Fetches what is asked of a part: its queries, or the slopes of what came out. */
static void fetch_asked(const row *all, const part *here, heads_of from, float *out, float scale) {
    for (long line = 0; line < here->asked; line++)
        fetch(head_at(from, here->known[here->before + line / all->group],
                      here->head * all->group + line % all->group),
              out + line * all->width, all->size, scale);
}

static void fetch_known(const row *all, const part *here, heads_of from, float *out) {
    for (long key = 0; key < here->seen; key++)
        fetch(head_at(from, here->known[key], here->head), out + key * all->width, all->size, 1);
}

/* (asked, columns): what is asked, times each of the rows that are known. */
static void products_with(const row *all, const part *here, space *mine, const float *asked, const float *known,
                          float *out) {
    transpose(known, mine->turned, here->columns, all->width);
    product(asked, all->width, 1, mine->turned, here->columns, out, here->columns, here->asked, here->columns,
            all->width);
}

static void score(const row *all, const part *here, space *mine) {
    fetch_asked(all, here, all->queries, mine->queries, all->scale);
    fetch_known(all, here, all->keys, mine->keys);
    fetch_known(all, here, all->values, mine->values);
    products_with(all, here, mine, mine->queries, mine->keys, mine->scores);
}

static void attend_part(const row *all, const part *here, space *mine, number *out, float *totals) {
    long begin, end;
    score(all, here, mine);
    for (long line = 0; line < here->asked; line++) {
        float *scores = mine->scores + line * here->columns, top = -INFINITY, sum = 0;
        reach_of(all, here, line, &begin, &end);
#pragma omp simd reduction(max : top)
        for (long i = begin; i < end; i++) top = scores[i] > top ? scores[i] : top;
#pragma omp simd reduction(+ : sum)
        for (long i = begin; i < end; i++) sum += scores[i] = exponential(scores[i] - top);
        float share = 1.0f / sum;
#pragma omp simd
        for (long i = begin; i < end; i++) scores[i] *= share;
        clear_others(scores, begin, end, here->seen);
        totals[place_of(all, here, line)] = top + logf(sum);
    }
    product(mine->scores, here->columns, 1, mine->values, all->width, mine->found, all->width, here->asked, all->width,
            here->seen);
    for (long line = 0; line < here->asked; line++) {
        number *to = out + place_of(all, here, line) * all->size;
#pragma omp simd
        for (long i = 0; i < all->size; i++) to[i] = narrow(mine->found[line * all->width + i]);
    }
}

/* Adds up the slopes of the part's keys or values: (asked, columns) weights of theirs, times (asked, D) rows. */
static void add_slopes(const row *all, const part *here, space *mine, const float *weights, const float *rows,
                       float *sums) {
    product(weights, 1, here->columns, rows, all->width, mine->moved, all->width, here->seen, all->width, here->asked);
    for (long key = 0; key < here->seen; key++)
#pragma omp simd
        for (long i = 0; i < all->size; i++)
            sums[here->known[key] * all->size + i] += mine->moved[key * all->width + i];
}

static void slopes_of_part(const row *all, const part *here, space *mine, const float *totals, number *query_slopes,
                           float *key_sums, float *value_sums) {
    long begin, end;
    score(all, here, mine);
    fetch_asked(all, here, all->outgoing, mine->outgoing, 1);
    products_with(all, here, mine, mine->outgoing, mine->values, mine->slopes);
    for (long line = 0; line < here->asked; line++) {
        float *weights = mine->scores + line * here->columns, *slopes = mine->slopes + line * here->columns, mean = 0;
        float total = totals[place_of(all, here, line)];
        reach_of(all, here, line, &begin, &end);
#pragma omp simd reduction(+ : mean)
        for (long i = begin; i < end; i++) {
            weights[i] = exponential(weights[i] - total);
            mean += weights[i] * slopes[i];
        }
#pragma omp simd
        for (long i = begin; i < end; i++) slopes[i] = weights[i] * (slopes[i] - mean);
        clear_others(weights, begin, end, here->seen);
        clear_others(slopes, begin, end, here->seen);
    }
    product(mine->slopes, here->columns, 1, mine->keys, all->width, mine->found, all->width, here->asked, all->width,
            here->seen);
    for (long line = 0; line < here->asked; line++) {
        number *to = query_slopes + place_of(all, here, line) * all->size;
#pragma omp simd
        for (long i = 0; i < all->size; i++) to[i] = narrow(mine->found[line * all->width + i] * all->scale);
    }
    add_slopes(all, here, mine, mine->slopes, mine->queries, key_sums);
    add_slopes(all, here, mine, mine->scores, mine->outgoing, value_sums);
}

/* (T, K*G, D) out, and (T, K*G) totals: the logarithm of what the weights of each query add up to. Not 0 if there was
 * not enough memory. */
int attention(const number *query, const number *key, const number *value, number *out, float *totals,
              const int64_t *known, const int64_t *starts, const int64_t *lengths, long query_token, long query_head,
              long key_token, long key_head, long value_token, long value_head, long stretches, long heads, long group,
              long size, long window, float scale) {
    row all = {{query, query_token, query_head}, {key, key_token, key_head}, {value, value_token, value_head}, {0},
               known, starts, lengths, heads, group, size, filled_up(size), window, scale};
    int failed = 0;
#pragma omp parallel reduction(| : failed)
    {
        space mine;
        void *memory = space_for(&all, stretches, &mine);
        failed = !memory;
#pragma omp for collapse(2) schedule(dynamic)
        for (long stretch = 0; stretch < stretches; stretch++)
            for (long head = 0; head < heads; head++) {
                part here = part_of(&all, stretch, head);
                if (memory) attend_part(&all, &here, &mine, out, totals);
            }
        free(memory);
    }
    return failed;
}

/* The slopes of queries, (T, K*G, D), and of keys and values, (T, K, D), from those of what came `out`. Stretches are
 * shared out among tasks at `cuts`; `sums`, (shares, K, 2, T, D), is where each task adds up. */
int attention_backward(const number *query, const number *key, const number *value, const number *outgoing,
                       const float *totals, const int64_t *known, const int64_t *starts, const int64_t *lengths,
                       const int64_t *cuts, float *sums, number *query_slopes, number *key_slopes,
                       number *value_slopes, long query_token, long query_head, long key_token, long key_head,
                       long value_token, long value_head, long outgoing_token, long outgoing_head, long shares,
                       long tokens, long heads, long group, long size, long window, float scale) {
    row all = {{query, query_token, query_head}, {key, key_token, key_head}, {value, value_token, value_head},
               {outgoing, outgoing_token, outgoing_head}, known, starts, lengths, heads, group, size, filled_up(size),
               window, scale};
    long numbers = tokens * size;
    int failed = 0;
#pragma omp parallel reduction(| : failed)
    {
        space mine;
        void *memory = space_for(&all, cuts[shares], &mine);
        failed = !memory;
#pragma omp for collapse(2) schedule(dynamic)
        for (long share = 0; share < shares; share++)
            for (long head = 0; head < heads; head++) {
                float *key_sums = sums + (share * heads + head) * 2 * numbers;
                memset(key_sums, 0, 2 * numbers * sizeof *key_sums);
                for (long stretch = cuts[share]; memory && stretch < cuts[share + 1]; stretch++) {
                    part here = part_of(&all, stretch, head);
                    slopes_of_part(&all, &here, &mine, totals, query_slopes, key_sums, key_sums + numbers);
                }
            }
        free(memory);
#pragma omp for collapse(2) schedule(static)
        for (long token = 0; token < tokens; token++)
            for (long head = 0; head < heads; head++)
                for (int which = 0; which < 2; which++) {
                    number *out = (which ? value_slopes : key_slopes) + (token * heads + head) * size;
                    for (long i = 0; i < size; i++) {
                        float sum = 0;
                        for (long share = 0; share < shares; share++)
                            sum += sums[((share * heads + head) * 2 + which) * numbers + token * size + i];
                        out[i] = narrow(sum);
                    }
                }
    }
    return failed;
}
