// Copies of parts of slices by loops for the compiler to vectorise: for any processor, for AVX2 and for AVX-512.
#pragma once

#include "reshard_cpu_elements.h"
#include "reshard_cpu_part.h"

// Bytes converted at a time in the first-level cache, before they are stored past the caches.
constexpr int64_t kStageBytes = 2048;

// Copies n bytes from s to d, bypassing the caches except for the partial lines at both ends of d.
using Stream = void (*)(char* d, const char* s, int64_t n);

template <int from, int to>
ALWAYS_INLINE void copy_part_loop(const Part& part, Stream stream) {
  constexpr int64_t kFrom = sizeof(typename Element<from>::Bits), kTo = sizeof(typename Element<to>::Bits);
  constexpr int64_t kStep = kStageBytes / kTo;
  alignas(64) char stage[kStageBytes];
  for (int64_t row = 0; row < part.rows; ++row) {
    char* d = part.destination + row * part.destination_stride;
    const char* s = part.source + row * part.source_stride;
    fetch_ahead(part, row);
    if constexpr (from == to) {
      if (stream)
        stream(d, s, part.cols);
      else
        memcpy(d, s, part.cols);
    } else if (!stream) {
      convert_loop<from, to>(d, s, part.cols, part.inverse);
    } else {
      for (int64_t col = 0; col < part.cols; col += kStep) {
        const int64_t n = std::min(kStep, part.cols - col);
        convert_loop<from, to>(stage, s + col * kFrom, n, part.inverse + col);
        stream(d + col * kTo, stage, n * kTo);
      }
    }
  }
}

#define DEFINE_ROUTINES(name, attributes, stream)                                     \
  template <int from, int to, bool nontemporal>                                       \
  attributes void copy_part_##name(const Part& part) {                                \
    copy_part_loop<from, to>(part, nontemporal ? (Stream)stream : nullptr);           \
  }                                                                                   \
  template <int type>                                                                 \
  attributes uint32_t amax_##name(const void* source, int64_t n) {                    \
    return amax_loop<type>(source, n);                                                \
  }                                                                                   \
  template <int type, bool alike>                                                     \
  attributes uint64_t keyed_sum_##name(const void* source, int64_t n, const uint32_t* keys) { \
    return keyed_sum_loop<type, alike>(source, n, keys);                              \
  }

// Copies of the same type are copies of bytes, with RS_FLOAT8_E4M3 as the type of a byte.
#define TABLE_OF(name, nontemporal)                                                                          \
  {{copy_part_##name<3, 3, nontemporal>, copy_part_##name<0, 1, nontemporal>, copy_part_##name<0, 2, nontemporal>, \
    copy_part_##name<0, 3, nontemporal>},                                                                    \
   {copy_part_##name<1, 0, nontemporal>, copy_part_##name<3, 3, nontemporal>, nullptr,                       \
    copy_part_##name<1, 3, nontemporal>},                                                                    \
   {copy_part_##name<2, 0, nontemporal>, nullptr, copy_part_##name<3, 3, nontemporal>,                       \
    copy_part_##name<2, 3, nontemporal>},                                                                    \
   {nullptr, nullptr, nullptr, copy_part_##name<3, 3, nontemporal>}}

#define KEYED_SUMS_OF(name, alike) \
  { keyed_sum_##name<0, alike>, keyed_sum_##name<1, alike>, keyed_sum_##name<2, alike>, keyed_sum_##name<3, alike> }

#define ROUTINES_OF(name)                                                                                      \
  {                                                                                                            \
    {TABLE_OF(name, false), TABLE_OF(name, true)}, {amax_##name<0>, amax_##name<1>, amax_##name<2>},           \
        {KEYED_SUMS_OF(name, false), KEYED_SUMS_OF(name, true)}                                                \
  }
