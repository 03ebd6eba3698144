// Exported functions for changes, inside extern "C", shared by reshard_cuda.cu and the emulation of its threads. Both
// must define launch_blocks, to give the threads of `num_blocks` blocks their share of the work.
#pragma once

// Process the changes of a section (reshard_cuda_delta.h). All pointers are to memory of `device`. The counts of
// rs_cuda_delta_mark and *wrong of rs_cuda_delta_apply must be zero before. Otherwise like rs_cuda_copy.
int rs_cuda_delta_mark(const void* packed, const void* kept, int64_t elements, int item, void* marks, void* counts,
                       int num_blocks, int device, void* stream) {
  const rs::DeltaMark work = {packed,   kept, elements, item, static_cast<uint8_t*>(marks), static_cast<int32_t*>(counts)};
  return launch_blocks(work, elements, num_blocks, device, stream);
}

int rs_cuda_delta_write(const void* packed, void* kept, int64_t elements, int item, const void* marks,
                        const void* lengths, const void* place_starts, const void* value_starts, void* places,
                        void* values, int num_blocks, int device, void* stream) {
  const rs::DeltaWrite work = {packed,
                               kept,
                               elements,
                               item,
                               static_cast<const uint8_t*>(marks),
                               static_cast<const uint8_t*>(lengths),
                               static_cast<const int64_t*>(place_starts),
                               static_cast<const int64_t*>(value_starts),
                               static_cast<uint8_t*>(places),
                               values};
  return launch_blocks(work, elements, num_blocks, device, stream);
}

int rs_cuda_delta_apply(const void* slices, int64_t num_slices, const void* bases, int64_t begin, int64_t elements,
                        int item, const void* lengths, const void* places, const void* place_starts,
                        const void* value_starts, const void* values, void* wrong, int num_blocks, int device,
                        void* stream) {
  const rs::DeltaApply work = {static_cast<const rs_slice*>(slices),
                               num_slices,
                               static_cast<void* const*>(bases),
                               begin,
                               elements,
                               item,
                               static_cast<const uint8_t*>(lengths),
                               static_cast<const uint8_t*>(places),
                               static_cast<const int64_t*>(place_starts),
                               static_cast<const int64_t*>(value_starts),
                               values,
                               static_cast<int32_t*>(wrong)};
  return launch_blocks(work, elements, num_blocks, device, stream);
}
