// The CPU twin of reshard_cuda.cu. Slices are cut into tiles of about 512 KB, and threads take tiles from one counter.
//
// The code for a tile exists once per instruction set. The choice is made when the library is loaded. Everything is
// exact to the bit, so all agree.
#include <new>

#include "reshard_cpu_loops.h"
#include "reshard_cpu_signals.h"
#include "reshard_cpu_work.h"
#if defined(__x86_64__)
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2")))
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")))
#endif
#include "reshard_cpu_delta.h"

namespace {

// Stores bypassing the caches need not read the destination first, but the next reader finds it only in memory. By
// measurement, a copy and one read of its result together are faster with them from about this size on.
constexpr int64_t kNontemporalBytes = 4 << 20;
// Shorter rows are mostly partial cache lines. These cannot bypass the caches well.
constexpr int64_t kNontemporalRowBytes = 512;
// Short rows of a window are fetched this many bytes ahead of their use.
constexpr int64_t kAheadBytes = 4096;
constexpr int64_t kMaxTileBlocks = kTileQuantisedCols / RS_BLOCK + 1;

#if defined(__x86_64__)
AVX2 void stream_avx2(char* d, const char* s, int64_t n) {
  const int64_t head = std::min<int64_t>(n, -(uintptr_t)d & 63);
  memcpy(d, s, head);
  d += head, s += head, n -= head;
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) {
    const __m256i low = _mm256_loadu_si256((const __m256i*)(s + i));
    const __m256i high = _mm256_loadu_si256((const __m256i*)(s + i + 32));
    _mm256_stream_si256((__m256i*)(d + i), low);
    _mm256_stream_si256((__m256i*)(d + i + 32), high);
  }
  memcpy(d + i, s + i, n - i);
}

AVX512 void stream_avx512(char* d, const char* s, int64_t n) {
  const int64_t head = std::min<int64_t>(n, -(uintptr_t)d & 63);
  memcpy(d, s, head);
  d += head, s += head, n -= head;
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) _mm512_stream_si512((__m512i*)(d + i), _mm512_loadu_si512(s + i));
  memcpy(d + i, s + i, n - i);
}
#endif

DEFINE_ROUTINES(baseline, , nullptr)
constexpr Routines kBaseline = ROUTINES_OF(baseline);
#if defined(__x86_64__)
DEFINE_ROUTINES(avx2, AVX2, stream_avx2)
constexpr Routines kAvx2 = ROUTINES_OF(avx2);
DEFINE_ROUTINES(avx512, AVX512, stream_avx512)
constexpr Routines kAvx512 = ROUTINES_OF(avx512);
#endif

enum Instructions { kAnyProcessor = 0, kWithAvx2 = 1, kWithAvx512 = 2 };

Instructions supported_instructions() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    return kWithAvx512;
  if (__builtin_cpu_supports("avx2")) return kWithAvx2;
#endif
  return kAnyProcessor;
}

const Routines* routines_with(Instructions instructions) {
#if defined(__x86_64__)
  if (instructions == kWithAvx512) return &kAvx512;
  if (instructions == kWithAvx2) return &kAvx2;
#endif
  (void)instructions;
  return &kBaseline;
}

const Routines* routines = routines_with(supported_instructions());

template <int item>
delta::Differing differing() {
#if defined(__x86_64__)
  if (routines == &kAvx512) return delta::differing_avx512<item>;
  if (routines == &kAvx2) return delta::differing_avx2<item>;
#endif
  return delta::differing_baseline<item>;
}

// Calls function(number of the block, first column, columns) for each block of a tile's columns.
template <class Function>
ALWAYS_INLINE void for_each_block(const rs_slice& s, const Tile& t, Function&& function) {
  int64_t first = 0, block = 0;
  for (int64_t phase = (s.col_phase + t.col) % RS_BLOCK; first < t.cols; phase = 0, ++block) {
    const int64_t width = std::min<int64_t>(RS_BLOCK - phase, t.cols - first);
    function(block, first, width);
    first += width;
  }
}

// Returns the amax entry of the block of a tile's first element. The entries of its other blocks follow.
uint32_t* amax_of(const rs_slice& s, const Tile& t, void* const* bases) {
  return (uint32_t*)bases[s.amax_base] + s.amax_offset + (s.row_phase + t.row) / RS_BLOCK * s.amax_stride +
         (s.col_phase + t.col) / RS_BLOCK;
}

Part part_of(const rs_slice& s, const Tile& t, void* const* bases) {
  const int64_t from = item_bytes(s.src_type), to = item_bytes(s.dst_type);
  Part part = {};
  part.destination = (char*)bases[s.dst_base] + (s.dst_offset + t.row * s.dst_stride + t.col) * to;
  part.source = (const char*)bases[s.src_base] + (s.src_offset + t.row * s.src_stride + t.col) * from;
  part.destination_stride = s.dst_stride * to, part.source_stride = s.src_stride * from;
  part.rows = t.rows, part.cols = s.src_type == s.dst_type ? t.cols * from : t.cols;
  part.ahead_bytes = t.cols * from;
  if (t.ahead >= 0) {
    part.ahead = (const char*)bases[s.src_base] + t.ahead * from, part.ahead_stride = s.cols * from;
  } else if (s.src_stride > t.cols && t.rows > 1 && part.ahead_bytes < kAheadBytes) {
    const int64_t rows = (kAheadBytes + part.ahead_bytes - 1) / part.ahead_bytes;
    part.ahead = part.source + rows * part.source_stride, part.ahead_stride = part.source_stride;
  }
  return part;
}

