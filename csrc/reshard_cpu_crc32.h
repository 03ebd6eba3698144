// CRC-32 of zlib and zip (polynomial 0x04c11db7, bits reflected), by multiplication without carries. Sixteen bytes are
// folded onto the bytes 16 or 64 further on, and the rest is reduced (Gopal et al., "Fast CRC Computation for Generic
// Polynomials Using PCLMULQDQ Instruction", Intel 2009). The constants are from its section on reflected bits.
#pragma once

#include <stdint.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace crc32 {

// Computes bit by bit. Used for less than a vector, and for everything on other processors. Takes and returns the
// register, the complement of the checksum.
inline uint32_t by_bits(uint32_t crc, const uint8_t* data, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    crc ^= data[i];
    for (int bit = 0; bit < 8; bit++) crc = (crc >> 1) ^ (0xedb88320u & (0u - (crc & 1)));
  }
  return crc;
}

#if defined(__x86_64__)
#define PCLMUL __attribute__((target("sse4.1,pclmul")))

inline bool is_fast() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
}

PCLMUL inline __m128i folded(__m128i x, __m128i by, __m128i onto) {
  const __m128i low = _mm_clmulepi64_si128(x, by, 0x00), high = _mm_clmulepi64_si128(x, by, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), onto);
}

PCLMUL inline __m128i at(const uint8_t* data) { return _mm_loadu_si128((const __m128i*)data); }

// Reduces 128 bits to the register's 32 by two folds and Barrett's reduction.
PCLMUL inline uint32_t reduced(__m128i x) {
  const __m128i every_other = _mm_setr_epi32(~0, 0, ~0, 0);
  const __m128i fold_16 = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0), fold_4 = _mm_set_epi64x(0, 0x0163cd6124);
  const __m128i polynomial = _mm_set_epi64x(0x01f7011641, 0x01db710641);
  x = _mm_xor_si128(_mm_srli_si128(x, 8), _mm_clmulepi64_si128(x, fold_16, 0x10));
  x = _mm_xor_si128(_mm_srli_si128(x, 4), _mm_clmulepi64_si128(_mm_and_si128(x, every_other), fold_4, 0x00));
  __m128i quotient = _mm_clmulepi64_si128(_mm_and_si128(x, every_other), polynomial, 0x10);
  quotient = _mm_clmulepi64_si128(_mm_and_si128(quotient, every_other), polynomial, 0x00);
  return (uint32_t)_mm_extract_epi32(_mm_xor_si128(x, quotient), 1);
}

// Computes the same as by_bits, by folds.
PCLMUL inline uint32_t by_folds(uint32_t crc, const uint8_t* data, int64_t n) {
  if (n < 64) return by_bits(crc, data, n);
  const __m128i fold_64 = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4);
  const __m128i fold_16 = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
  __m128i a = _mm_xor_si128(at(data), _mm_cvtsi32_si128((int)crc)), b = at(data + 16), c = at(data + 32),
          d = at(data + 48);
  for (data += 64, n -= 64; n >= 64; data += 64, n -= 64) {
    a = folded(a, fold_64, at(data)), b = folded(b, fold_64, at(data + 16));
    c = folded(c, fold_64, at(data + 32)), d = folded(d, fold_64, at(data + 48));
  }
  a = folded(folded(folded(a, fold_16, b), fold_16, c), fold_16, d);
  for (; n >= 16; data += 16, n -= 16) a = folded(a, fold_16, at(data));
  return by_bits(reduced(a), data, n);
}
#else
inline bool is_fast() { return false; }

inline uint32_t by_folds(uint32_t crc, const uint8_t* data, int64_t n) { return by_bits(crc, data, n); }
#endif

}  // namespace crc32
