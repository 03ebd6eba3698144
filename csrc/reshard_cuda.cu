// CUDA kernels of reshard.h. One launch processes a range of a table's slices.
//
// The host cuts slices into tiles of at most 16 KiB (reshard/copy_table.py), once per table. Warps of a persistent
// grid take tiles independently of each other, without barriers or shared memory. While one warp waits for a descriptor
// or its loads, the others of its multiprocessor have theirs under way. 16 warps of 32 lanes with 8 vectors of 16 bytes
// each are 64 KiB per multiprocessor. This is more than the latency of the memory times its bandwidth.
//
// NOTES: a launch must not write its own inputs (descriptors, base pointers, sources; a copy also amax entries),
// because its tiles have no order. Launches on one stream are ordered.
#include <cuda_runtime.h>

#include "reshard_cuda_delta.h"
#include "reshard_cuda_tiles.h"

namespace {

constexpr int kBlocksPerMultiprocessor = 2;

template <typename Work>
__global__ void __launch_bounds__(rs::kThreads, kBlocksPerMultiprocessor)
rs_kernel(const rs_tile* __restrict__ tiles, const rs_slice* __restrict__ slices, void* const* __restrict__ bases,
          int64_t first, int64_t last) {
  rs::for_tiles({tiles, slices, bases}, first, last, blockIdx.x, gridDim.x, threadIdx.x, Work());
}

template <typename Work>
int launch(const void* tiles, const void* slices, const void* bases, int64_t first, int64_t last, int num_blocks,
           int device, void* stream) {
  if (first >= last) return cudaSuccess;
  const cudaError_t error = cudaSetDevice(device);
  if (error != cudaSuccess) return error;
  const int grid = last - first < num_blocks ? static_cast<int>(last - first) : num_blocks;
  rs_kernel<Work><<<grid, rs::kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<const rs_tile*>(tiles), static_cast<const rs_slice*>(slices), static_cast<void* const*>(bases), first,
      last);
  return cudaGetLastError();
}

template <typename Work>
__global__ void __launch_bounds__(rs::kThreads, kBlocksPerMultiprocessor) rs_blocks_kernel(Work work, int64_t elements) {
  rs::for_blocks(work, elements, blockIdx.x, gridDim.x, threadIdx.x);
}

template <typename Work>
int launch_blocks(const Work& work, int64_t elements, int num_blocks, int device, void* stream) {
  if (elements <= 0) return cudaSuccess;
  const cudaError_t error = cudaSetDevice(device);
  if (error != cudaSuccess) return error;
  rs_blocks_kernel<<<num_blocks, rs::kThreads, 0, static_cast<cudaStream_t>(stream)>>>(work, elements);
  return cudaGetLastError();
}

}  // namespace

extern "C" {

int rs_cuda_abi_version(void) { return RS_ABI_VERSION; }
int rs_cuda_sizeof_slice(void) { return sizeof(rs_slice); }
int rs_cuda_sizeof_tile(void) { return sizeof(rs_tile); }

// Returns the number of usable devices, 0 without a driver.
int rs_cuda_device_count(void) {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

const char* rs_cuda_error_string(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

// Returns the number of blocks to fill a device, or minus an error of the runtime.
int rs_cuda_num_blocks(int device) {
  int multiprocessors = 0;
  const cudaError_t error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  return error == cudaSuccess ? multiprocessors * kBlocksPerMultiprocessor : -static_cast<int>(error);
}

// Copies the slices of tiles[first:last], or raises their amax entries, on `stream` and with at most `num_blocks`
// blocks. Tiles, slices and base pointers are in the memory of `device`. It becomes the thread's current device.
// Returns an error of the runtime, 0 for none.
int rs_cuda_copy(const void* tiles, const void* slices, const void* bases, int64_t first, int64_t last, int num_blocks,
                 int device, void* stream) {
  return launch<rs::Copy>(tiles, slices, bases, first, last, num_blocks, device, stream);
}

int rs_cuda_amax(const void* tiles, const void* slices, const void* bases, int64_t first, int64_t last, int num_blocks,
                 int device, void* stream) {
  return launch<rs::Amax>(tiles, slices, bases, first, last, num_blocks, device, stream);
}

// Adds the checksums of the slices of tiles[first:last] to their sums. Otherwise like rs_cuda_copy.
int rs_cuda_checksum(const void* tiles, const void* slices, const void* bases, int64_t first, int64_t last,
                     int num_blocks, int device, void* stream) {
  return launch<rs::Checksum>(tiles, slices, bases, first, last, num_blocks, device, stream);
}

#include "reshard_cuda_delta_entries.h"

}  // extern "C"
