// Distributes a call's slices to threads, as tiles in chunks of about kTileBytes.
#pragma once

#include <stdint.h>

#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>
#include <tuple>
#include <vector>

#include "reshard.h"

constexpr int64_t kTileBytes = 512 << 10;
constexpr int64_t kTileQuantisedCols = 4096;
constexpr int64_t kTileOverheadBytes = 256;  // the cost of a tile in addition to its bytes
constexpr int64_t kMinThreadChunks = 4;      // copied in about the time of starting a thread
constexpr int64_t kBandBytes = 64 << 10;
constexpr int64_t kMinBandRows = 8;

inline int64_t item_bytes(uint8_t type) { return type == RS_FLOAT32 ? 4 : type == RS_FLOAT8_E4M3 ? 1 : 2; }

inline bool quantises(const rs_slice& s) { return s.dst_type == RS_FLOAT8_E4M3 && s.src_type != RS_FLOAT8_E4M3; }

// A part of slice number `slice`. Rows and columns count from the slice's first. While it is copied, as many elements
// of the source are fetched from element `ahead` of the base on. -1 means none.
struct Tile {
  int64_t slice, row, col, rows, cols, ahead = -1;
};

class Work {
 public:
  // Makes tiles of slices[0:n]. With `amax`, only of the quantising ones.
  Work(const rs_slice* slices, int64_t n, bool amax) : slices_(slices) {
    std::vector<int64_t> windows;
    for (int64_t i = 0; i < n; ++i) {
      const rs_slice& s = slices[i];
      if (s.rows <= 0 || s.cols <= 0 || (amax && !quantises(s))) continue;
      bytes_ += s.rows * s.cols * item_bytes(s.dst_type);
      if (s.rows > 1 && std::max(s.src_stride, s.dst_stride) > s.cols)
        windows.push_back(i);
      else
        add_rows(i, 0, s.rows, -1);
    }
    add_windows(windows);
  }

  // Makes tiles of one contiguous run of bytes.
  explicit Work(int64_t bytes) : slices_(nullptr), bytes_(bytes) {
    for (int64_t at = 0; at < bytes; at += kTileBytes) add({0, 0, at, 1, std::min(kTileBytes, bytes - at)}, kTileBytes);
  }

  int64_t bytes() const { return bytes_; }  // stored

  // Calls run_tile(tile) for every tile, from up to `threads` threads including the caller.
  template <class Function>
  void run(int threads, Function&& run_tile) const {
    const int64_t num_chunks = (int64_t)chunks_.size();
    std::atomic<int64_t> next{0};
    auto worker = [&] {
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < num_chunks;) {
        const int64_t end = i + 1 < num_chunks ? chunks_[i + 1] : (int64_t)tiles_.size();
        for (int64_t tile = chunks_[i]; tile < end; ++tile) run_tile(tiles_[tile]);
      }
#if defined(__x86_64__)
      __builtin_ia32_sfence();  // makes stores bypassing the caches visible before the call returns
#endif
    };
    std::vector<std::thread> others;
    try {
      const int64_t wanted = std::min<int64_t>(threads, num_chunks / kMinThreadChunks);
      while ((int64_t)others.size() + 1 < wanted) others.emplace_back(worker);
    } catch (const std::system_error&) {
      // The system gives no more threads, so the running ones do all the work.
    }
    worker();
    for (std::thread& other : others) other.join();
  }

 private:
  // The place of a slice on the side with gaps between its rows: (source?, base, type, stride, rows, offset).
  using Place = std::tuple<bool, int32_t, uint8_t, int64_t, int64_t, int64_t>;

  Place place(int64_t i) const {
    const rs_slice& s = slices_[i];
    if (s.src_stride > s.cols) return {true, s.src_base, s.src_type, s.src_stride, s.rows, s.src_offset};
    return {false, s.dst_base, s.dst_type, s.dst_stride, s.rows, s.dst_offset};
  }

  // Windows of the same matrix are copied in bands of a few rows, because neighbouring windows share cache lines and
  // the processor's own prefetches. If windows cover the matrix, the next band is fetched meanwhile, in one run,
  // because processors do not predict jumps from row to row.
  void add_windows(std::vector<int64_t>& windows) {
    std::sort(windows.begin(), windows.end(), [&](int64_t a, int64_t b) { return place(a) < place(b); });
    for (size_t first = 0, last; first < windows.size(); first = last) {
      const auto [is_source, base, type, stride, rows, offset] = place(windows[first]);
      for (last = first + 1; last < windows.size(); ++last)
        if (place(windows[last]) >= Place{is_source, base, type, stride, rows, offset + stride}) break;
      const int64_t fitting = std::max(kMinBandRows, kBandBytes / (stride * item_bytes(type)));
      const int64_t band = last - first > 1 ? fitting : rows;
      int64_t covered = 0;
      for (size_t i = first; i < last; ++i) covered += slices_[windows[i]].cols;
      const bool covers = is_source && 4 * covered >= 3 * stride;
      for (int64_t row = 0; row < rows; row += band)
        for (size_t i = first; i < last; ++i) {
          const int64_t before = slices_[windows[i]].src_offset - offset;  // fetched by earlier windows
          const int64_t ahead = covers && row + band < rows ? offset + (row + band) * stride + before * band : -1;
          add_rows(windows[i], row, std::min(rows, row + band), ahead);
        }
    }
  }

  // Adds tiles of rows [row, end) of slice i. `ahead` is for the first of them. Tiles of a quantising slice do not
  // cross the edge between rows of blocks.
  void add_rows(int64_t i, int64_t row, int64_t end, int64_t ahead) {
    const rs_slice& s = slices_[i];
    const bool blocks = quantises(s);
    int64_t cols = s.cols;
    if (!blocks && s.src_stride == cols && s.dst_stride == cols) cols *= s.rows, end = 1;
    const int64_t item = item_bytes(s.src_type);
    const int64_t tile_cols = std::min(cols, blocks ? kTileQuantisedCols : kTileBytes / item);
    const int64_t tile_rows = std::max<int64_t>(1, kTileBytes / (tile_cols * item));
    for (int64_t rows; row < end; row += rows) {
      rows = std::min(tile_rows, end - row);
      if (blocks) rows = std::min<int64_t>(rows, RS_BLOCK - (s.row_phase + row) % RS_BLOCK);
      for (int64_t col = 0; col < cols; col += tile_cols) {
        const int64_t width = std::min(tile_cols, cols - col);
        add({i, row, col, rows, width, ahead < 0 ? -1 : ahead + col}, rows * width * item);
      }
      if (ahead >= 0) ahead += rows * cols;
    }
  }

  void add(const Tile& tile, int64_t source_bytes) {
    if (chunk_bytes_ == 0) chunks_.push_back((int64_t)tiles_.size());
    tiles_.push_back(tile);
    chunk_bytes_ += source_bytes + kTileOverheadBytes;
    if (chunk_bytes_ >= kTileBytes) chunk_bytes_ = 0;
  }

  const rs_slice* slices_;
  std::vector<Tile> tiles_;
  std::vector<int64_t> chunks_;  // the first tile of each chunk
  int64_t chunk_bytes_ = 0;      // of the last chunk, 0 if it is full
  int64_t bytes_ = 0;
};
