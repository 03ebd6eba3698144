// A stand-in for NVIDIA's libcuda.so.1 on machines without a GPU: rltrain's calls to share memory between processes, and
// to keep addresses, with the types and the rules of cuda.h (12 and 13). "Device" memory is an unnamed file. Its
// addresses are invalid on the host, so a mix-up of the two fails.
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

// Virtual memory: reserved addresses, physical memory in unnamed files, and mappings between them. Reserved ranges are
// addresses of this process, without access until they are mapped and access is set.
typedef struct {
  int type, id;
} CUmemLocation;
typedef struct {
  int type, requestedHandleTypes;
  CUmemLocation location;
  void* win32HandleMetaData;
  unsigned char flags[8];
} CUmemAllocationProp;
typedef struct {
  CUmemLocation location;
  int flags;
} CUmemAccessDesc;

enum { PINNED = 1, ON_DEVICE = 1, READ_WRITE = 3, GRANULARITY = 1 << 21 };
typedef struct {
  char* begin;
  size_t bytes;
  uint64_t handle;
} Reserved;
static Reserved reserved[MAX_RANGES];
static size_t physical_bytes[MAX_RANGES], physical_limit = (size_t)1 << 34;
static int physical_file[MAX_RANGES];

static int is_usual(const CUmemAllocationProp* wanted) {
  return is_host(wanted) && wanted->type == PINNED && wanted->location.type == ON_DEVICE && wanted->location.id == 0 &&
         !wanted->requestedHandleTypes && !wanted->win32HandleMetaData;
}

static Reserved* reserved_at(CUdeviceptr address, size_t bytes) {
  for (int i = 0; i < MAX_RANGES; ++i) {
    if (address && (CUdeviceptr)reserved[i].begin == address && reserved[i].bytes == bytes) return &reserved[i];
  }
  return 0;
}

static size_t physical_total(void) {
  size_t total = 0;
  for (int i = 0; i < MAX_RANGES; ++i) total += physical_bytes[i];
  return total;
}

CUresult cuMemGetAllocationGranularity(size_t* granule, const CUmemAllocationProp* wanted, int option) {
  if (!is_host(granule) || !is_usual(wanted) || option != 0) return CUDA_ERROR_INVALID_VALUE;
  *granule = GRANULARITY;
  return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr* address, size_t bytes, size_t alignment, CUdeviceptr at,
                             unsigned long long flags) {
  if (!has_context) return CUDA_ERROR_INVALID_CONTEXT;
  if (!is_host(address) || !bytes || bytes % GRANULARITY || alignment || at || flags) return CUDA_ERROR_INVALID_VALUE;
  for (int i = 0; i < MAX_RANGES; ++i) {
    if (reserved[i].begin) continue;
    char* begin = mmap(0, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (begin == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    reserved[i] = (Reserved){begin, bytes, 0};
    *address = (CUdeviceptr)begin;
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
  Reserved* range = reserved_at(address, bytes);
  if (!range || range->handle) return CUDA_ERROR_INVALID_VALUE;
  munmap(range->begin, bytes);
  memset(range, 0, sizeof *range);
  return CUDA_SUCCESS;
}

CUresult cuMemCreate(uint64_t* handle, size_t bytes, const CUmemAllocationProp* wanted, unsigned long long flags) {
  if (!has_context) return CUDA_ERROR_INVALID_CONTEXT;
  if (!is_host(handle) || !is_usual(wanted) || !bytes || bytes % GRANULARITY || flags) return CUDA_ERROR_INVALID_VALUE;
  if (physical_total() + bytes > physical_limit) return CUDA_ERROR_OUT_OF_MEMORY;
  for (int i = 0; i < MAX_RANGES; ++i) {
    if (physical_bytes[i]) continue;
    int file = memfd_create("physical", 0);
    if (file < 0 || ftruncate(file, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    physical_bytes[i] = bytes, physical_file[i] = file;
    *handle = i + 1;
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemRelease(uint64_t handle) {
  if (handle < 1 || handle > MAX_RANGES || !physical_bytes[handle - 1]) return CUDA_ERROR_INVALID_VALUE;
  for (int i = 0; i < MAX_RANGES; ++i) {
    if (reserved[i].handle == handle) return CUDA_ERROR_INVALID_VALUE;  // stricter: rltrain unmaps first
  }
  close(physical_file[handle - 1]);
  physical_bytes[handle - 1] = 0;
  return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, uint64_t handle, unsigned long long flags) {
  Reserved* range = reserved_at(address, bytes);
  if (!range || range->handle || offset || flags || handle < 1 || handle > MAX_RANGES) return CUDA_ERROR_INVALID_VALUE;
  if (physical_bytes[handle - 1] != bytes) return CUDA_ERROR_INVALID_VALUE;
  int file = physical_file[handle - 1];
  if (mmap(range->begin, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED) return CUDA_ERROR_MAP_FAILED;
  range->handle = handle;
  return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc* access, size_t count) {
  Reserved* range = reserved_at(address, bytes);
  if (!range || !range->handle || !is_host(access) || count != 1) return CUDA_ERROR_INVALID_VALUE;
  if (access->location.type != ON_DEVICE || access->location.id || access->flags != READ_WRITE) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return mprotect(range->begin, bytes, PROT_READ | PROT_WRITE) ? CUDA_ERROR_MAP_FAILED : CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
  Reserved* range = reserved_at(address, bytes);
  if (!range || !range->handle) return CUDA_ERROR_INVALID_VALUE;
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  if (mmap(range->begin, bytes, PROT_NONE, flags, -1, 0) == MAP_FAILED) return CUDA_ERROR_MAP_FAILED;
  range->handle = 0;
  return CUDA_SUCCESS;
}

// Replacements for the rest of CUDA: they make the device's context current in the calling thread, and access memory.
void stand_in_make_current(void) { has_context = 1; }

void* stand_in_host_address(CUdeviceptr device) {
  Range* range = find(device);
  for (int i = 0; i < MAX_RANGES && !range; ++i) {
    if (device && (CUdeviceptr)reserved[i].begin == device) return reserved[i].begin;
  }
  return range ? range->host : 0;
}

// The physical memory in use, and its limit.
size_t stand_in_physical_bytes(void) { return physical_total(); }
void stand_in_limit_physical(size_t bytes) { physical_limit = bytes; }
