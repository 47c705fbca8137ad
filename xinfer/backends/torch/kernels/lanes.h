// What is done with lanes: sums and largest ones of them, exchanging them, and powers of e.
#pragma once

#include <cstdint>
#include <utility>

#include "loads.h"

namespace xinfer {

// Lanes of which those that are `apart` have changed places.
template <int apart, int... lane>
inline Lanes exchanged(Lanes lanes, std::integer_sequence<int, lane...>) {
  return __builtin_shufflevector(lanes, lanes, (lane ^ apart)...);
}

// What all lanes come to when two of them are joined at a time.
template <int apart = 1, class Join>
inline float across(Lanes lanes, Join join) {
  if constexpr (apart == kLanes) return lanes[0];
  else return across<2 * apart>(join(lanes, exchanged<apart>(lanes, std::make_integer_sequence<int, kLanes>())), join);
}

inline float total(Lanes lanes) {
  return across(lanes, [](Lanes one, Lanes other) { return one + other; });
}

inline float largest(Lanes lanes) {
  return across(lanes, [](Lanes one, Lanes other) { return one > other ? one : other; });
}

// The sum of `count` numbers, a multiple of kLanes.
inline float sum_of(const float* from, int64_t count) {
  Lanes sum = {};
  for (int64_t i = 0; i < count; i += kLanes) sum += load(from + i);
  return total(sum);
}

template <int... lane>
constexpr Whole places_of(std::integer_sequence<int, lane...>) {
  return Whole{lane...};
}

// Whether lanes, whose places are counted from `first`, lie from `from` up to `to`, that among them.
inline Whole between(int64_t first, int64_t from, int64_t to) {
  const Whole places = places_of(std::make_integer_sequence<int, kLanes>()) + static_cast<int32_t>(first);
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

// The totals of kLanes.
template <int64_t count>
inline Lanes totals(const Lanes (&each)[count]) {
  if constexpr (count == 1) {
    return each[0];
  } else {
    Lanes half[count / 2];
    for (int64_t i = 0; i < count / 2; i++) half[i] = added<kLanes / count>(each[2 * i], each[2 * i + 1]);
    return totals(half);
  }
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
template <int apart = 1>
inline void transpose(Lanes (&rows)[kLanes]) {
  exchange<apart>(rows);
  if constexpr (2 * apart < kLanes) transpose<2 * apart>(rows);
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
