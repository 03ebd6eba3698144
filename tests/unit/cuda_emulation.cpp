// Runs the threads of the CUDA kernels one after another on the host. It has the interface of reshard_cuda.cu.
#include <stdint.h>

static int64_t num_misaligned = 0;

static void check_alignment(const void* address, uint64_t bytes) {
  if (reinterpret_cast<uintptr_t>(address) % bytes) ++num_misaligned;
}

#include "reshard_cuda_delta.h"
#include "reshard_cuda_tiles.h"

template <typename Work>
static int run(const void* tiles, const void* slices, const void* bases, int64_t first, int64_t last, int num_blocks) {
  const rs::Table table = {static_cast<const rs_tile*>(tiles), static_cast<const rs_slice*>(slices),
                           static_cast<void* const*>(bases)};
  num_misaligned = 0;
  for (int block = 0; block < num_blocks; ++block) {
    for (int thread = 0; thread < rs::kThreads; ++thread) {
      rs::for_tiles(table, first, last, block, num_blocks, thread, Work());
    }
  }
  return num_misaligned != 0;
}

template <typename Work>
static int launch_blocks(const Work& work, int64_t elements, int num_blocks, int, void*) {
  for (int block = 0; block < num_blocks; ++block)
    for (int thread = 0; thread < rs::kThreads; ++thread) rs::for_blocks(work, elements, block, num_blocks, thread);
  return 0;
}

extern "C" {

int rs_cuda_num_blocks(int) { return 3; }

const char* rs_cuda_error_string(int) { return "an address was not a multiple of the bytes accessed there"; }

int rs_cuda_copy(const void* tiles, const void* slices, const void* bases, int64_t first, int64_t last, int num_blocks,
                 int, void*) {
  return run<rs::Copy>(tiles, slices, bases, first, last, num_blocks);
}

int rs_cuda_amax(const void* tiles, const void* slices, const void* bases, int64_t first, int64_t last, int num_blocks,
                 int, void*) {
  return run<rs::Amax>(tiles, slices, bases, first, last, num_blocks);
}

int rs_cuda_checksum(const void* tiles, const void* slices, const void* bases, int64_t first, int64_t last,
                     int num_blocks, int, void*) {
  return run<rs::Checksum>(tiles, slices, bases, first, last, num_blocks);
}

#include "reshard_cuda_delta_entries.h"

// Narrows the bits of float32 numbers [count] to bfloat16, float16 and e4m3.
void rs_cuda_narrow(const uint32_t* bits, int64_t count, uint16_t* bfloat16, uint16_t* float16, uint8_t* float8) {
  for (int64_t i = 0; i < count; ++i) {
    rs::Bfloat16 b;
    rs::Float16 h;
    rs::Float8 q;
    rs::narrow(bits[i], b);
    rs::narrow(bits[i], h);
    rs::narrow(bits[i], q);
    bfloat16[i] = b.bits, float16[i] = h.bits, float8[i] = q.bits;
  }
}

}  // extern "C"
