// Copies of many strided two-dimensional slices in one call, for the pack and unpack of a reshard, and their checksums.
//
// This header is shared by reshard_cpu.cpp and reshard_cuda.cu. It is a plain C interface without torch and Python.
// rltrain/reshard/native.py loads it by ctypes and compares the version and the struct sizes below with its own.
#pragma once

#include <stdint.h>

#define RS_ABI_VERSION 6

// Equal to ElementType in rltrain/models/table.py.
enum rs_type { RS_FLOAT32 = 0, RS_BFLOAT16 = 1, RS_FLOAT16 = 2, RS_FLOAT8_E4M3 = 3 };

enum { RS_BLOCK = 128 };  // rows and columns of a block with one scale

// Element (i, j) of a slice, 0 <= i < rows and 0 <= j < cols, goes
//   from bases[src_base] + src_offset + i * src_stride + j   (in elements of src_type)
//   to   bases[dst_base] + dst_offset + i * dst_stride + j   (in elements of dst_type).
// Bases are looked up at every call, so a table outlives the memory it addresses. Every element is at a multiple of its
// size. Nothing more is known about its alignment.
//
// If dst_type is RS_FLOAT8_E4M3 and src_type is not, the element is quantised with the largest magnitude of its block.
// This is entry amax_offset + ((row_phase + i) / RS_BLOCK) * amax_stride + (col_phase + j) / RS_BLOCK of the floats at
// bases[amax_base]. The phases are the position of the slice's first element within its block.
typedef struct rs_slice {
  int64_t src_offset, dst_offset;
  int64_t src_stride, dst_stride;
  int64_t rows, cols;
  int64_t amax_offset, amax_stride;
  int32_t src_base, dst_base;
  int32_t amax_base;  // -1 if nothing is quantised
  uint8_t src_type, dst_type;
  uint8_t row_phase, col_phase;
} rs_slice;  // 80 bytes

// The result of an element, the same on every device and for every alignment:
//   same type         its bits, unchanged.
//   to a wider type   the same value. A float16 NaN becomes RS_NAN_FLOAT32. A bfloat16 NaN keeps its bits (a shift).
//   to a narrower one rounded to nearest even, subnormals included. A NaN becomes RS_NAN_16.
//   quantised         x * (448 / max(amax, 2^-100)) in float32, rounded to nearest even, saturated at 448. A NaN
//                     becomes RS_NAN_FLOAT8. So does every element of a block if its amax is not finite.
// The NaNs are those of conversions on CUDA GPUs. torch on CPUs has others, and they differ between its code paths.
//
// An amax is the bits of |x|. As integers they order like the magnitudes. A NaN counts as RS_NAN_AMAX, above infinity.
enum {
  RS_NAN_FLOAT32 = 0x7fffffff,
  RS_NAN_16 = 0x7fff,  // for float16 and bfloat16
  RS_NAN_FLOAT8 = 0x7f,
  RS_NAN_AMAX = 0x7fc00000,
};

// The checksum of a slice is a sum over its elements, modulo 2^64. Each element gives a number made from its bits and
// its place in a tensor, so the cut of the tensor does not matter. A slice to be summed has no destination. Its element
// (i, j) is number dst_offset + i * dst_stride + j of the tensor. The sum is added to entry amax_offset of the uint64
// at bases[amax_base]. Both types are the source's. If row_phase is not 0, every NaN has the bits of infinity + 1. The
// number of an element is
//
//   rs_run_key(place / RS_RUN) * (rs_place_key(place % RS_RUN) * (bits ^ RS_PRESENT))
//
// The inner product does not wrap around, and place keys differ from each other. So one changed element is always
// noticed, and so are two exchanged elements of a run. Other changes are missed about once in 2^32.
enum { RS_RUN = 1024 };
#define RS_PRESENT 0xffa5c3e7u  // not the NaN of any operation; with it a missing zero is noticed too

#ifdef __CUDACC__
#define RS_INLINE __host__ __device__ __forceinline__
#else
#define RS_INLINE inline
#endif

RS_INLINE uint32_t rs_place_key(uint32_t place) {  // a permutation of 32 bits
  uint32_t x = place + 0x9e3779b9u;
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

RS_INLINE uint64_t rs_run_key(uint64_t run) {  // odd
  uint64_t x = (run + 1) * 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 32)) * 0xb4b82f3a5f574e53u;
  return (x ^ (x >> 32)) | 1;
}

// The digest of a library's sources. setup.py looks for it among the library's bytes.
#ifdef RS_SOURCES
__attribute__((used)) static const char rs_sources[] = RS_SOURCES;
#endif
