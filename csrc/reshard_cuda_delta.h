// The CUDA twin of reshard_cpu_delta.h. It has the work of one thread on the blocks of a section, given its place in
// the grid. A warp takes a block, and its lanes have neighbouring elements. Lanes communicate through memory, so the
// same code also runs on the host, thread after thread (tests/unit/cuda_emulation.cpp).
#pragma once

#include "reshard_cuda_tiles.h"
#include "reshard_delta.h"

namespace rs {

constexpr int kLaneElements = RS_DELTA_BLOCK / kWarp;

template <typename Bits>
RS_DEVICE uint32_t differing(const Bits* a, const Bits* b, int64_t first, int64_t elements) {
  uint32_t mask = 0;
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i)
    if (first + i < elements && a[first + i] != b[first + i]) mask |= 1u << i;
  return mask;
}

RS_DEVICE int bits_in(uint32_t mask) {
#ifdef __CUDA_ARCH__
  return __popc(mask);
#else
  return __builtin_popcount(mask);
#endif
}

RS_DEVICE int lowest_bit(uint32_t mask) {
#ifdef __CUDA_ARCH__
  return __ffs(static_cast<int>(mask)) - 1;
#else
  return __builtin_ctz(mask);
#endif
}

// Writes a bit for each differing element to `marks` [blocks * 32], and adds their number to `counts` [blocks].
struct DeltaMark {
  const void *packed, *kept;
  int64_t elements;
  int item;
  uint8_t* marks;
  int32_t* counts;

  RS_DEVICE void operator()(int64_t block, int lane) const {
    const int64_t first = block * RS_DELTA_BLOCK + lane * kLaneElements;
    uint32_t mask;
    if (item == 4) mask = differing(static_cast<const uint32_t*>(packed), static_cast<const uint32_t*>(kept), first, elements);
    else if (item == 2) mask = differing(static_cast<const uint16_t*>(packed), static_cast<const uint16_t*>(kept), first, elements);
    else mask = differing(static_cast<const uint8_t*>(packed), static_cast<const uint8_t*>(kept), first, elements);
    marks[block * kWarp + lane] = static_cast<uint8_t>(mask);
#ifdef __CUDACC__
    const int count = __reduce_add_sync(0xffffffffu, bits_in(mask));
    if (lane == 0) counts[block] = count;
#else
    counts[block] += bits_in(mask);
#endif
  }
};

// Writes the marked elements to `places`, `values` and `kept`. In `places` and `values`, each block begins at its
// starts.
struct DeltaWrite {
  const void* packed;
  void* kept;
  int64_t elements;
  int item;
  const uint8_t *marks, *lengths;
  const int64_t *place_starts, *value_starts;
  uint8_t* places;
  void* values;

  RS_DEVICE void copy(int64_t element, int64_t value) const {
    if (item == 4) {
      const uint32_t bits = static_cast<const uint32_t*>(packed)[element];
      static_cast<uint32_t*>(values)[value] = static_cast<uint32_t*>(kept)[element] = bits;
    } else if (item == 2) {
      const uint16_t bits = static_cast<const uint16_t*>(packed)[element];
      static_cast<uint16_t*>(values)[value] = static_cast<uint16_t*>(kept)[element] = bits;
    } else {
      const uint8_t bits = static_cast<const uint8_t*>(packed)[element];
      static_cast<uint8_t*>(values)[value] = static_cast<uint8_t*>(kept)[element] = bits;
    }
  }

  RS_DEVICE void operator()(int64_t block, int lane) const {
    const int64_t begin = block * RS_DELTA_BLOCK;
    if (lengths[block] == 0) return;
    if (lengths[block] == RS_DELTA_WHOLE) {
      for (int i = lane; i < RS_DELTA_BLOCK && begin + i < elements; i += kWarp) copy(begin + i, value_starts[block] + i);
      return;
    }
    int before = 0;
    for (int other = 0; other < lane; ++other) before += bits_in(marks[block * kWarp + other]);
    for (uint32_t mask = marks[block * kWarp + lane]; mask; mask &= mask - 1, ++before) {
      const int within = lane * kLaneElements + lowest_bit(mask);
      places[place_starts[block] + before] = static_cast<uint8_t>(within);
      copy(begin + within, value_starts[block] + before);
    }
  }
};

// Does the work of rs_cpu_delta_apply. *wrong becomes 1 if a place or an element has no destination.
struct DeltaApply {
  const rs_slice* slices;
  int64_t num_slices;
  void* const* bases;
  int64_t begin, elements;
  int item;
  const uint8_t *lengths, *places;
  const int64_t *place_starts, *value_starts;
  const void* values;
  int32_t* wrong;

  RS_DEVICE void put(int64_t offset, int64_t value) const {
    int64_t low = 0, high = num_slices;  // the last slice beginning at the offset or before it is low - 1
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (slices[middle].src_offset <= offset) low = middle + 1;
      else high = middle;
    }
    const rs_slice* slice = slices + low - 1;
    if (low == 0 || offset - slice->src_offset >= slice->rows * slice->cols) {
      *wrong = 1;
      return;
    }
    const int64_t row = (offset - slice->src_offset) / slice->cols;
    const int64_t place = slice->dst_offset + row * slice->dst_stride + (offset - slice->src_offset) % slice->cols;
    void* const base = bases[slice->dst_base];
    if (item == 4) {
      static_cast<uint32_t*>(base)[place] = static_cast<const uint32_t*>(values)[value];
    } else if (item == 1) {
      static_cast<uint8_t*>(base)[place] = static_cast<const uint8_t*>(values)[value];
    } else {
      const uint16_t bits = static_cast<const uint16_t*>(values)[value];
      if (slice->dst_type == slice->src_type) {
        static_cast<uint16_t*>(base)[place] = bits;
      } else if (slice->src_type == RS_BFLOAT16) {
        static_cast<uint32_t*>(base)[place] = static_cast<uint32_t>(bits) << 16;
      } else {
        Float16 half;
        half.bits = bits;
        Float32 wide;
        narrow(widened(half), wide);
        static_cast<uint32_t*>(base)[place] = wide.bits;
      }
    }
  }

  RS_DEVICE void operator()(int64_t block, int lane) const {
    const bool whole = lengths[block] == RS_DELTA_WHOLE;
    const int64_t first = block * RS_DELTA_BLOCK;
    const int64_t size = elements - first < RS_DELTA_BLOCK ? elements - first : RS_DELTA_BLOCK;
    const int count = whole ? static_cast<int>(size) : lengths[block];
    for (int i = lane; i < count; i += kWarp) {
      const int within = whole ? i : places[place_starts[block] + i];
      if (within >= size) *wrong = 1;
      else put(begin + first + within, value_starts[block] + i);
    }
  }
};

// Processes all blocks of a section. Warps take blocks in turn.
template <typename Work>
RS_DEVICE void for_blocks(const Work& work, int64_t elements, int block, int num_blocks, int thread) {
  const int64_t step = static_cast<int64_t>(num_blocks) * (kThreads / kWarp);
  const int64_t first = static_cast<int64_t>(block) * (kThreads / kWarp) + thread / kWarp;
  for (int64_t number = first; number < rs_delta_blocks(elements); number += step) work(number, thread % kWarp);
}

}  // namespace rs
