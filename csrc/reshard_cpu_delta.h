// Changes of packed bytes since they were last sent, on the CPU. reshard_delta.h describes the encoding.
#pragma once

#include <string.h>

#include <atomic>
#include <utility>
#include <vector>

#include "reshard_cpu_elements.h"
#include "reshard_cpu_work.h"
#include "reshard_delta.h"

namespace delta {

template <int item>
struct BitsOf;
template <>
struct BitsOf<1> {
  using Type = uint8_t;
};
template <>
struct BitsOf<2> {
  using Type = uint16_t;
};
template <>
struct BitsOf<4> {
  using Type = uint32_t;
};

// Returns a mask of the differing elements among n <= 64 elements of `item` bytes.
template <int item>
ALWAYS_INLINE uint64_t differing_loop(const char* a, const char* b, int64_t n) {
  uint64_t mask = 0;
  for (int64_t i = 0; i < n; ++i) {
    typename BitsOf<item>::Type x, y;
    memcpy(&x, a + i * item, item), memcpy(&y, b + i * item, item);
    mask |= (uint64_t)(x != y) << i;
  }
  return mask;
}

template <int item>
uint64_t differing_baseline(const char* a, const char* b) {
  return memcmp(a, b, 64 * item) ? differing_loop<item>(a, b, 64) : 0;
}

#if defined(__x86_64__)
#define RS_LOAD(p, i) _mm256_loadu_si256((const __m256i*)(p) + (i))
template <int item>
__attribute__((target("avx2"))) uint64_t differing_avx2(const char* a, const char* b) {
  uint64_t equal = 0;
  if constexpr (item == 1) {
    for (int64_t i = 0; i < 2; ++i)
      equal |= (uint64_t)(uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(RS_LOAD(a, i), RS_LOAD(b, i))) << (32 * i);
  } else if constexpr (item == 2) {
    for (int64_t i = 0; i < 2; ++i) {
      const __m256i low = _mm256_cmpeq_epi16(RS_LOAD(a, 2 * i), RS_LOAD(b, 2 * i));
      const __m256i high = _mm256_cmpeq_epi16(RS_LOAD(a, 2 * i + 1), RS_LOAD(b, 2 * i + 1));
      const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(low, high), 0xd8);
      equal |= (uint64_t)(uint32_t)_mm256_movemask_epi8(bytes) << (32 * i);
    }
  } else {
    for (int64_t i = 0; i < 8; ++i) {
      const __m256i same = _mm256_cmpeq_epi32(RS_LOAD(a, i), RS_LOAD(b, i));
      equal |= (uint64_t)(uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(same)) << (8 * i);
    }
  }
  return ~equal;
}
#undef RS_LOAD

template <int item>
AVX512 uint64_t differing_avx512(const char* a, const char* b) {
  uint64_t mask = 0;
  for (int64_t i = 0; i < item; ++i) {
    const __m512i x = _mm512_loadu_si512(a + 64 * i), y = _mm512_loadu_si512(b + 64 * i);
    if constexpr (item == 1) mask |= (uint64_t)_mm512_cmpneq_epi8_mask(x, y);
    if constexpr (item == 2) mask |= (uint64_t)_mm512_cmpneq_epi16_mask(x, y) << (32 * i);
    if constexpr (item == 4) mask |= (uint64_t)_mm512_cmpneq_epi32_mask(x, y) << (16 * i);
  }
  return mask;
}
#endif

// Returns a mask of the differing elements among 64.
using Differing = uint64_t (*)(const char* a, const char* b);

constexpr int64_t kWords = RS_DELTA_BLOCK / 64;

inline int64_t size_of_block(int64_t elements, int64_t block) {
  return std::min<int64_t>(RS_DELTA_BLOCK, elements - block * RS_DELTA_BLOCK);
}

// The numbers of places and values before each tile's first block. A tile has `tile_blocks` blocks.
struct Starts {
  std::vector<std::pair<int64_t, int64_t>> of_tile;
  int64_t places = 0, values = 0;

  Starts(const uint8_t* lengths, int64_t elements, int64_t tile_blocks) {
    const int64_t blocks = rs_delta_blocks(elements);
    for (int64_t block = 0; block < blocks; ++block) {
      if (block % tile_blocks == 0) of_tile.emplace_back(places, values);
      places += rs_delta_places(lengths[block]);
      values += rs_delta_values(lengths[block], size_of_block(elements, block));
    }
  }
};

// Returns the number of tiles of a section of so many bytes.
inline int64_t num_tiles(int64_t bytes) { return (bytes + kTileBytes - 1) / kTileBytes; }

