// The work of one thread of the CUDA kernels on the tiles of a table, given its place in the grid.
//
// A warp takes whole tiles, and its lanes share a tile's elements without communication. So the same code also runs on
// the host, thread after thread, in tests without a GPU (tests/unit/cuda_emulation.cpp).
#pragma once

#include "reshard_cuda_vectors.h"

// A rectangle of a slice, as work for one warp. Tiles are made on the host (reshard/copy_table.py). A tile of a
// quantising slice is within one block. The width of its vectors is chosen only at launch, because bases move.
struct alignas(16) rs_tile {
  int64_t row, col;    // its first element in the slice
  int32_t rows, cols;  // > 0; rows * cols is below 2^31
  int32_t slice;
  int32_t unused;
};  // 32 bytes

namespace rs {

constexpr int kWarp = 32;
constexpr int kThreads = 256;
constexpr int kChecksumUnroll = 4;  // less than kUnroll, because the sum needs registers too

// A tile's memory. Strides are in bytes.
struct Window {
  const uint8_t* source;
  uint8_t* destination;
  int64_t source_stride, destination_stride;
  int rows, cols;
};

RS_DEVICE Window window_of(const rs_tile& tile, const rs_slice& slice, void* const* bases) {
  const int source_bytes = slice.src_type == RS_FLOAT32 ? 4 : slice.src_type == RS_FLOAT8_E4M3 ? 1 : 2;
  const int destination_bytes = slice.dst_type == RS_FLOAT32 ? 4 : slice.dst_type == RS_FLOAT8_E4M3 ? 1 : 2;
  const int64_t source = slice.src_offset + tile.row * slice.src_stride + tile.col;
  const int64_t destination = slice.dst_offset + tile.row * slice.dst_stride + tile.col;
  return {static_cast<const uint8_t*>(bases[slice.src_base]) + source * source_bytes,
          static_cast<uint8_t*>(bases[slice.dst_base]) + destination * destination_bytes,
          slice.src_stride * source_bytes,
          slice.dst_stride * destination_bytes,
          tile.rows,
          tile.cols};
}

RS_DEVICE int64_t amax_index(const rs_tile& tile, const rs_slice& slice) {
  const int64_t block_row = (slice.row_phase + tile.row) / RS_BLOCK;
  const int64_t block_col = (slice.col_phase + tile.col) / RS_BLOCK;
  return slice.amax_offset + block_row * slice.amax_stride + block_col;
}

// Returns whether every row begins at a multiple of `bytes`, a power of two.
RS_DEVICE bool aligned(const void* first, int64_t stride, int rows, int bytes) {
  const uint64_t places = reinterpret_cast<uintptr_t>(first) | (rows > 1 ? static_cast<uint64_t>(stride) : 0);
  return (places & (bytes - 1)) == 0;
}

// A lane's way through one side of a tile with `cols` vectors per row. It takes every kWarp-th vector, row after row,
// without a division on the way.
struct Walk {
  const uint8_t* place;
  int64_t step, wrap;  // bytes to the lane's next vector, and bytes to add if it is past the end of its row
  int cols, col, step_cols;

  RS_DEVICE Walk(const uint8_t* first, int64_t stride, int cols, int vector_bytes, int lane)
      : place(first + lane / cols * stride + lane % cols * vector_bytes),
        step(kWarp / cols * stride + kWarp % cols * vector_bytes),
        wrap(stride - static_cast<int64_t>(cols) * vector_bytes),
        cols(cols),
        col(lane % cols),
        step_cols(kWarp % cols) {}

  RS_DEVICE void advance() {
    place += step;
    col += step_cols;
    if (col < cols) return;
    col -= cols;
    place += wrap;
  }
};

// Moves the lane's share of a tile, several vectors at a time. Neighbouring lanes have neighbouring vectors.
template <typename Source, typename Destination, typename Convert>
RS_DEVICE void move(const Window& window, int cols, int lane, const Convert& convert) {
  constexpr int kUnroll = Convert::kUnroll;
  const int num = window.rows * cols;
  Walk source(window.source, window.source_stride, cols, sizeof(Source), lane);
  Walk destination(window.destination, window.destination_stride, cols, sizeof(Destination), lane);
#pragma unroll 1
  for (int first = 0; first < num; first += kWarp * kUnroll) {
    // Load
    Words<sizeof(Source)> loaded[kUnroll] = {};
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (first + u * kWarp + lane < num) load_words(source.place, loaded[u]);
      source.advance();
    }
    // Convert, store
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      Source vector;
      memcpy(&vector, &loaded[u], sizeof(vector));
      Destination converted;
      convert(vector, converted);
      if (first + u * kWarp + lane < num) store(const_cast<uint8_t*>(destination.place), converted);
      destination.advance();
    }
  }
}

