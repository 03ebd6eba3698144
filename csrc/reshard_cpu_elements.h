// Conversions of single elements, exact to the bit as in reshard.h, in loops for compilers to vectorise.
#pragma once

#include <stdint.h>
#include <string.h>

#include <algorithm>

#include "reshard.h"

#define ALWAYS_INLINE inline __attribute__((always_inline))

constexpr uint32_t kInfinity = 0x7f800000u;
constexpr float kMaxFloat8 = 448.0f;
constexpr float kSmallestAmax = 0x1p-100f;

ALWAYS_INLINE uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

ALWAYS_INLINE float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

ALWAYS_INLINE uint16_t bfloat16_of(uint32_t x) {
  const uint32_t rounded = (x + 0x7fffu + ((x >> 16) & 1u)) >> 16;
  return (x & 0x7fffffffu) > kInfinity ? (uint32_t)RS_NAN_16 : rounded;
}

ALWAYS_INLINE uint16_t float16_of(uint32_t x) {
  const uint32_t a = x & 0x7fffffffu, sign = (x >> 16) & 0x8000u;
  const uint32_t normal = (a + 0xc8000fffu + ((a >> 13) & 1u)) >> 13;
  // The last bit of the sum is worth the smallest subnormal, so the addition rounds.
  const uint32_t subnormal = bits_of(float_of(a) + 0.5f) - bits_of(0.5f);
  uint32_t result = a < 0x38800000u ? subnormal : normal;
  result = a >= 0x477ff000u ? 0x7c00u : result;
  return a > kInfinity ? (uint32_t)RS_NAN_16 : (result | sign);
}

ALWAYS_INLINE uint32_t float32_of_float16(uint16_t x) {
  const uint32_t a = x & 0x7fffu, sign = (uint32_t)(x & 0x8000u) << 16;
  const uint32_t subnormal = bits_of((float)(int32_t)a * 0x1p-24f);
  uint32_t result = a < 0x400u ? subnormal : (a << 13) + 0x38000000u;
  result = a == 0x7c00u ? kInfinity : result;
  return a > 0x7c00u ? (uint32_t)RS_NAN_FLOAT32 : (result | sign);
}

ALWAYS_INLINE uint8_t float8_of(float scaled) {
  const uint32_t x = bits_of(scaled), magnitude = x & 0x7fffffffu;
  const uint32_t a = std::min(magnitude, bits_of(kMaxFloat8));
  const uint32_t normal = (a + 0xc407ffffu + ((a >> 20) & 1u)) >> 20;
  const uint32_t subnormal = bits_of(float_of(a) + 0x1p14f) - bits_of(0x1p14f);  // rounds as above
  const uint32_t result = (a < 0x3c800000u ? subnormal : normal) | ((x >> 24) & 0x80u);
  return magnitude > kInfinity ? (uint32_t)RS_NAN_FLOAT8 : result;
}

template <int type>
struct Element;

template <>
struct Element<RS_FLOAT32> {
  using Bits = uint32_t;
  static ALWAYS_INLINE uint32_t widen(Bits x) { return x; }
};

template <>
struct Element<RS_BFLOAT16> {
  using Bits = uint16_t;
  static ALWAYS_INLINE uint32_t widen(Bits x) { return (uint32_t)x << 16; }
};

template <>
struct Element<RS_FLOAT16> {
  using Bits = uint16_t;
  static ALWAYS_INLINE uint32_t widen(Bits x) { return float32_of_float16(x); }
};

template <>
struct Element<RS_FLOAT8_E4M3> {
  using Bits = uint8_t;
};

// `inverse` has one factor per element if `to` is RS_FLOAT8_E4M3. Otherwise it is not read.
template <int from, int to>
ALWAYS_INLINE void convert_loop(void* destination, const void* source, int64_t n, const float* __restrict inverse) {
  auto* __restrict d = (typename Element<to>::Bits*)destination;
  auto* __restrict s = (const typename Element<from>::Bits*)source;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t x = Element<from>::widen(s[i]);
    if constexpr (to == RS_FLOAT32) d[i] = x;
    if constexpr (to == RS_BFLOAT16) d[i] = bfloat16_of(x);
    if constexpr (to == RS_FLOAT16) d[i] = float16_of(x);
    if constexpr (to == RS_FLOAT8_E4M3) d[i] = float8_of(float_of(x) * inverse[i]);
  }
}

// Returns the largest magnitude among n elements, as bits of the element's type.
template <int type>
ALWAYS_INLINE uint32_t amax_loop(const void* source, int64_t n) {
  using Bits = typename Element<type>::Bits;
  constexpr Bits kMagnitude = (Bits) ~((Bits)1 << (8 * sizeof(Bits) - 1));
  auto* s = (const Bits*)source;
  Bits result = 0;
  for (int64_t i = 0; i < n; ++i) result = std::max<Bits>(result, s[i] & kMagnitude);
  return result;
}

// Computes a KeyedSum. With `alike` every NaN has the same bits.
template <int type, bool alike>
ALWAYS_INLINE uint64_t keyed_sum_loop(const void* source, int64_t n, const uint32_t* __restrict keys) {
  using Bits = typename Element<type>::Bits;
  constexpr uint32_t kSign = 1u << (8 * sizeof(Bits) - 1);
  constexpr uint32_t kLargest = type == RS_FLOAT32    ? kInfinity
                                : type == RS_BFLOAT16 ? kInfinity >> 16
                                : type == RS_FLOAT16  ? 0x7c00u
                                                      : RS_NAN_FLOAT8 - 1u;
  auto* s = (const Bits*)source;
  uint64_t sum = 0;
  for (int64_t i = 0; i < n; ++i) {
    uint32_t x = s[i];
    if constexpr (alike) x = (x & (kSign - 1)) > kLargest ? kLargest + 1 : x;
    sum += (uint64_t)keys[i] * (x ^ RS_PRESENT);
  }
  return sum;
}
