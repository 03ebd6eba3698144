// A stand-in for NVIDIA's libcuda.so.1 on machines without a GPU: rltrain's calls to share memory between processes,
// with the types and the rules of cuda.h (12 and 13). "Device" memory is an unnamed file. Its addresses are invalid on
// the host, so a mix-up of the two fails.
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef int CUresult;
typedef unsigned long long CUdeviceptr;
typedef struct {
  char reserved[64];
} CUipcMemHandle;

enum {
  CUDA_SUCCESS = 0,
  CUDA_ERROR_INVALID_VALUE = 1,
  CUDA_ERROR_OUT_OF_MEMORY = 2,
  CUDA_ERROR_INVALID_CONTEXT = 201,
  CUDA_ERROR_MAP_FAILED = 205,
  LAZY_ENABLE_PEER_ACCESS = 1,
  MAX_RANGES = 32,
};
static const uint64_t kDevice = 0xdeb1ce0000000000ull;  // no address of a process on x86-64 or aarch64
static const uint64_t kMagic = 0x726c747261696e21ull;
static const size_t kMostBytes = (size_t)1 << 34;

typedef struct {
  uint64_t magic;
  int64_t process, file;
  uint64_t bytes;
} Exported;

typedef struct {
  CUdeviceptr device;
  void* host;
  size_t bytes;
  int file, is_own;
} Range;

static Range ranges[MAX_RANGES];
static _Thread_local int has_context;

static int is_host(const void* pointer) { return pointer && ((uint64_t)pointer >> 40) != (kDevice >> 40); }

static CUresult add(int file, size_t bytes, int is_own, CUdeviceptr* device) {
  for (int i = 0; i < MAX_RANGES; ++i) {
    if (ranges[i].device) continue;
    void* host = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (host == MAP_FAILED) return CUDA_ERROR_MAP_FAILED;
    ranges[i] = (Range){kDevice + ((uint64_t)(i + 1) << 34), host, bytes, file, is_own};
    *device = ranges[i].device;
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_OUT_OF_MEMORY;
}

static Range* find(CUdeviceptr device) {
  for (int i = 0; i < MAX_RANGES; ++i) {
    if (device && ranges[i].device == device) return &ranges[i];
  }
  return 0;
}

static void drop(Range* range) {
  munmap(range->host, range->bytes);
  if (range->is_own) close(range->file);
  memset(range, 0, sizeof *range);
}

CUresult cuMemAlloc_v2(CUdeviceptr* device, size_t bytes) {
  if (!has_context) return CUDA_ERROR_INVALID_CONTEXT;
  if (!is_host(device) || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  if (bytes > kMostBytes) return CUDA_ERROR_OUT_OF_MEMORY;
  int file = memfd_create("device", 0);
  if (file < 0 || ftruncate(file, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  return add(file, bytes, 1, device);
}

CUresult cuMemFree_v2(CUdeviceptr device) {
  if (!has_context) return CUDA_ERROR_INVALID_CONTEXT;
  Range* range = find(device);
  if (!range || !range->is_own) return CUDA_ERROR_INVALID_VALUE;
  drop(range);
  return CUDA_SUCCESS;
}

CUresult cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr device) {
  if (!has_context) return CUDA_ERROR_INVALID_CONTEXT;
  Range* range = find(device);
  if (!is_host(handle) || !range || !range->is_own) return CUDA_ERROR_INVALID_VALUE;
  memset(handle, 0, sizeof *handle);
  *(Exported*)handle = (Exported){kMagic, getpid(), range->file, range->bytes};
  return CUDA_SUCCESS;
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr* device, CUipcMemHandle handle, unsigned int flags) {
  if (!has_context) return CUDA_ERROR_INVALID_CONTEXT;
  Exported exported;
  memcpy(&exported, &handle, sizeof exported);
  if (!is_host(device) || flags != LAZY_ENABLE_PEER_ACCESS || exported.magic != kMagic) return CUDA_ERROR_INVALID_VALUE;
  if (exported.process == getpid()) return CUDA_ERROR_INVALID_CONTEXT;  // not in the process that exported it
  char path[64];
  snprintf(path, sizeof path, "/proc/%lld/fd/%lld", (long long)exported.process, (long long)exported.file);
  int file = open(path, O_RDWR | O_CLOEXEC);
  if (file < 0) return CUDA_ERROR_MAP_FAILED;
  CUresult status = add(file, exported.bytes, 0, device);
  close(file);
  return status;
}

// Replacements for the rest of CUDA: they make the device's context current in the calling thread, and access memory.
void stand_in_make_current(void) { has_context = 1; }

void* stand_in_host_address(CUdeviceptr device) {
  Range* range = find(device);
  return range ? range->host : 0;
}
