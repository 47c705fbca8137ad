// What attention is given, and what decoding and prefilling share.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "lanes.h"

namespace xinfer {

constexpr float kNothing = -std::numeric_limits<float>::infinity();

// What is the same for all of a step's sequences.
struct Shape {
  int64_t heads, kv_heads, key_dim, value_dim, value_at, width, block_size;
  float scale, softcap;
  int64_t window;  // tokens that are seen; 0 for all

  // Where a key head's values begin in a slot.
  int64_t values(int64_t key_head) const {
    return value_at + key_head * (value_at == 0 ? key_dim : value_dim);
  }
};

template <class T>
struct Step {
  const Shape& shape;
  const T *q, *pool;
  const int32_t *starts, *contexts, *tables;
  int64_t table;       // blocks in a sequence's table
  const float* sinks;  // of each head, or null
  T* out;

  // The slots of tokens from `first` up to `end` of a sequence.
  void find(int64_t sequence, int64_t first, int64_t end, const T** entries) const {
    int64_t block = first / shape.block_size, within = first % shape.block_size;
    for (int64_t i = first; i < end; i++) {
      *entries++ = pool + (int64_t{tables[sequence * table + block]} * shape.block_size + within) * shape.width;
      if (++within == shape.block_size) block++, within = 0;
    }
  }
};

inline Lanes capped(Lanes scores, float cap) {
  for (int64_t i = 0; i < kLanes; i++) scores[i] = std::tanh(scores[i] / cap) * cap;
  return scores;
}

}  // namespace xinfer
