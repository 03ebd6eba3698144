// The encoding of changes in packed bytes since they were last sent. Shared by the CPU and the CUDA library.
//
// A section is a run of elements of 1, 2 or 4 bytes, compared as bits. It is cut into blocks of RS_DELTA_BLOCK
// elements. The last block may be shorter. Three arrays encode the changes:
//   lengths [blocks]  number of changed elements in each block, or RS_DELTA_WHOLE if the block is sent whole
//   places            positions of the changed elements within their blocks, in order; whole blocks have none
//   values            of the changed elements, and of all elements of whole blocks, in order
// A block is sent whole if this takes no more bytes. So no section takes more than its bytes and its lengths.
#pragma once

#include "reshard.h"

enum { RS_DELTA_BLOCK = 256, RS_DELTA_WHOLE = 255 };
enum { RS_DELTA_WRONG = 2 };  // the received changes do not fit their destination

RS_INLINE int64_t rs_delta_blocks(int64_t elements) { return (elements + RS_DELTA_BLOCK - 1) / RS_DELTA_BLOCK; }

RS_INLINE uint8_t rs_delta_length(int64_t count, int64_t size, int64_t item) {
  return count > 0 && count * (item + 1) >= size * item ? (uint8_t)RS_DELTA_WHOLE : (uint8_t)count;
}

RS_INLINE int64_t rs_delta_places(uint8_t length) { return length == RS_DELTA_WHOLE ? 0 : length; }

RS_INLINE int64_t rs_delta_values(uint8_t length, int64_t size) { return length == RS_DELTA_WHOLE ? size : length; }