// Copies bytes, in the widest units dividing addresses, strides and length.
RS_DEVICE void copy_same(const Window& window, int element_bytes, int lane) {
  const int bytes = window.cols * element_bytes;
  const auto fits = [&](int unit) {
    return bytes % unit == 0 && aligned(window.source, window.source_stride, window.rows, unit) &&
           aligned(window.destination, window.destination_stride, window.rows, unit);
  };
  if (fits(16)) {
    typedef Vector<uint32_t, 4> Unit;
    move<Unit, Unit>(window, bytes / 16, lane, Same());
  } else if (fits(4)) {
    move<uint32_t, uint32_t>(window, bytes / 4, lane, Same());
  } else if (fits(2)) {
    move<uint16_t, uint16_t>(window, bytes / 2, lane, Same());
  } else {
    move<uint8_t, uint8_t>(window, bytes, lane, Same());
  }
}

// Copies in vectors with 16 bytes on the wider side if possible, else element by element.
template <typename Source, typename Destination, typename Convert>
RS_DEVICE void copy_converted(const Window& window, int lane, const Convert& convert) {
  constexpr int kWidth = kVectorBytes / (sizeof(Source) > sizeof(Destination) ? sizeof(Source) : sizeof(Destination));
  typedef Vector<Source, kWidth> SourceVector;
  typedef Vector<Destination, kWidth> DestinationVector;
  if (window.cols % kWidth == 0 && aligned(window.source, window.source_stride, window.rows, sizeof(SourceVector)) &&
      aligned(window.destination, window.destination_stride, window.rows, sizeof(DestinationVector))) {
    move<SourceVector, DestinationVector>(window, window.cols / kWidth, lane, convert);
  } else {
    move<Vector<Source, 1>, Vector<Destination, 1>>(window, window.cols, lane, convert);
  }
}

RS_DEVICE constexpr int pair_of(int source_type, int destination_type) { return source_type * 4 + destination_type; }

RS_DEVICE void copy_tile(const rs_tile& tile, const rs_slice& slice, void* const* bases, int lane) {
  const Window window = window_of(tile, slice, bases);
  if (slice.src_type == slice.dst_type) {
    return copy_same(window, slice.src_type == RS_FLOAT32 ? 4 : slice.src_type == RS_FLOAT8_E4M3 ? 1 : 2, lane);
  }
  Quantise quantise = {0.0f};
  if (slice.dst_type == RS_FLOAT8_E4M3) {
    quantise.inverse = inverse_of_scale(static_cast<const float*>(bases[slice.amax_base])[amax_index(tile, slice)]);
  }
  switch (pair_of(slice.src_type, slice.dst_type)) {
    case pair_of(RS_FLOAT32, RS_BFLOAT16): return copy_converted<Float32, Bfloat16>(window, lane, Cast());
    case pair_of(RS_FLOAT32, RS_FLOAT16): return copy_converted<Float32, Float16>(window, lane, Cast());
    case pair_of(RS_BFLOAT16, RS_FLOAT32): return copy_converted<Bfloat16, Float32>(window, lane, Cast());
    case pair_of(RS_FLOAT16, RS_FLOAT32): return copy_converted<Float16, Float32>(window, lane, Cast());
    case pair_of(RS_FLOAT32, RS_FLOAT8_E4M3): return copy_converted<Float32, Float8>(window, lane, quantise);
    case pair_of(RS_BFLOAT16, RS_FLOAT8_E4M3): return copy_converted<Bfloat16, Float8>(window, lane, quantise);
    case pair_of(RS_FLOAT16, RS_FLOAT8_E4M3): return copy_converted<Float16, Float8>(window, lane, quantise);
  }
}

// ---- Largest magnitudes ----

