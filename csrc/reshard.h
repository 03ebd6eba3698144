// Copies of many strided two-dimensional slices in one call: the pack and unpack of a reshard. And their checksums.
//
// Shared by reshard_cpu.cpp and reshard_cuda.cu. A plain C interface, no torch and no Python, loaded by ctypes
// (rltrain/reshard/native.py), which compares the version and the struct sizes below with its own.
#pragma once

#include <stdint.h>

#define RS_ABI_VERSION 6

// As ElementType in rltrain/models/table.py.
enum rs_type { RS_FLOAT32 = 0, RS_BFLOAT16 = 1, RS_FLOAT16 = 2, RS_FLOAT8_E4M3 = 3 };

enum { RS_BLOCK = 128 };  // rows and columns of a block that shares a scale

// Element (i, j) of a slice, 0 <= i < rows and 0 <= j < cols, goes
//   from bases[src_base] + src_offset + i * src_stride + j   (in elements of src_type)
//   to   bases[dst_base] + dst_offset + i * dst_stride + j   (in elements of dst_type).
// Bases are looked up at every call, so a table outlives the memory that it addresses. Every element lies at a multiple
// of its size; nothing more is known of its alignment.
//
// Where dst_type is RS_FLOAT8_E4M3 and src_type is not, the element is quantised with the largest magnitude of its
// block: entry amax_offset + ((row_phase + i) / RS_BLOCK) * amax_stride + (col_phase + j) / RS_BLOCK of the floats at
// bases[amax_base], where the phases are the place of the slice's first element within its block.
typedef struct rs_slice {
  int64_t src_offset, dst_offset;
  int64_t src_stride, dst_stride;
  int64_t rows, cols;
  int64_t amax_offset, amax_stride;
  int32_t src_base, dst_base;
  int32_t amax_base;  // -1 where nothing is quantised
  uint8_t src_type, dst_type;
  uint8_t row_phase, col_phase;
} rs_slice;  // 80 bytes

// What becomes of an element, the same on every device and for every alignment:
//   same type         its bits, as they are.
//   to a wider type   the same value. A float16 NaN becomes RS_NAN_FLOAT32; a bfloat16 NaN keeps its bits (a shift).
//   to a narrower one round to nearest even, subnormals included; a NaN becomes RS_NAN_16.
//   quantised         x * (448 / max(amax, 2^-100)) in float32, rounded to nearest even, saturated at 448; a NaN, and
//                     every element of a block whose amax is not finite, becomes RS_NAN_FLOAT8.
// The NaNs are those of the conversions of CUDA GPUs. torch on CPUs has others, which differ between its code paths.
//
// An amax is the bits of |x|, which order as integers as the magnitudes do; a NaN counts as RS_NAN_AMAX, above
// infinity.
enum {
  RS_NAN_FLOAT32 = 0x7fffffff,
  RS_NAN_16 = 0x7fff,  // of float16 and of bfloat16
  RS_NAN_FLOAT8 = 0x7f,
  RS_NAN_AMAX = 0x7fc00000,
};

// The checksum of a slice is a sum over its elements, modulo 2^64, of a number that an element's bits and its place in a
// tensor give, so that it does not matter how a tensor is cut. Here a slice has no destination: element (i, j) is number
// dst_offset + i * dst_stride + j of the tensor, and the sum is added to entry amax_offset of the uint64 at
// bases[amax_base]. Both types are that of the source. Where row_phase is not 0 every NaN has the bits of infinity + 1.
//
//   rs_run_key(place / RS_RUN) * (rs_place_key(place % RS_RUN) * (bits ^ RS_PRESENT))
//
// The inner product does not wrap around and place keys differ from each other, so a single element that changes and two
// of a run that change places are always noticed; all else but for one case in about 2^32.
enum { RS_RUN = 1024 };
#define RS_PRESENT 0xffa5c3e7u  // a NaN of no operation: a zero that is missing is noticed too

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

// What a library was made from, to be found among its bytes by setup.py.
#ifdef RS_SOURCES
__attribute__((used)) static const char rs_sources[] = RS_SOURCES;
#endif
