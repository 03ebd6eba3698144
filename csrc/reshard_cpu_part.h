// The interface of the code for each instruction set, used by reshard_cpu.cpp.
#pragma once

#include <stdint.h>

// A part of a slice.
struct Part {
  char* destination;
  const char* source;
  int64_t destination_stride, source_stride;  // bytes
  int64_t rows, cols;                         // elements, or bytes if source and destination have the same type
  const float* inverse;                       // [cols], if elements are quantised
  const char* ahead;                          // fetched into the caches row by row meanwhile, or null
  int64_t ahead_stride, ahead_bytes;          // per row
};

inline __attribute__((always_inline)) void fetch_ahead(const Part& part, int64_t row) {
  if (!part.ahead) return;
  const char* p = part.ahead + row * part.ahead_stride;
  for (int64_t at = 0; at < part.ahead_bytes; at += 64) __builtin_prefetch(p + at);
}

using CopyPart = void (*)(const Part&);
using Amax = uint32_t (*)(const void* source, int64_t n);  // returns the bits of the largest magnitude among n elements

// Returns the sum of keys[i] * (bits of element i ^ RS_PRESENT) over n elements.
using KeyedSum = uint64_t (*)(const void* source, int64_t n, const uint32_t* keys);

struct Routines {
  CopyPart copy[2][4][4];    // [bypassing the caches][from][to]; null for unsupported pairs
  Amax amax[3];              // [type]
  KeyedSum keyed_sum[2][4];  // [all NaNs alike][type]
};