template <typename Element>
RS_DEVICE uint32_t amax_bits(Element x) {
  const uint32_t magnitude = widened(x) & kMagnitude;
  return magnitude > kInfinity ? uint32_t{RS_NAN_AMAX} : magnitude;
}

template <typename Element, int kWidth>
RS_DEVICE uint32_t lane_amax(const Window& window, int lane) {
  typedef Vector<Element, kWidth> Source;
  const int cols = window.cols / kWidth, num = window.rows * cols;
  Walk source(window.source, window.source_stride, cols, sizeof(Source), lane);
  uint32_t result = 0;
#pragma unroll 1
  for (int first = 0; first < num; first += kWarp * kUnroll) {
    // Load
    Words<sizeof(Source)> loaded[kUnroll] = {};
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (first + u * kWarp + lane < num) load_words(source.place, loaded[u]);
      source.advance();
    }
    // Maximum
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      Source vector;
      memcpy(&vector, &loaded[u], sizeof(vector));
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const uint32_t bits = amax_bits(vector.items[i]);
        result = bits > result ? bits : result;
      }
    }
  }
  return result;
}

template <typename Element>
RS_DEVICE uint32_t lane_amax(const Window& window, int lane) {
  constexpr int kWidth = kVectorBytes / sizeof(Element);
  const bool fits =
      window.cols % kWidth == 0 && aligned(window.source, window.source_stride, window.rows, kVectorBytes);
  return fits ? lane_amax<Element, kWidth>(window, lane) : lane_amax<Element, 1>(window, lane);
}

// Called by all lanes of a warp together.
RS_DEVICE void raise_entry(uint32_t* entry, uint32_t bits, [[maybe_unused]] int lane) {
#ifdef __CUDACC__
  bits = __reduce_max_sync(0xffffffffu, bits);
  if (lane == 0) atomicMax(entry, bits);
#else
  if (bits > *entry) *entry = bits;
#endif
}

RS_DEVICE void amax_tile(const rs_tile& tile, const rs_slice& slice, void* const* bases, int lane) {
  if (slice.dst_type != RS_FLOAT8_E4M3 || slice.src_type == RS_FLOAT8_E4M3) return;  // not quantised: no amax
  const Window window = window_of(tile, slice, bases);
  uint32_t bits;
  switch (slice.src_type) {
    case RS_FLOAT32: bits = lane_amax<Float32>(window, lane); break;
    case RS_BFLOAT16: bits = lane_amax<Bfloat16>(window, lane); break;
    default: bits = lane_amax<Float16>(window, lane);
  }
  raise_entry(static_cast<uint32_t*>(bases[slice.amax_base]) + amax_index(tile, slice), bits, lane);
}

// ---- Checksums ----

// Returns an element's bits for a checksum. With `alike` every NaN has the same bits.
template <typename Element>
RS_DEVICE uint32_t counted_bits(Element x, uint32_t largest, bool alike) {
  constexpr uint32_t kUnsigned = (1u << (8 * sizeof(Element) - 1)) - 1;
  return alike && (x.bits & kUnsigned) > largest ? largest + 1 : x.bits;
}

// Returns the lane's share of a tile's sum. The tile's first element is number `place` of a tensor of `width` columns.
template <typename Element, int kWidth>
RS_DEVICE uint64_t lane_checksum(const Window& window, uint64_t place, int64_t width, uint32_t largest, bool alike,
                                 int lane) {
  typedef Vector<Element, kWidth> Source;
  const int cols = window.cols / kWidth, num = window.rows * cols;
  Walk source(window.source, window.source_stride, cols, sizeof(Source), lane);
  int row = lane / cols, col = lane % cols;
  const int step_rows = kWarp / cols, step_cols = kWarp % cols;
  uint64_t result = 0;
#pragma unroll 1
  for (int first = 0; first < num; first += kWarp * kChecksumUnroll) {
    // Load
    Words<sizeof(Source)> loaded[kChecksumUnroll] = {};
#pragma unroll
    for (int u = 0; u < kChecksumUnroll; ++u) {
      if (first + u * kWarp + lane < num) load_words(source.place, loaded[u]);
      source.advance();
    }
    // Sum
#pragma unroll
    for (int u = 0; u < kChecksumUnroll; ++u) {
      Source vector;
      memcpy(&vector, &loaded[u], sizeof(vector));
      if (first + u * kWarp + lane < num) {
        const uint64_t begin = place + row * width + col * kWidth;
        uint64_t run_key = rs_run_key(begin / RS_RUN);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          const uint32_t within = static_cast<uint32_t>(begin + i) % RS_RUN;
          if (i > 0 && within == 0) run_key = rs_run_key((begin + i) / RS_RUN);
          const uint32_t bits = counted_bits(vector.items[i], largest, alike) ^ RS_PRESENT;
          result += run_key * (static_cast<uint64_t>(rs_place_key(within)) * bits);
        }
      }
      row += step_rows, col += step_cols;
      if (col >= cols) col -= cols, ++row;
    }
  }
  return result;
}