// Returns rows [row, row + rows) and columns [col, col + cols) of a slice.
inline rs_slice part_of_slice(rs_slice s, int64_t row, int64_t rows, int64_t col, int64_t cols) {
  s.src_offset += row * s.src_stride + col, s.dst_offset += row * s.dst_stride + col;
  s.rows = rows, s.cols = cols;
  if (quantises(s)) {
    const int64_t row_phase = s.row_phase + row, col_phase = s.col_phase + col;
    s.amax_offset += row_phase / RS_BLOCK * s.amax_stride + col_phase / RS_BLOCK;
    s.row_phase = (uint8_t)(row_phase % RS_BLOCK), s.col_phase = (uint8_t)(col_phase % RS_BLOCK);
  }
  return s;
}

// Returns the parts of slices for elements [first, last) of their base. The slices' elements follow each other there.
inline std::vector<rs_slice> slices_of(const rs_slice* slices, int64_t n, int64_t first, int64_t last) {
  std::vector<rs_slice> found;
  const rs_slice* s = std::upper_bound(
      slices, slices + n, first, [](int64_t place, const rs_slice& slice) { return place < slice.dst_offset; });
  for (s -= s > slices; s < slices + n && s->dst_offset < last; ++s) {
    int64_t at = std::max<int64_t>(0, first - s->dst_offset);
    const int64_t end = std::min(s->rows * s->cols, last - s->dst_offset);
    while (at < end) {
      const int64_t row = at / s->cols, col = at % s->cols, rows = (end - at) / s->cols;
      const bool in_row = col > 0 || rows == 0;
      const int64_t cols = in_row ? std::min(s->cols - col, end - at) : s->cols;
      found.push_back(part_of_slice(*s, row, in_row ? 1 : rows, col, cols));
      at += in_row ? cols : rows * cols;
    }
  }
  return found;
}

// Marks differences block by block, from the nearest caches. Differences in blocks not sent whole go to `found`. It has
// room for all elements and their places, and each tile's differences begin at its elements. `counts` [tiles * 3] are
// the places, values and changes of each tile. `pack` packs elements [first, last) right before they are compared.
template <int item, class Pack>
void mark(Pack&& pack, const char* packed, char* kept, int64_t elements, char* found, uint8_t* lengths,
          int64_t* counts, Differing differing, int threads) {
  const Work work(elements * item);
  char* const found_places = found + elements * item;
  work.run(threads, [&](const Tile& t) {
    const int64_t first = t.col / (RS_DELTA_BLOCK * item), last = first + rs_delta_blocks(t.cols / item);
    pack(t.col / item, (t.col + t.cols) / item);
    char *const values = found + t.col, *const places = found_places + t.col / item;
    char *v = values, *p = places;
    int64_t num_values = 0, num_changed = 0;
    for (int64_t block = first; block < last; ++block) {
      const int64_t size = size_of_block(elements, block), begin = block * RS_DELTA_BLOCK * item;
      uint64_t masks[kWords] = {};
      int64_t count = 0;
      for (int64_t word = 0; word < kWords; ++word) {
        const int64_t at = begin + 64 * word * item, n = std::min<int64_t>(64, size - 64 * word);
        if (n == 64) masks[word] = differing(packed + at, kept + at);
        else if (n > 0) masks[word] = differing_loop<item>(packed + at, kept + at, n);
        count += __builtin_popcountll(masks[word]);
      }
      lengths[block] = rs_delta_length(count, size, item);
      num_values += rs_delta_values(lengths[block], size), num_changed += count;
      if (!count) continue;
      if (lengths[block] == RS_DELTA_WHOLE) {
        memcpy(kept + begin, packed + begin, size * item);
        continue;
      }
      for (int64_t word = 0; word < kWords; ++word)
        for (uint64_t mask = masks[word]; mask; mask &= mask - 1, v += item) {
          const int64_t within = 64 * word + __builtin_ctzll(mask);
          const char* s = packed + begin + within * item;
          *p++ = (char)within;
          memcpy(v, s, item), memcpy(kept + begin + within * item, s, item);
        }
    }
    int64_t* const of_tile = counts + 3 * (t.col / kTileBytes);
    of_tile[0] = p - places, of_tile[1] = num_values, of_tile[2] = num_changed;
  });
}

// Writes the found places and values, and the whole blocks of `packed`, in order.
inline void gather(const char* packed, const char* found, int64_t elements, int64_t item, const uint8_t* lengths,
                   char* places, char* values) {
  const char* found_places = found + elements * item;
  const int64_t tile_blocks = kTileBytes / (RS_DELTA_BLOCK * item), blocks = rs_delta_blocks(elements);
  for (int64_t tile = 0; tile < num_tiles(elements * item); ++tile) {
    const char *p = found_places + tile * kTileBytes / item, *v = found + tile * kTileBytes;
    const int64_t end = std::min(blocks, (tile + 1) * tile_blocks);
    for (int64_t block = tile * tile_blocks; block < end;) {
      int64_t count = 0;  // of neighbours not sent whole; their differences follow each other
      for (; block < end && lengths[block] != RS_DELTA_WHOLE; ++block) count += lengths[block];
      memcpy(places, p, count), memcpy(values, v, count * item);
      places += count, values += count * item, p += count, v += count * item;
      const int64_t begin = block;
      while (block < end && lengths[block] == RS_DELTA_WHOLE) ++block;
      const int64_t bytes = (std::min(elements, block * RS_DELTA_BLOCK) - begin * RS_DELTA_BLOCK) * item;
      if (block == begin) continue;
      memcpy(values, packed + begin * RS_DELTA_BLOCK * item, bytes);
      values += bytes;
    }
  }
}

