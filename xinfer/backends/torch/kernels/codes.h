// A matrix of weights in eight or four bits, and products with it in float32.
#pragma once

#include <algorithm>
#include <cstdint>

#include "lanes.h"

namespace xinfer {

constexpr int64_t kAhead = 8192;     // bytes, from use back to prefetching
constexpr int64_t kShare = 1 << 14;  // weights that are worth a thread

// A matrix in blocks of codes; a weight is (code - zero) * scale. Of a block's four-bit codes the first half lies in
// the low nibbles. x has `blocks * block` numbers, those beyond the matrix 0.
struct Codes {
  static constexpr int64_t kLeast = kShare << 3;  // in less there is nothing to be prefetched

  const uint8_t* codes;  // [out, blocks, block * bits / 8]
  const float* scales;   // [out, blocks]
  const uint8_t* zeros;  // [out, blocks], or null for 2**(bits - 1)
  const float* sums;     // [blocks] of x, if it has one row
  int64_t bits, blocks, block;

  float zero(int64_t at) const {
    return zeros == nullptr ? static_cast<float>(1 << (bits - 1)) : static_cast<float>(zeros[at]);
  }

  float dot(int64_t row, const float* x) const {
    return bits == 8 ? dot8(row, x) : dot4(row, x);
  }

  float dot8(int64_t row, const float* x) const {
    const uint8_t* w = codes + row * blocks * block;
    const float* scale = scales + row * blocks;
    Lanes sum = {};
    for (int64_t b = 0; b < blocks; b++, w += block, x += block) {
      for (int64_t byte = 0; byte < block; byte += 64) __builtin_prefetch(w + byte + kAhead);
      Lanes one = {}, other = {};
      for (int64_t i = 0; i < block; i += 2 * kLanes) {
        one += load(w + i) * load(x + i);
        other += load(w + i + kLanes) * load(x + i + kLanes);
      }
      sum += (one + other) * scale[b];
    }
    return total(sum - middle(row, sums));
  }

  float dot4(int64_t row, const float* x) const {
    const int64_t half = block / 2;
    const uint8_t* w = codes + row * blocks * half;
    const float* scale = scales + row * blocks;
    Lanes sum = {};
    for (int64_t b = 0; b < blocks; b++, w += half, x += block) {
      __builtin_prefetch(w + kAhead / 2);
      Lanes one = {}, other = {}, low, high;
      for (int64_t i = 0; i < half; i += kLanes) {
        load_nibbles(w + i, low, high);
        one += low * load(x + i);
        other += high * load(x + half + i);
      }
      sum += (one + other) * scale[b];
    }
    return total(sum - middle(row, sums));
  }

  // What zero points take from a row's product with numbers whose blocks have these sums, in kLanes parts.
  Lanes middle(int64_t row, const float* sums) const {
    const int64_t from = row * blocks;
    const Lanes usual = all(static_cast<float>(1 << (bits - 1)));
    Lanes sum = {};
    // `count` where fewer are left than there are lanes: all loads with one cost a twentieth of four-bit products.
    const auto add = [&](int64_t b, auto... count) __attribute__((always_inline)) {
      const Lanes share = load(scales + from + b, count...) * load(sums + b, count...);
      sum += share * (zeros == nullptr ? usual : load(zeros + from + b, count...));
    };
    int64_t b = 0;
    for (; b + kLanes <= blocks; b += kLanes) {
      __builtin_prefetch(scales + from + b + 1024);
      add(b);
    }
    if (b < blocks) add(b, blocks - b);
    return sum;
  }

  template <class T>
  void widen(int64_t row, T* to) const {
    const int64_t bytes = block * bits / 8;
    const uint8_t* w = codes + row * blocks * bytes;
    for (int64_t b = 0, at = row * blocks; b < blocks; b++, at++, w += bytes, to += block) {
      const Lanes scale = all(scales[at]), middle = all(zero(at));
      for (int64_t i = 0; i < bytes; i += kLanes) {
        if (bits == 8) {
          store((load(w + i) - middle) * scale, to + i);
        } else {
          Lanes low, high;
          load_nibbles(w + i, low, high);
          store((low - middle) * scale, to + i);
          store((high - middle) * scale, to + bytes + i);
        }
      }
    }
  }
};

}  // namespace xinfer
