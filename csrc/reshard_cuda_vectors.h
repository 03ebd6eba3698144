// Vectors of elements of the CUDA kernels, with their loads, stores and conversions.
#pragma once

#include "reshard_cuda_elements.h"

namespace rs {

constexpr int kVectorBytes = 16;
constexpr int kUnroll = 8;  // vectors loaded by a lane before it stores the first

template <typename Element, int kWidth>
struct alignas(kWidth * sizeof(Element)) Vector {
  Element items[kWidth];
};

// A loaded vector, in registers of 32 bits until its conversion takes it apart.
// NOTES: arrays of them are cleared before loads, because not every lane makes all loads. Values undefined on one path
// would occupy registers through the whole kernel.
template <int kBytes>
struct Words {
  uint32_t words[(kBytes + 3) / 4];
};

// Not kept in L1, because each element is read once.
// NOTES: an unrolled loop must issue all its loads before its first store, because the store waits for a load.
// `volatile` makes the compiler keep this order. The assembler would still move stores between loads of the read-only
// path (ld.global.nc). It does not move them between ordinary loads, because stores might alias these.
template <int kBytes>
RS_DEVICE void load_words(const uint8_t* address, Words<kBytes>& w) {
#ifdef __CUDACC__
  if constexpr (kBytes == 16) {
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w.words[0]), "=r"(w.words[1]), "=r"(w.words[2]), "=r"(w.words[3])
                 : "l"(address)
                 : "memory");
  } else if constexpr (kBytes == 8) {
    asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                 : "=r"(w.words[0]), "=r"(w.words[1])
                 : "l"(address)
                 : "memory");
  } else if constexpr (kBytes == 4) {
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(w.words[0]) : "l"(address) : "memory");
  } else if constexpr (kBytes == 2) {
    asm volatile("{.reg .u16 h; ld.global.u16 h, [%1]; cvt.u32.u16 %0, h;}"
                 : "=r"(w.words[0])
                 : "l"(address)
                 : "memory");
  } else {
    asm volatile("ld.global.u8 %0, [%1];" : "=r"(w.words[0]) : "l"(address) : "memory");
  }
#else
  check_alignment(address, kBytes);
  memcpy(&w, address, kBytes);
#endif
}

#ifdef __CUDACC__
template <int kBytes> struct Word;
template <> struct Word<16> { typedef uint4 Type; };
template <> struct Word<8> { typedef uint2 Type; };
template <> struct Word<4> { typedef unsigned int Type; };
template <> struct Word<2> { typedef unsigned short Type; };
template <> struct Word<1> { typedef unsigned char Type; };
#endif

// Evicted first, because written data is read by another engine or much later.
template <typename V>
RS_DEVICE void store(uint8_t* address, const V& vector) {
#ifdef __CUDACC__
  typename Word<sizeof(V)>::Type w;
  memcpy(&w, &vector, sizeof(V));
  __stcs(reinterpret_cast<decltype(w)*>(address), w);
#else
  check_alignment(address, sizeof(V));
  memcpy(address, &vector, sizeof(V));
#endif
}

// ---- Conversions of a vector ----

struct Same {
  static constexpr int kUnroll = rs::kUnroll;

  template <typename V>
  RS_DEVICE void operator()(const V& source, V& destination) const {
    destination = source;
  }
};

struct Cast {
  static constexpr int kUnroll = rs::kUnroll;

  template <typename Source, typename Destination, int kWidth>
  RS_DEVICE void operator()(const Vector<Source, kWidth>& source, Vector<Destination, kWidth>& destination) const {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) narrow(widened(source.items[i]), destination.items[i]);
  }
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define RS_FLOAT8_INSTRUCTION
#endif

struct Quantise {
#ifdef RS_FLOAT8_INSTRUCTION
  static constexpr int kUnroll = rs::kUnroll;
#else
  static constexpr int kUnroll = rs::kUnroll / 2;  // the conversion takes the registers of the other half
#endif
  float inverse;  // of the scale; a NaN makes every element a NaN

  template <typename Source, int kWidth>
  RS_DEVICE void operator()(const Vector<Source, kWidth>& source, Vector<Float8, kWidth>& destination) const {
#ifdef RS_FLOAT8_INSTRUCTION
#pragma unroll
    for (int i = 0; i < kWidth; i += 2) {
      const float even = scaled(source.items[i]), odd = i + 1 < kWidth ? scaled(source.items[(i + 1) % kWidth]) : 0.0f;
      uint16_t pair;  // like narrow, two at a time
      asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(odd), "f"(even));
      destination.items[i].bits = static_cast<uint8_t>(pair);
      if (i + 1 < kWidth) destination.items[(i + 1) % kWidth].bits = static_cast<uint8_t>(pair >> 8);
    }
#else
#pragma unroll
    for (int i = 0; i < kWidth; ++i) narrow(bits_of(scaled(source.items[i])), destination.items[i]);
#endif
  }

  template <typename Source>
  RS_DEVICE float scaled(Source x) const {
    return multiply(float_of(widened(x)), inverse);
  }
};

RS_DEVICE float inverse_of_scale(float amax) {
  constexpr float kSmallest = 0x1p-100f;
  if ((bits_of(amax) & kMagnitude) >= kInfinity) return float_of(RS_NAN_AMAX);
  return divide(448.0f, amax < kSmallest ? kSmallest : amax);
}

}  // namespace rs