template <typename Element>
RS_DEVICE uint64_t lane_checksum(const rs_tile& tile, const rs_slice& slice, void* const* bases, uint32_t largest,
                                 int lane) {
  constexpr int kWidth = kVectorBytes / sizeof(Element);
  const Window window = window_of(tile, slice, bases);
  const uint64_t place = slice.dst_offset + tile.row * slice.dst_stride + tile.col;
  const int64_t width = slice.dst_stride;
  const bool alike = slice.row_phase != 0;
  const bool fits =
      window.cols % kWidth == 0 && aligned(window.source, window.source_stride, window.rows, kVectorBytes);
  return fits ? lane_checksum<Element, kWidth>(window, place, width, largest, alike, lane)
              : lane_checksum<Element, 1>(window, place, width, largest, alike, lane);
}

// Called by all lanes of a warp together.
RS_DEVICE void add_to_sum(uint64_t* sum, uint64_t share, [[maybe_unused]] int lane) {
#ifdef __CUDACC__
  for (int distance = kWarp / 2; distance > 0; distance /= 2) share += __shfl_down_sync(0xffffffffu, share, distance);
  if (lane == 0) atomicAdd(reinterpret_cast<unsigned long long*>(sum), static_cast<unsigned long long>(share));
#else
  *sum += share;
#endif
}

RS_DEVICE void checksum_tile(const rs_tile& tile, const rs_slice& slice, void* const* bases, int lane) {
  uint64_t share;
  switch (slice.src_type) {
    case RS_FLOAT32: share = lane_checksum<Float32>(tile, slice, bases, kInfinity, lane); break;
    case RS_BFLOAT16: share = lane_checksum<Bfloat16>(tile, slice, bases, kInfinity >> 16, lane); break;
    case RS_FLOAT16: share = lane_checksum<Float16>(tile, slice, bases, 0x7c00, lane); break;
    default: share = lane_checksum<Float8>(tile, slice, bases, RS_NAN_FLOAT8 - 1, lane);
  }
  add_to_sum(static_cast<uint64_t*>(bases[slice.amax_base]) + slice.amax_offset, share, lane);
}

// ---- Threads ----

struct Table {
  const rs_tile* tiles;
  const rs_slice* slices;
  void* const* bases;
};

struct Copy {
  RS_DEVICE void operator()(const rs_tile& tile, const rs_slice& slice, void* const* bases, int lane) const {
    copy_tile(tile, slice, bases, lane);
  }
};

struct Amax {
  RS_DEVICE void operator()(const rs_tile& tile, const rs_slice& slice, void* const* bases, int lane) const {
    amax_tile(tile, slice, bases, lane);
  }
};

struct Checksum {
  RS_DEVICE void operator()(const rs_tile& tile, const rs_slice& slice, void* const* bases, int lane) const {
    checksum_tile(tile, slice, bases, lane);
  }
};

// Processes the tiles first <= number < last. Warps take tiles in turn. Neighbouring tiles belong to different blocks,
// so a few tiles occupy many multiprocessors.
template <typename Work>
RS_DEVICE void for_tiles(const Table& table, int64_t first, int64_t last, int block, int num_blocks, int thread,
                         const Work& work) {
  const int warp = thread / kWarp, lane = thread % kWarp;
  const int64_t step = static_cast<int64_t>(num_blocks) * (kThreads / kWarp);
  for (int64_t number = first + block + static_cast<int64_t>(num_blocks) * warp; number < last; number += step) {
    const rs_tile tile = table.tiles[number];
    work(tile, table.slices[tile.slice], table.bases, lane);
  }
}

}  // namespace rs