void copy_tile(const rs_slice& s, const Tile& t, void* const* bases, bool nontemporal) {
  Part part = part_of(s, t, bases);
  float inverse[kTileQuantisedCols];
  if (quantises(s)) {
    const uint32_t* amax = amax_of(s, t, bases);
    for_each_block(s, t, [&](int64_t block, int64_t col, int64_t width) {
      const float a = std::max(float_of(amax[block]), kSmallestAmax);
      std::fill_n(inverse + col, width, amax[block] < kInfinity ? kMaxFloat8 / a : float_of(RS_NAN_AMAX));
    });
    part.inverse = inverse;
  }
  const bool adjacent = s.dst_stride == t.cols || t.rows == 1;
  const bool whole_lines = adjacent || t.cols * item_bytes(s.dst_type) >= kNontemporalRowBytes;
  routines->copy[nontemporal && whole_lines][s.src_type][s.dst_type](part);
}

uint32_t amax_bits(uint8_t type, uint32_t magnitude) {
  const uint32_t wide = type == RS_FLOAT32    ? magnitude
                        : type == RS_BFLOAT16 ? magnitude << 16
                                              : float32_of_float16((uint16_t)magnitude);
  return wide > kInfinity ? (uint32_t)RS_NAN_AMAX : wide;
}

void amax_tile(const rs_slice& s, const Tile& t, void* const* bases) {
  Part p = part_of(s, t, bases);
  const Amax amax = routines->amax[s.src_type];
  const int64_t from = item_bytes(s.src_type);
  uint32_t largest[kMaxTileBlocks] = {};
  for (int64_t row = 0; row < t.rows; ++row, p.source += p.source_stride) {
    fetch_ahead(p, row);
    for_each_block(s, t, [&](int64_t block, int64_t col, int64_t width) {
      largest[block] = std::max(largest[block], amax(p.source + col * from, width));
    });
  }
  uint32_t* entries = amax_of(s, t, bases);
  for_each_block(s, t, [&](int64_t block, int64_t, int64_t) {
    const uint32_t found = amax_bits(s.src_type, largest[block]);
    uint32_t known = __atomic_load_n(&entries[block], __ATOMIC_RELAXED);
    while (known < found && !__atomic_compare_exchange_n(&entries[block], &known, found, true, __ATOMIC_RELAXED,
                                                         __ATOMIC_RELAXED)) {
    }
  });
}

struct PlaceKeys {
  uint32_t keys[RS_RUN];
  PlaceKeys() {
    for (uint32_t place = 0; place < RS_RUN; ++place) keys[place] = rs_place_key(place);
  }
};
const PlaceKeys place_keys;

void checksum_tile(const rs_slice& s, const Tile& t, void* const* bases) {
  Part p = part_of(s, t, bases);
  const KeyedSum keyed_sum = routines->keyed_sum[s.row_phase != 0][s.src_type];
  const int64_t item = item_bytes(s.src_type);
  uint64_t sum = 0;
  for (int64_t row = 0; row < t.rows; ++row, p.source += p.source_stride) {
    fetch_ahead(p, row);
    const int64_t place = s.dst_offset + (t.row + row) * s.dst_stride + t.col;
    for (int64_t col = 0, n; col < t.cols; col += n) {
      const int64_t within = (place + col) % RS_RUN;
      n = std::min(t.cols - col, RS_RUN - within);
      sum += rs_run_key((uint64_t)(place + col) / RS_RUN) *
             keyed_sum(p.source + col * item, n, place_keys.keys + within);
    }
  }
  __atomic_fetch_add((uint64_t*)bases[s.amax_base] + s.amax_offset, sum, __ATOMIC_RELAXED);
}

}  // namespace