// Writes one element to its destination. It has the destination's type or a narrower one.
template <int item>
ALWAYS_INLINE void put(char* d, const char* s, bool widens, bool bfloat16) {
  if constexpr (item == 2) {
    if (widens) {
      uint16_t bits;
      memcpy(&bits, s, 2);
      const uint32_t wide = bfloat16 ? (uint32_t)bits << 16 : float32_of_float16(bits);
      memcpy(d, &wide, 4);
      return;
    }
  }
  memcpy(d, s, item);
}

// Finds the destinations of a section's elements, in ascending order.
class Way {
 public:
  Way(const rs_slice* slices, int64_t n, void* const* bases, int64_t begin)
      : slice_(slices), end_(slices + n), bases_(bases), begin_(begin) {}

  // Writes `count` neighbours from `element` on. Returns false if no slice has them.
  template <int item>
  bool put_run(int64_t element, int64_t count, const char* s) {
    while (count > 0) {
      if (!(element >= row_begin_ && element < row_end_) && !find(element)) return false;
      const int64_t n = std::min(count, row_end_ - element);
      char* d = row_ + (element - row_begin_) * to_;
      if (!widens_) {
        if (n == 1) memcpy(d, s, item);
        else memcpy(d, s, n * item);
      } else {
        for (int64_t i = 0; i < n; ++i) put<item>(d + i * to_, s + i * item, true, bfloat16_);
      }
      element += n, count -= n, s += n * item;
    }
    return true;
  }

 private:
  bool find(int64_t element) {
    // The last slice beginning at the element or before it.
    if (slice_ >= end_) return false;
    const int64_t offset = begin_ + element;
    if (offset < slice_->src_offset) return false;
    if (offset >= slice_->src_offset + slice_->rows * slice_->cols) {
      const rs_slice* after = std::upper_bound(
          slice_ + 1, end_, offset, [](int64_t place, const rs_slice& slice) { return place < slice.src_offset; });
      slice_ = after - 1;
      if (offset >= slice_->src_offset + slice_->rows * slice_->cols) return false;
    }
    const int64_t row = (offset - slice_->src_offset) / slice_->cols;
    row_begin_ = slice_->src_offset + row * slice_->cols - begin_, row_end_ = row_begin_ + slice_->cols;
    to_ = item_bytes(slice_->dst_type);
    widens_ = slice_->src_type != slice_->dst_type, bfloat16_ = slice_->src_type == RS_BFLOAT16;
    row_ = (char*)bases_[slice_->dst_base] + (slice_->dst_offset + row * slice_->dst_stride) * to_;
    return true;
  }

  const rs_slice *slice_, *end_;
  void* const* bases_;
  int64_t begin_, row_begin_ = 0, row_end_ = 0, to_ = 0;
  char* row_ = nullptr;
  bool widens_ = false, bfloat16_ = false;
};

template <int item>
int apply(const rs_slice* slices, int64_t n, void* const* bases, int64_t begin, int64_t elements,
          const uint8_t* lengths, const uint8_t* places, const char* values, const int64_t* totals, int threads) {
  const Starts starts(lengths, elements, kTileBytes / (RS_DELTA_BLOCK * item));
  if (starts.places != totals[0] || starts.values != totals[1]) return RS_DELTA_WRONG;
  const Work work(elements * item);
  std::atomic<bool> wrong{false};
  work.run(threads, [&](const Tile& t) {
    const int64_t first = t.col / (RS_DELTA_BLOCK * item), last = first + rs_delta_blocks(t.cols / item);
    const auto [place, value] = starts.of_tile[t.col / kTileBytes];
    const uint8_t* p = places + place;
    const char* v = values + value * item;
    Way way(slices, n, bases, begin);
    for (int64_t block = first; block < last && !wrong; ++block) {
      if (!lengths[block]) continue;
      const int64_t element = block * RS_DELTA_BLOCK, size = size_of_block(elements, block);
      bool right = true;
      if (lengths[block] == RS_DELTA_WHOLE) {
        right = way.put_run<item>(element, size, v);
        v += size * item;
      } else {
        for (int64_t i = 0; i < lengths[block] && right; ++i, v += item) {
          right = *p < size && way.put_run<item>(element + *p, 1, v);
          ++p;
        }
      }
      if (!right) wrong = true;
    }
  });
  return wrong ? RS_DELTA_WRONG : 0;
}

}  // namespace delta
