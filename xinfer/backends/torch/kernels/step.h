// What attention is given, and what decoding and prefilling share.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "lanes.h"

namespace xinfer {

// Whether a cache has codes of eight bits, which an entry's scales make numbers: float32, one for the keys of each key
// head and one for its values, before all codes.
template <class C>
constexpr bool kCoded = sizeof(C) == 1;

constexpr float kNothing = -std::numeric_limits<float>::infinity();

// What is the same for all of a step's sequences.
struct Shape {
  int64_t heads, kv_heads, key_dim, value_dim, key_at, value_at, width, block_size;
  float scale, softcap;
  int64_t window;  // tokens that are seen; 0 for all

  // Where a key head's keys begin in a slot, and where its values do.
  int64_t keys(int64_t key_head) const {
    return key_at + key_head * key_dim;
  }

  int64_t values(int64_t key_head) const {
    return value_at + key_head * (value_at == key_at ? key_dim : value_dim);
  }
};

// T is what is computed with, C what the cache has: the same, or codes.
template <class T, class C>
struct Step {
  const Shape& shape;
  const T* q;
  const C* pool;
  const int32_t *starts, *contexts, *tables;
  int64_t table;       // blocks in a sequence's table
  const float* sinks;  // of each head, or null
  T* out;

  // The slots of tokens from `first` up to `end` of a sequence.
  void find(int64_t sequence, int64_t first, int64_t end, const C** entries) const {
    int64_t block = first / shape.block_size, within = first % shape.block_size;
    for (int64_t i = first; i < end; i++) {
      *entries++ = pool + (int64_t{tables[sequence * table + block]} * shape.block_size + within) * shape.width;
      if (++within == shape.block_size) block++, within = 0;
    }
  }
};

// The scales of `count` entries, of which each has them at `at`.
template <class C>
inline void scales_of(const C* const* entries, int64_t count, int64_t at, float* to) {
  for (int64_t t = 0; t < count; t++) std::memcpy(to + t, entries[t] + at * sizeof(float), sizeof(float));
}

inline Lanes capped(Lanes scores, float cap) {
  for (int64_t i = 0; i < kLanes; i++) scores[i] = std::tanh(scores[i] / cap) * cap;
  return scores;
}

}  // namespace xinfer
