/* Vectors of L floats, and functions on them. */

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#if defined(__AVX512F__)
#define L 16
#define MOST 12 /* rows per tile: two vectors of outputs for each row must stay in registers */
#elif defined(__AVX__)
#define L 8
#define MOST 6
#else
#define L 4
#define MOST 6
#endif
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

typedef float vf __attribute__((vector_size(4 * L), may_alias));
typedef float any_vf __attribute__((vector_size(4 * L), may_alias, aligned(4)));
typedef int32_t vi __attribute__((vector_size(4 * L), may_alias));
typedef uint32_t vu __attribute__((vector_size(4 * L), may_alias));

INLINE int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to; }
INLINE int64_t least_of(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most_of(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE vf load(const float *at) { return *(const vf *)at; }
INLINE void store(float *at, vf value) { *(vf *)at = value; }
INLINE vf load_any(const float *at) { return *(const any_vf *)at; } /* from any address */
INLINE void store_any(float *at, vf value) { *(any_vf *)at = value; }

/* Return a vector that was loaded, from a register: otherwise compilers load it again for each use. */
INLINE vf in_register(vf value) {
#if defined(__AVX512F__)
    __asm__("" : "+v"(value));
#elif defined(__SSE__)
    __asm__("" : "+x"(value));
#endif
    return value;
}

INLINE vf all(float value) { return value - (vf){}; } /* not + 0, which would turn -0 into 0 */
INLINE vf zero_where(vi where, vf value) { return (vf)(~where & (vi)value); }
INLINE vf choose(vi where, vf value, vf other) { return (vf)((where & (vi)value) | (~where & (vi)other)); }

INLINE vi iota(void) {
    vi lanes;
    for (int i = 0; i < L; i++) lanes[i] = i;
    return lanes;
}

/* Return new values in the lanes whose bits are set, and old ones in the others. */
INLINE vf keep(vf old, vf value, uint16_t bits) {
    vi lanes = (vi){} + 1;
    lanes <<= iota();
    return choose((lanes & (int32_t)bits) == 0, old, value);
}

#if defined(__GNUC__) && !defined(__clang__)
#define PICK(a, b, from) __builtin_shuffle(a, b, from)
#else
INLINE vf pick(vf a, vf b, vi from) {
    vf out;
    UNROLL for (int i = 0; i < L; i++) out[i] = from[i] < L ? a[from[i]] : b[from[i] - L];
    return out;
}
#define PICK(a, b, from) pick(a, b, from)
#endif

/* Return the sums over the lanes of L vectors, as one vector. */
INLINE vf lane_sums(vf *v) {
    UNROLL for (int half = 1; half < L; half *= 2) {
        const vi from = iota() + ((iota() / half) & 1) * (L - half);
        UNROLL for (int i = 0; i < L / 2 / half; i++)
            v[i] = PICK(v[2 * i], v[2 * i + 1], from) + PICK(v[2 * i], v[2 * i + 1], from + half);
    }
    return v[0];
}

INLINE vu mix(vu x) {
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

static uint32_t mix_one(uint32_t x) { return mix((vu){} + x)[0]; }
