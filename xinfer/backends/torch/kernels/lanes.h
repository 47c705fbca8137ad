// Sixteen numbers at a time, as float32, whatever they are stored as.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Float8_e4m3fn.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace xinfer {

constexpr int64_t kLanes = 16;

typedef float Lanes __attribute__((vector_size(64)));
typedef int32_t Whole __attribute__((vector_size(64)));
typedef uint32_t Bits __attribute__((vector_size(64)));

inline Lanes all(float value) {
  return value - Lanes{};
}

inline Lanes load(const float* from) {
  Lanes lanes;
  std::memcpy(&lanes, from, sizeof lanes);
  return lanes;
}

#if defined(__AVX512F__)

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

// The low and the high nibbles of sixteen bytes; looked up, which takes them as they are and makes them float32 at once.
inline void load_nibbles(const uint8_t* from, Lanes& low, Lanes& high) {
  const __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  low = reinterpret_cast<Lanes>(_mm512_permutexvar_ps(bytes, numbers));
  high = reinterpret_cast<Lanes>(_mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), numbers));
}

#else  // loops that compilers vectorize

template <class T>
inline Lanes load(const T* from) {
  Lanes lanes;
  for (int64_t i = 0; i < kLanes; i++) lanes[i] = static_cast<float>(from[i]);
  return lanes;
}

inline void load_nibbles(const uint8_t* from, Lanes& low, Lanes& high) {
  for (int64_t i = 0; i < kLanes; i++) low[i] = static_cast<float>(from[i] & 15);
  for (int64_t i = 0; i < kLanes; i++) high[i] = static_cast<float>(from[i] >> 4);
}

#endif

// The first `count` of sixteen numbers, and zeros.
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

constexpr int64_t kPairs = 2 * kLanes;  // numbers in sixteen pairs

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

// Stores the first `count` of sixteen numbers.
template <class T>
inline void store(Lanes lanes, T* to, int64_t count) {
  if (count >= kLanes) return store(lanes, to);
  for (int64_t i = 0; i < count; i++) to[i] = static_cast<T>(lanes[i]);
}

typedef float Eight __attribute__((vector_size(32)));
typedef float Four __attribute__((vector_size(16)));

inline float total(Lanes lanes) {
  Eight eight[2];
  std::memcpy(eight, &lanes, sizeof lanes);
  const Eight sum = eight[0] + eight[1];
  Four four[2];
  std::memcpy(four, &sum, sizeof sum);
  const Four rest = four[0] + four[1];
  return (rest[0] + rest[1]) + (rest[2] + rest[3]);
}

// The sum of `count` numbers, a multiple of kLanes.
inline float sum_of(const float* from, int64_t count) {
  Lanes sum = {};
  for (int64_t i = 0; i < count; i += kLanes) sum += load(from + i);
  return total(sum);
}

inline float largest(Lanes lanes) {
  Eight eight[2];
  std::memcpy(eight, &lanes, sizeof lanes);
  const Eight more = eight[0] > eight[1] ? eight[0] : eight[1];
  Four four[2];
  std::memcpy(four, &more, sizeof more);
  const Four rest = four[0] > four[1] ? four[0] : four[1];
  return std::max(std::max(rest[0], rest[1]), std::max(rest[2], rest[3]));
}

// Whether lanes, whose places are counted from `first`, lie from `from` up to `to`, that among them.
inline Whole between(int64_t first, int64_t from, int64_t to) {
  const Whole places = Whole{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + static_cast<int32_t>(first);
  return (places >= static_cast<int32_t>(from)) & (places <= static_cast<int32_t>(to));
}

template <int apart, int... lane>
inline Lanes added(Lanes one, Lanes other, std::integer_sequence<int, lane...>) {
  return __builtin_shufflevector(one, other, ((lane & apart ? kLanes : 0) + (lane & ~apart))...) +
         __builtin_shufflevector(one, other, ((lane & apart ? kLanes : 0) + (lane | apart))...);
}

// Sums of two lanes that are `apart`: in the first of their places those of `one`, in the other those of `other`.
template <int apart>
inline Lanes added(Lanes one, Lanes other) {
  return added<apart>(one, other, std::make_integer_sequence<int, kLanes>());
}

// The totals of sixteen.
inline Lanes totals(const Lanes (&each)[kLanes]) {
  Lanes pairs[8], fours[4], eights[2];
  for (int i = 0; i < 8; i++) pairs[i] = added<1>(each[2 * i], each[2 * i + 1]);
  for (int i = 0; i < 4; i++) fours[i] = added<2>(pairs[2 * i], pairs[2 * i + 1]);
  for (int i = 0; i < 2; i++) eights[i] = added<4>(fours[2 * i], fours[2 * i + 1]);
  return added<8>(eights[0], eights[1]);
}

template <int apart, int... lane>
inline void exchange(Lanes& one, Lanes& other, std::integer_sequence<int, lane...>) {
  const Lanes low = __builtin_shufflevector(one, other, (lane & apart ? kLanes + (lane & ~apart) : lane)...);
  other = __builtin_shufflevector(one, other, (lane & apart ? kLanes + lane : lane | apart)...);
  one = low;
}

template <int apart>
inline void exchange(Lanes (&rows)[kLanes]) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; i++)
    if ((i & apart) == 0) exchange<apart>(rows[i], rows[i | apart], std::make_integer_sequence<int, kLanes>());
}

// rows[i][j] to rows[j][i].
inline void transpose(Lanes (&rows)[kLanes]) {
  exchange<1>(rows);
  exchange<2>(rows);
  exchange<4>(rows);
  exchange<8>(rows);
}

// e to the power of lanes, none of them above 0, to within 2e-7 of itself; below -87 it is 0.
// Cody and Waite's reduction; the polynomial is that of Cephes' expf.
inline Lanes exponential(Lanes lanes) {
  const Lanes least = all(-87.0f);
  const Whole small = lanes < least;
  lanes = small ? least : lanes;
  const Lanes shifted = lanes * 1.44269504f + 12582912.0f;  // 1.5 * 2**23: what is left of the mantissa is a whole number
  const Lanes turns = shifted - 12582912.0f;
  const Lanes rest = (lanes - turns * 0.693359375f) + turns * 2.12194440e-4f;
  Lanes sum = all(1.9875691500e-4f);
  sum = sum * rest + 1.3981999507e-3f;
  sum = sum * rest + 8.3334519073e-3f;
  sum = sum * rest + 4.1665795894e-2f;
  sum = sum * rest + 1.6666665459e-1f;
  sum = sum * rest + 5.0000001201e-1f;
  sum = sum * rest * rest + rest + 1.0f;
  const Whole exponent = __builtin_convertvector(turns, Whole) << 23;
  const Lanes result = reinterpret_cast<Lanes>(reinterpret_cast<Whole>(sum) + exponent);
  return small ? Lanes{} : result;
}

}  // namespace xinfer
