// As many numbers at a time as a register of the processor holds, as float32, whatever they are stored as.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Float8_e4m3fn.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace xinfer {

#if defined(__AVX512BW__) && defined(__AVX512VL__)
#define XINFER_AVX512
constexpr int64_t kLanes = 16, kRegisters = 32;
#elif defined(__AVX2__) && defined(__F16C__)
#define XINFER_AVX2
constexpr int64_t kLanes = 8, kRegisters = 16;
#elif defined(__aarch64__)
constexpr int64_t kLanes = 4, kRegisters = 32;
#else
constexpr int64_t kLanes = 4, kRegisters = 16;
#endif

typedef float Lanes __attribute__((vector_size(4 * kLanes)));
typedef int32_t Whole __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Bits __attribute__((vector_size(4 * kLanes)));

inline Lanes all(float value) {
  return value - Lanes{};
}

inline Lanes load(const float* from) {
  Lanes lanes;
  std::memcpy(&lanes, from, sizeof lanes);
  return lanes;
}

#if defined(XINFER_AVX512)

inline Lanes load(const c10::BFloat16* from) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return reinterpret_cast<Lanes>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

inline Lanes load(const c10::Half* from) {
  return reinterpret_cast<Lanes>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
}

inline Lanes load(const uint8_t* from) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return reinterpret_cast<Lanes>(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)));
}

inline Lanes load(const int8_t* from) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return reinterpret_cast<Lanes>(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)));
}

// Exponent and mantissa are those of a half whose exponent is less by 8; NaN is not told from 480.
inline Lanes load(const c10::Float8_e4m3fn* from) {
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  const __m256i sign = _mm256_and_si256(wide, _mm256_set1_epi16(static_cast<int16_t>(0x8000)));
  const __m256i rest = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x7f)), 7);
  return reinterpret_cast<Lanes>(_mm512_cvtph_ps(_mm256_or_si256(sign, rest))) * 256.0f;
}

// The low and the high nibbles of kLanes bytes; looked up, which takes them as they are and makes them float32 at once.
inline void load_nibbles(const uint8_t* from, Lanes& low, Lanes& high) {
  const __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  low = reinterpret_cast<Lanes>(_mm512_permutexvar_ps(bytes, numbers));
  high = reinterpret_cast<Lanes>(_mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), numbers));
}

inline __mmask16 mask_of(int64_t count) {
  return 0xffff >> std::clamp<int64_t>(kLanes - count, 0, kLanes);
}

// The first `count` of kLanes numbers, and zeros; for other types below.
inline Lanes load(const float* from, int64_t count) {
  return reinterpret_cast<Lanes>(_mm512_maskz_loadu_ps(mask_of(count), from));
}

inline Lanes load(const uint8_t* from, int64_t count) {
  const __m128i bytes = _mm_maskz_loadu_epi8(mask_of(count), from);
  return reinterpret_cast<Lanes>(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)));
}

#elif defined(XINFER_AVX2)

inline Lanes load(const c10::BFloat16* from) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return reinterpret_cast<Lanes>(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

inline Lanes load(const c10::Half* from) {
  return reinterpret_cast<Lanes>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}

inline Lanes load(const uint8_t* from) {
  return reinterpret_cast<Lanes>(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadu_si64(from))));
}

inline Lanes load(const int8_t* from) {
  return reinterpret_cast<Lanes>(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadu_si64(from))));
}

inline Lanes load(const c10::Float8_e4m3fn* from) {
  const __m128i wide = _mm_cvtepi8_epi16(_mm_loadu_si64(from));
  const __m128i sign = _mm_and_si128(wide, _mm_set1_epi16(static_cast<int16_t>(0x8000)));
  const __m128i rest = _mm_slli_epi16(_mm_and_si128(wide, _mm_set1_epi16(0x7f)), 7);
  return reinterpret_cast<Lanes>(_mm256_cvtph_ps(_mm_or_si128(sign, rest))) * 256.0f;
}

inline void load_nibbles(const uint8_t* from, Lanes& low, Lanes& high) {
  const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadu_si64(from));
  low = reinterpret_cast<Lanes>(_mm256_cvtepi32_ps(_mm256_and_si256(bytes, _mm256_set1_epi32(15))));
  high = reinterpret_cast<Lanes>(_mm256_cvtepi32_ps(_mm256_srli_epi32(bytes, 4)));
}

#else  // loops that compilers vectorize

inline Lanes load(const int32_t* from) {
  Whole whole;
  std::memcpy(&whole, from, sizeof whole);
  return __builtin_convertvector(whole, Lanes);
}

template <class T>
inline Lanes load(const T* from) {
  std::conditional_t<std::is_integral_v<T>, int32_t, float> each[kLanes];
  for (int64_t i = 0; i < kLanes; i++) each[i] = from[i];
  return load(each);
}

inline void load_nibbles(const uint8_t* from, Lanes& low, Lanes& high) {
  int32_t each[2][kLanes];
  for (int64_t i = 0; i < kLanes; i++) each[0][i] = from[i] & 15, each[1][i] = from[i] >> 4;
  low = load(each[0]);
  high = load(each[1]);
}

#endif

// The first `count` of kLanes numbers, and zeros.
template <class T>
inline Lanes load(const T* from, int64_t count) {
  if (count >= kLanes) return load(from);
  Lanes lanes = {};
  for (int64_t i = 0; i < count; i++) lanes[i] = static_cast<float>(from[i]);
  return lanes;
}

inline void store(Lanes lanes, float* to) {
  std::memcpy(to, &lanes, sizeof lanes);
}

template <class T>
inline void store(Lanes lanes, T* to) {
#if defined(__AVX512BF16__)
  if constexpr (std::is_same_v<T, c10::BFloat16>) {
    const __m256bh rounded = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(lanes));
    std::memcpy(to, &rounded, sizeof rounded);
    return;
  }
#endif
  for (int64_t i = 0; i < kLanes; i++) to[i] = static_cast<T>(lanes[i]);
}

// Whether numbers are multiplied in pairs of bfloat16, whose products the processor adds up by itself.
template <class T>
constexpr bool kPaired = false;

#if defined(__AVX512BF16__)

template <>
inline constexpr bool kPaired<c10::BFloat16> = true;

constexpr int64_t kPairs = 2 * kLanes;  // numbers in kLanes pairs

inline __m512bh load_pairs(const void* from) {
  return (__m512bh)_mm512_loadu_si512(from);
}

// The first `count` of kPairs numbers, and zeros.
inline __m512bh load_pairs(const c10::BFloat16* from, int64_t count) {
  return (__m512bh)_mm512_maskz_loadu_epi16(~__mmask32{0} >> std::max<int64_t>(0, kPairs - count), from);
}

inline __m512bh all_pairs(uint32_t pair) {
  return (__m512bh)_mm512_set1_epi32(static_cast<int>(pair));
}

inline Lanes add_products(Lanes sums, __m512bh one, __m512bh other) {
  return (Lanes)_mm512_dpbf16_ps((__m512)sums, one, other);
}

#endif

// Stores the first `count` of kLanes numbers.
template <class T>
inline void store(Lanes lanes, T* to, int64_t count) {
  if (count >= kLanes) return store(lanes, to);
  for (int64_t i = 0; i < count; i++) to[i] = static_cast<T>(lanes[i]);
}

}  // namespace xinfer
