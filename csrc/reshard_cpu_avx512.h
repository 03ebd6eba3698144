// Copies of parts of slices with AVX-512, a cache line of the destination at a time.
//
// If rows are adjacent in the destination, the last line of a row is kept in a register and completed by the next row.
// So all lines except a part's first and last are stored once and whole. Otherwise stores bypassing the caches are
// slow.
#pragma once

#include <immintrin.h>

#include "reshard_cpu_elements.h"
#include "reshard_cpu_part.h"

#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")))
#define AVX512_INLINE AVX512 static ALWAYS_INLINE

constexpr int64_t kLineBytes = 64;

// Loads and stores elements of `bytes` under a mask. Elements outside of the mask are not touched in memory.
template <int bytes>
struct Lanes;

template <>
struct Lanes<1> {
  AVX512_INLINE __m512i load(const void* p, uint64_t mask) { return _mm512_maskz_loadu_epi8(mask, p); }
  AVX512_INLINE void store(void* p, uint64_t mask, __m512i x) { _mm512_mask_storeu_epi8(p, mask, x); }
  AVX512_INLINE __m512i blend(__m512i x, uint64_t mask, __m512i y) { return _mm512_mask_mov_epi8(x, mask, y); }
};

template <>
struct Lanes<2> {
  AVX512_INLINE void store(void* p, uint64_t mask, __m512i x) { _mm512_mask_storeu_epi16(p, (__mmask32)mask, x); }
  AVX512_INLINE __m512i blend(__m512i x, uint64_t mask, __m512i y) {
    return _mm512_mask_mov_epi16(x, (__mmask32)mask, y);
  }
};

template <>
struct Lanes<4> {
  AVX512_INLINE void store(void* p, uint64_t mask, __m512i x) { _mm512_mask_storeu_epi32(p, (__mmask16)mask, x); }
  AVX512_INLINE __m512i blend(__m512i x, uint64_t mask, __m512i y) {
    return _mm512_mask_mov_epi32(x, (__mmask16)mask, y);
  }
};

AVX512_INLINE __mmask16 is_nan(__m512i x) {
  return _mm512_cmpgt_epi32_mask(_mm512_and_epi32(x, _mm512_set1_epi32(0x7fffffff)), _mm512_set1_epi32(kInfinity));
}

// Returns 16 elements as the bits of float32.
template <int from>
AVX512_INLINE __m512i widen(const char* p, __mmask16 mask) {
  if constexpr (from == RS_FLOAT32) return _mm512_maskz_loadu_epi32(mask, p);
  const __m256i x = _mm256_maskz_loadu_epi16(mask, p);
  if constexpr (from == RS_BFLOAT16) return _mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16);
  const __m512i wide = _mm512_castps_si512(_mm512_cvtph_ps(x));
  return _mm512_mask_mov_epi32(wide, is_nan(wide), _mm512_set1_epi32(RS_NAN_FLOAT32));
}

// Returns 16 elements of bfloat16 or float16.
template <int to>
AVX512_INLINE __m256i narrow(__m512i x) {
  __m512i result;
  if constexpr (to == RS_BFLOAT16) {
    const __m512i odd = _mm512_and_epi32(_mm512_srli_epi32(x, 16), _mm512_set1_epi32(1));
    const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(0x7fff)), odd);
    result = _mm512_srli_epi32(sum, 16);
  } else {
    result = _mm512_cvtepu16_epi32(_mm512_cvtps_ph(_mm512_castsi512_ps(x), _MM_FROUND_TO_NEAREST_INT));
  }
  return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(result, is_nan(x), _mm512_set1_epi32(RS_NAN_16)));
}

// Returns 16 elements of e4m3. The steps are those of float8_of.
AVX512_INLINE __m128i narrow_to_float8(__m512i wide, __m512 inverse) {
  const __m512i x = _mm512_castps_si512(_mm512_mul_ps(_mm512_castsi512_ps(wide), inverse));
  const __m512i magnitude = _mm512_and_epi32(x, _mm512_set1_epi32(0x7fffffff));
  const __m512i a = _mm512_min_epi32(magnitude, _mm512_castps_si512(_mm512_set1_ps(kMaxFloat8)));
  const __m512i odd = _mm512_and_epi32(_mm512_srli_epi32(a, 20), _mm512_set1_epi32(1));
  const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(a, _mm512_set1_epi32(0xc407ffff)), odd);
  const __m512 one = _mm512_set1_ps(0x1p14f);
  const __m512i rounded = _mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(a), one));
  const __m512i subnormal = _mm512_sub_epi32(rounded, _mm512_castps_si512(one));
  const __mmask16 is_small = _mm512_cmplt_epi32_mask(a, _mm512_set1_epi32(0x3c800000));
  __m512i result = _mm512_mask_mov_epi32(_mm512_srli_epi32(sum, 20), is_small, subnormal);
  result = _mm512_or_epi32(result, _mm512_and_epi32(_mm512_srli_epi32(x, 24), _mm512_set1_epi32(0x80)));
  const __m512 scaled = _mm512_castsi512_ps(x);
  const __mmask16 nan = _mm512_cmp_ps_mask(scaled, scaled, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi8(_mm512_mask_mov_epi32(result, nan, _mm512_set1_epi32(RS_NAN_FLOAT8)));
}

