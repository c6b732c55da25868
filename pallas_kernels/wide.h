// Vectors as wide as the processor's, for the products of a CPU: 16 floats where it has AVX-512, else 8.

#ifndef PALLAS_KERNELS_WIDE_H_
#define PALLAS_KERNELS_WIDE_H_

#include "native.h"

namespace {

#if defined(__AVX512F__)
constexpr int kWide = 16;
typedef float Wide __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t WideInt __attribute__((vector_size(64)));
inline Wide MultiplyAdd(Wide a, Wide b, Wide sum) { return (Wide)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum); }
inline WideInt Widen(const int8_t* from) { return (WideInt)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)); }
inline WideInt Widen(const uint8_t* from) { return (WideInt)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from)); }
inline WideInt Widen(const uint16_t* from) { return (WideInt)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)); }
#else
constexpr int kWide = kLanes;
typedef Lanes Wide;
typedef IntLanes WideInt;
template <typename Number>
inline WideInt Widen(const Number* from) {
  WideInt whole;
  for (int i = 0; i < kWide; ++i) whole[i] = from[i];
  return whole;
}
#endif

inline float SumOf(Wide x) {
  Lanes parts[kWide / kLanes];
  std::memcpy(parts, &x, sizeof(x));
  return Sum(kWide == kLanes ? parts[0] : parts[0] + parts[kWide / kLanes - 1]);
}

inline Wide FromBits(WideInt bits) {
  Wide floats;
  std::memcpy(&floats, &bits, sizeof(floats));
  return floats;
}

}  // namespace

#endif  // PALLAS_KERNELS_WIDE_H_
