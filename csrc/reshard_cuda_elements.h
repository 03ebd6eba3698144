// Elements of the CUDA kernels: their bits and their conversions.
//
// All arithmetic is on integers, or on floats with exact or once rounded results. So every processor gives the same
// bits. This is also plain C++, for the reason in reshard_cuda_tiles.h.
#pragma once

#include <string.h>

#include "reshard.h"

#ifdef __CUDACC__
#define RS_DEVICE __device__ __forceinline__
#else
#define RS_DEVICE inline
#endif

namespace rs {

RS_DEVICE uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

RS_DEVICE float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

// Never contracted into a fused operation.
RS_DEVICE float multiply(float a, float b) {
#ifdef __CUDACC__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

RS_DEVICE float divide(float a, float b) {
#ifdef __CUDACC__
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

constexpr uint32_t kMagnitude = 0x7fffffff;  // all bits of a float32 except the sign
constexpr uint32_t kInfinity = 0x7f800000;

// Elements are held as their bits. Each has a separate type, because two formats have 16 bits.
struct Float32 {
  uint32_t bits;
};
struct Bfloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
struct Float8 {
  uint8_t bits;
};

// Returns the bits of the float32 with the same value.
RS_DEVICE uint32_t widened(Float32 x) { return x.bits; }

RS_DEVICE uint32_t widened(Bfloat16 x) { return static_cast<uint32_t>(x.bits) << 16; }

RS_DEVICE uint32_t widened(Float16 x) {
  const uint32_t magnitude = x.bits & 0x7fff, sign = static_cast<uint32_t>(x.bits & 0x8000) << 16;
  if (magnitude > 0x7c00) return RS_NAN_FLOAT32;
  if (magnitude == 0x7c00) return sign | kInfinity;
  // Read as a float32, the shifted bits are too small by a factor of 2^112. So are subnormals.
  return sign | bits_of(multiply(float_of(magnitude << 13), 0x1p112f));
}

// Returns a float32 magnitude without its lowest `kDropped` bits, rounded to nearest even. The carry may reach the
// exponent.
template <int kDropped>
RS_DEVICE uint32_t rounded(uint32_t magnitude) {
  return (magnitude + ((1u << (kDropped - 1)) - 1) + ((magnitude >> kDropped) & 1)) >> kDropped;
}

// Returns magnitude / unit, rounded to nearest even by the addition. From unit * 2^23 on, floats are `unit` apart.
RS_DEVICE uint32_t rounded_to_unit(uint32_t magnitude, float unit) {
  const float large = unit * 0x1p23f;
  return bits_of(float_of(magnitude) + large) - bits_of(large);
}

RS_DEVICE void narrow(uint32_t bits, Float32& x) { x.bits = bits; }

RS_DEVICE void narrow(uint32_t bits, Bfloat16& x) {
  const uint32_t magnitude = bits & kMagnitude, sign = (bits >> 16) & 0x8000;
  x.bits = static_cast<uint16_t>(magnitude > kInfinity ? uint32_t{RS_NAN_16} : sign | rounded<16>(magnitude));
}

RS_DEVICE void narrow(uint32_t bits, Float16& x) {
  constexpr uint32_t kTooLarge = 0x47800000, kSmallestNormal = 0x38800000;  // 2^16, 2^-14
  const uint32_t magnitude = bits & kMagnitude, sign = (bits >> 16) & 0x8000;
  uint32_t result;
  if (magnitude < kSmallestNormal) {
    result = rounded_to_unit(magnitude, 0x1p-24f);
  } else {
    result = magnitude < kTooLarge ? rounded<13>(magnitude) - ((127 - 15) << 10) : 0x7c00;
  }
  x.bits = static_cast<uint16_t>(magnitude > kInfinity ? uint32_t{RS_NAN_16} : sign | result);
}

RS_DEVICE void narrow(uint32_t bits, Float8& x) {
  constexpr uint32_t kLargest = 0x43e00000, kSmallestNormal = 0x3c800000;  // 448, 2^-6
  const uint32_t magnitude = bits & kMagnitude, sign = (bits >> 24) & 0x80;
  uint32_t result;
  if (magnitude < kSmallestNormal) {
    result = rounded_to_unit(magnitude, 0x1p-9f);
  } else {
    result = rounded<20>(magnitude < kLargest ? magnitude : kLargest) - ((127 - 7) << 3);
  }
  x.bits = static_cast<uint8_t>(magnitude > kInfinity ? uint32_t{RS_NAN_FLOAT8} : sign | result);
}

}  // namespace rs