template <int from, int to>
AVX512_INLINE __m128i quarter_line(const char* p, uint64_t mask, const float* inverse, int quarter) {
  const __mmask16 lanes = (__mmask16)(mask >> (16 * quarter));
  const __m512i wide = widen<from>(p + 16 * quarter * (int64_t)sizeof(typename Element<from>::Bits), lanes);
  return narrow_to_float8(wide, _mm512_maskz_loadu_ps(lanes, inverse + 16 * quarter));
}

// Returns one line of the destination from the source at p. Elements without a bit in the mask are undefined.
template <int from, int to>
AVX512_INLINE __m512i load_line(const char* p, uint64_t mask, const float* inverse) {
  if constexpr (from == to) return Lanes<1>::load(p, mask);
  else if constexpr (to == RS_FLOAT32) return widen<from>(p, (__mmask16)mask);
  else if constexpr (to == RS_FLOAT8_E4M3) {
    __m512i line = _mm512_castsi128_si512(quarter_line<from, to>(p, mask, inverse, 0));
    line = _mm512_inserti32x4(line, quarter_line<from, to>(p, mask, inverse, 1), 1);
    line = _mm512_inserti32x4(line, quarter_line<from, to>(p, mask, inverse, 2), 2);
    return _mm512_inserti32x4(line, quarter_line<from, to>(p, mask, inverse, 3), 3);
  } else {
    constexpr int64_t kHalf = 16 * sizeof(typename Element<from>::Bits);
    const __m256i low = narrow<to>(widen<from>(p, (__mmask16)mask));
    const __m256i high = narrow<to>(widen<from>(p + kHalf, (__mmask16)(mask >> 16)));
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
  }
}

// If from == to, columns are bytes and both are RS_FLOAT8_E4M3.
template <int from, int to, bool nontemporal>
AVX512 void copy_part_avx512(const Part& part) {
  constexpr int64_t kFrom = sizeof(typename Element<from>::Bits), kTo = sizeof(typename Element<to>::Bits);
  constexpr int64_t kLanes = kLineBytes / kTo;
  constexpr uint64_t kAll = ~0ull >> (64 - kLanes);
  const bool adjacent = part.destination_stride == part.cols * kTo;
  // The line being completed: its address, its elements so far, a mask of their places, and the next place.
  char* line = nullptr;
  __m512i carried = _mm512_setzero_si512();
  uint64_t known = 0;
  int64_t fill = 0;
  for (int64_t row = 0; row < part.rows; ++row) {
    const char* s = part.source + row * part.source_stride;
    if (!adjacent || row == 0) {
      if (known) Lanes<kTo>::store(line, known, carried);
      char* d = part.destination + row * part.destination_stride;
      fill = ((uintptr_t)d % kLineBytes) / kTo;
      line = d - fill * kTo;
      known = 0;
    }
    fetch_ahead(part, row);
    int64_t col = 0;
    if (fill) {
      col = std::min(kLanes - fill, part.cols);
      const uint64_t mask = (~0ull >> (64 - col)) << fill;
      carried = Lanes<kTo>::blend(carried, mask, load_line<from, to>(s - fill * kFrom, mask, part.inverse - fill));
      known |= mask;
      fill += col;
      if (fill < kLanes) continue;
      if (known == kAll && nontemporal) _mm512_stream_si512((__m512i*)line, carried);
      else Lanes<kTo>::store(line, known, carried);
      line += kLineBytes, known = 0, fill = 0;
    }
    for (; col + kLanes <= part.cols; col += kLanes, line += kLineBytes) {
      const __m512i full = load_line<from, to>(s + col * kFrom, kAll, part.inverse + col);
      if (nontemporal) _mm512_stream_si512((__m512i*)line, full);
      else _mm512_store_si512((__m512i*)line, full);
    }
    if (col < part.cols) {
      fill = part.cols - col;
      known = ~0ull >> (64 - fill);
      carried = load_line<from, to>(s + col * kFrom, known, part.inverse + col);
    }
  }
  if (known) Lanes<kTo>::store(line, known, carried);
}