extern "C" {

int rs_cpu_abi_version(void) { return RS_ABI_VERSION; }

int rs_cpu_sizeof_slice(void) { return (int)sizeof(rs_slice); }

// Limits the instructions from now on (0: any processor, 1: AVX2, 2: AVX-512) and returns the ones in use. These never
// exceed the processor's. For tests. Do not call it while copies run.
int rs_cpu_limit_instructions(int most) {
  const Instructions used = std::min((Instructions)most, supported_instructions());
  routines = routines_with(used);
  return used;
}

// Copies n slices. Returns 0, or 1 if there was no memory for the list of tiles.
int rs_cpu_copy(const rs_slice* slices, int64_t n, void* const* bases, int threads) try {
  const Work work(slices, n, false);
  const bool nontemporal = work.bytes() >= kNontemporalBytes;
  work.run(threads, [&](const Tile& tile) { copy_tile(slices[tile.slice], tile, bases, nontemporal); });
  return 0;
} catch (const std::bad_alloc&) {
  return 1;
}

// Raises the amax entries of the quantising ones of n slices. Returns as rs_cpu_copy does.
int rs_cpu_amax(const rs_slice* slices, int64_t n, void* const* bases, int threads) try {
  const Work work(slices, n, true);
  work.run(threads, [&](const Tile& tile) { amax_tile(slices[tile.slice], tile, bases); });
  return 0;
} catch (const std::bad_alloc&) {
  return 1;
}

// Adds the checksums of n slices to their sums. Returns as rs_cpu_copy does.
int rs_cpu_checksum(const rs_slice* slices, int64_t n, void* const* bases, int threads) try {
  const Work work(slices, n, false);
  work.run(threads, [&](const Tile& tile) { checksum_tile(slices[tile.slice], tile, bases); });
  return 0;
} catch (const std::bad_alloc&) {
  return 1;
}

// Makes one contiguous copy, the bound for measurements of copies of slices. Returns as rs_cpu_copy does.
int rs_cpu_memcpy(void* destination, const void* source, int64_t bytes, int threads, int nontemporal) try {
  const Work work(bytes);
  work.run(threads, [&](const Tile& t) {
    Part part = {};
    part.destination = (char*)destination + t.col, part.source = (const char*)source + t.col;
    part.rows = 1, part.cols = t.cols;
    routines->copy[nontemporal != 0][RS_FLOAT8_E4M3][RS_FLOAT8_E4M3](part);
  });
  return 0;
} catch (const std::bad_alloc&) {
  return 1;
}

// Returns the length of `counts` in rs_cpu_delta_mark for sections of so many bytes.
int64_t rs_cpu_delta_counts(int64_t bytes) { return 3 * delta::num_tiles(bytes); }

// Finds the differences between `packed` and `kept`, in `elements` of `item` bytes, and makes `kept` equal. Writes
// `lengths` [blocks], `counts`, and the rest to `found`, of elements * (item + 1) bytes. The n slices first pack the
// section, tile by tile, so it is compared from the caches. It begins at element `begin` of their destination. Without
// slices it must be packed already. Returns as rs_cpu_copy does.
int rs_cpu_delta_mark(const rs_slice* slices, int64_t n, void* const* bases, int64_t begin, const void* packed,
                      void* kept, int64_t elements, int item, void* found, uint8_t* lengths, int64_t* counts,
                      int threads) try {
  const char* p = (const char*)packed;
  char *k = (char*)kept, *f = (char*)found;
  std::atomic<bool> failed{false};
  const auto pack = [&](int64_t first, int64_t last) {
    if (n) try {
        const std::vector<rs_slice> parts = delta::slices_of(slices, n, begin + first, begin + last);
        const Work work(parts.data(), (int64_t)parts.size(), false);
        work.run(1, [&](const Tile& tile) { copy_tile(parts[tile.slice], tile, bases, false); });
      } catch (const std::bad_alloc&) {
        failed = true;
      }
  };
  if (item == 1) delta::mark<1>(pack, p, k, elements, f, lengths, counts, differing<1>(), threads);
  if (item == 2) delta::mark<2>(pack, p, k, elements, f, lengths, counts, differing<2>(), threads);
  if (item == 4) delta::mark<4>(pack, p, k, elements, f, lengths, counts, differing<4>(), threads);
  return failed;
} catch (const std::bad_alloc&) {
  return 1;
}

// Writes the differences in `found`, and the whole blocks of `packed`, to `places` and `values`.
void rs_cpu_delta_gather(const void* packed, const void* found, int64_t elements, int item, const uint8_t* lengths,
                         void* places, void* values) {
  delta::gather((const char*)packed, (const char*)found, elements, item, lengths, (char*)places, (char*)values);
}

// Writes the changes of a section to the destinations of n slices. Their sources follow each other in one base, and the
// section begins at its element `begin`. They only convert to wider types. `totals` are the numbers of places and
// values to be read. Returns as rs_cpu_copy does, or RS_DELTA_WRONG if these or a place do not fit the lengths and
// slices. The destination is then partly written.
int rs_cpu_delta_apply(const rs_slice* slices, int64_t n, void* const* bases, int64_t begin, int64_t elements, int item,
                       const uint8_t* lengths, const uint8_t* places, const void* values, const int64_t* totals,
                       int threads) try {
  const char* v = (const char*)values;
  if (item == 1) return delta::apply<1>(slices, n, bases, begin, elements, lengths, places, v, totals, threads);
  if (item == 2) return delta::apply<2>(slices, n, bases, begin, elements, lengths, places, v, totals, threads);
  return delta::apply<4>(slices, n, bases, begin, elements, lengths, places, v, totals, threads);
} catch (const std::bad_alloc&) {
  return 1;
}

// Calls signal_word.
void rs_cpu_signal(uint32_t* word, uint32_t value) { signal_word(word, value); }

// Returns 0 once the word has reached the value, or 1 after so many nanoseconds. See await_word.
int rs_cpu_await(uint32_t* word, uint32_t value, int64_t nanoseconds) {
  return await_word(word, value, nanoseconds) ? 0 : 1;
}

}  // extern "C"
