// Attention of sequences with several new tokens each, as in flash-attention: tiles of queries go over the context in
// stretches, and what they have found is made smaller whenever a larger score comes.
//
// A tile's rows are the heads that share keys of some tokens. Keys and values are laid out once for all tiles, keys with
// those of a stretch side by side, so that a row's scores are sums of rows of the stretch. They are float32, or pairs of
// bfloat16 where the processor adds up the products of such by itself; weights are then rounded to bfloat16 too.
#pragma once

#include <algorithm>
#include <vector>

#include "sharing.h"
#include "step.h"

namespace xinfer {

constexpr int64_t kKeys = 64;             // of a stretch: as many sums as stay in registers
constexpr int64_t kRows = 64;             // of a tile, about
constexpr int64_t kHeld = 16 << 20;       // numbers of keys and values that are float32 at once
constexpr int64_t kTogether = 4;          // rows whose sums are in registers together
constexpr int64_t kWide = kKeys / kLanes;

// What is multiplied: a number, or a pair of them.
typedef uint32_t Pair;
template <class T>
constexpr bool kPaired = false;
#if defined(__AVX512BF16__)
template <>
constexpr bool kPaired<c10::BFloat16> = true;
#endif
template <class T>
using Number = std::conditional_t<kPaired<T>, Pair, float>;

// One key head of a sequence, with what its tiles read.
template <class T>
struct Unit {
  int64_t sequence, key_head;
  int64_t first, end;             // tokens that are read, `first` a multiple of kKeys
  std::vector<Number<T>> keys;    // [stretches, key_dim (of pairs: half), kKeys]
  std::vector<Number<T>> values;  // [tokens (of pairs: half), padded]
  std::vector<float> key_scales, value_scales;  // [tokens] of codes, which are laid out as numbers
};

// sums[r, :] += of 4 rows: weights[r, i] * rows[i, :], N lanes wide, over `count` i.
template <int N, class Number>
inline void accumulate(const Number* weights, int64_t apart, const Number* rows, int64_t stride, int64_t count,
                       float* sums, int64_t width) {
  Lanes sum[kTogether][N];
  for (int r = 0; r < kTogether; r++)
    for (int n = 0; n < N; n++) sum[r][n] = load(sums + r * width + n * kLanes);
  for (int64_t i = 0; i < count; i++) {
    if constexpr (std::is_same_v<Number, float>) {
      Lanes row[N];
      for (int n = 0; n < N; n++) row[n] = load(rows + i * stride + n * kLanes);
      for (int r = 0; r < kTogether; r++)
        for (int n = 0; n < N; n++) sum[r][n] += row[n] * weights[r * apart + i];
    } else {
#if defined(__AVX512BF16__)
      __m512i row[N];
      for (int n = 0; n < N; n++) row[n] = _mm512_loadu_si512(rows + i * stride + n * kLanes);
      for (int r = 0; r < kTogether; r++) {
        const __m512i weight = _mm512_set1_epi32(static_cast<int>(weights[r * apart + i]));
        for (int n = 0; n < N; n++)
          sum[r][n] = reinterpret_cast<Lanes>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum[r][n]),
                                                               (__m512bh)weight, (__m512bh)row[n]));
      }
#endif
    }
  }
  for (int r = 0; r < kTogether; r++)
    for (int n = 0; n < N; n++) store(sum[r][n], sums + r * width + n * kLanes);
}

template <class T, class C>
class Prefill {
 public:
  explicit Prefill(const Step<T, C>& step)
      : step_(step), shape_(step.shape), heads_(shape_.heads / shape_.kv_heads),
        queries_(std::max<int64_t>(1, kRows / heads_)), rows_((queries_ * heads_ + kTogether - 1) / kTogether * kTogether),
        padded_((shape_.value_dim + kLanes - 1) / kLanes * kLanes), dims_((shape_.key_dim + kEach - 1) / kEach) {}

  void run(const std::vector<int64_t>& sequences) {
    std::vector<Unit<T>> units;
    int64_t held = 0;
    for (const int64_t s : sequences) {
      const int64_t end = step_.contexts[s], start = end - (step_.starts[s + 1] - step_.starts[s]);
      const int64_t first = shape_.window > 0 ? std::max<int64_t>(0, start + 1 - shape_.window) / kKeys * kKeys : 0;
      for (int64_t g = 0; g < shape_.kv_heads; g++) {
        const int64_t stretches = (end - first + kKeys - 1) / kKeys;
        units.push_back({s, g, first, end, std::vector<Number<T>>(stretches * kKeys * dims_),
                         std::vector<Number<T>>(stretches * kKeys / kEach * padded_),
                         std::vector<float>(kCoded<C> ? stretches * kKeys : 0),
                         std::vector<float>(kCoded<C> ? stretches * kKeys : 0)});
        held += stretches * kKeys * (shape_.key_dim + padded_);
        if (held >= kHeld) {
          flush(units);
          units.clear();
          held = 0;
        }
      }
    }
    flush(units);
  }

 private:
  static constexpr int64_t kEach = kPaired<T> ? 2 : 1;  // in a Number

  struct Task {
    int64_t unit, first;  // query of the sequence's new ones, or a stretch
  };

  int64_t count(const Unit<T>& unit) const {
    return step_.starts[unit.sequence + 1] - step_.starts[unit.sequence];
  }

  void flush(std::vector<Unit<T>>& units) const {
    std::vector<Task> stretches, tiles;
    for (size_t u = 0; u < units.size(); u++) {
      const int64_t unit = static_cast<int64_t>(u);
      for (int64_t first = units[u].first; first < units[u].end; first += kKeys) stretches.push_back({unit, first});
      for (int64_t first = 0; first < count(units[u]); first += queries_) tiles.push_back({unit, first});
    }
    std::reverse(tiles.begin(), tiles.end());  // the last ones, which take longest, come first
    share_out(stretches.size(), [&](int64_t i) { lay_out(units[stretches[i].unit], stretches[i].first); });
    share_out(tiles.size(), [&](int64_t i) { attend(units[tiles[i].unit], tiles[i].first); });
  }

  void lay_out(Unit<T>& unit, int64_t first) const {
    const C* entries[kKeys];
    const int64_t size = std::min(kKeys, unit.end - first), at = first - unit.first;
    step_.find(unit.sequence, first, first + size, entries);
    if constexpr (kCoded<C>) {
      scales_of(entries, size, unit.key_head, &unit.key_scales[at]);
      scales_of(entries, size, shape_.kv_heads + unit.key_head, &unit.value_scales[at]);
    }
    Number<T>* keys = unit.keys.data() + at * dims_;
    for (int64_t t = 0; t < size; t++) {
      const C* from = entries[t] + shape_.keys(unit.key_head);
      for (int64_t d = 0; d < dims_; d++) keys[d * kKeys + t] = number(from, d, shape_.key_dim);
    }
    for (int64_t t = 0; t < size; t += kEach) {
      const C* from = entries[t] + shape_.values(unit.key_head);
      const C* next = t + 1 < size ? entries[t + 1] + shape_.values(unit.key_head) : nullptr;
      Number<T>* to = unit.values.data() + (at + t) / kEach * padded_;
      for (int64_t d = 0; d < shape_.value_dim; d++) {
        if constexpr (kPaired<T>) to[d] = bits(from[d]) | (next == nullptr ? Pair{0} : bits(next[d]) << 16);
        else to[d] = static_cast<float>(from[d]);
      }
    }
  }

  // A number as bfloat16, which codes are without being rounded.
  template <class Row>
  static Pair bits(Row number) {
    return c10::BFloat16(static_cast<float>(number)).x;
  }

  static Pair bits(c10::BFloat16 number) {
    return number.x;
  }

  // The `at`th number of a row of so many.
  template <class Row>
  static Number<T> number(const Row* row, int64_t at, int64_t size) {
    if constexpr (kPaired<T>) return bits(row[2 * at]) | (2 * at + 1 < size ? bits(row[2 * at + 1]) << 16 : Pair{0});
    else return static_cast<float>(row[at]);
  }

  // New tokens from `first` on, as many as a tile has.
  void attend(const Unit<T>& unit, int64_t first) const {
    const int64_t tokens = std::min(queries_, count(unit) - first), start = unit.end - count(unit) + first;
    std::vector<Number<T>> q(rows_ * dims_), rounded(kPaired<T> ? rows_ * kKeys / kEach : 0);
    std::vector<float> found(rows_ * padded_), scores(rows_ * kKeys), most(rows_, kNothing), sums(rows_);
    const T* from = step_.q + ((step_.starts[unit.sequence] + first) * shape_.heads + unit.key_head * heads_) * shape_.key_dim;
    for (int64_t r = 0; r < tokens * heads_; r++) {
      const T* row = from + (r / heads_ * shape_.heads + r % heads_) * shape_.key_dim;
      for (int64_t d = 0; d < dims_; d++) q[r * dims_ + d] = number(row, d, shape_.key_dim);
    }
    if (step_.sinks != nullptr) {
      for (int64_t r = 0; r < tokens * heads_; r++) {
        most[r] = step_.sinks[unit.key_head * heads_ + r % heads_];
        sums[r] = 1;
      }
    }
    const int64_t last = start + tokens;  // of the keys that any of them sees, behind the last
    for (int64_t key = unit.first; key < last; key += kKeys) {
      const Number<T>* keys = unit.keys.data() + (key - unit.first) * dims_;
      const Number<T>* values = unit.values.data() + (key - unit.first) / kEach * padded_;
      std::fill(scores.begin(), scores.end(), 0.0f);
      for (int64_t r = 0; r < rows_; r += kTogether)
        accumulate<kWide>(&q[r * dims_], dims_, keys, kKeys, dims_, &scores[r * kKeys], kKeys);
      for (int64_t r = 0; r < tokens * heads_; r++)
        weigh(unit, key - unit.first, &scores[r * kKeys], start + r / heads_ - key, most[r], sums[r], &found[r * padded_]);
      const Number<T>* all_weights;
      if constexpr (kPaired<T>) {
        for (int64_t i = 0; i < tokens * heads_ * kKeys; i += kLanes)
          store(load(&scores[i]), reinterpret_cast<T*>(rounded.data()) + i);
        all_weights = rounded.data();
      } else {
        all_weights = scores.data();
      }
      const int64_t seen = (std::min(kKeys, last - key) + kEach - 1) / kEach, apart = kKeys / kEach;
      for (int64_t r = 0; r < rows_; r += kTogether) {
        const Number<T>* weights = all_weights + r * apart;
        int64_t d = 0;
        for (; d + kWide * kLanes <= padded_; d += kWide * kLanes)
          accumulate<kWide>(weights, apart, values + d, padded_, seen, &found[r * padded_ + d], padded_);
        for (; d < padded_; d += kLanes)
          accumulate<1>(weights, apart, values + d, padded_, seen, &found[r * padded_ + d], padded_);
      }
    }
    T* to = step_.out + ((step_.starts[unit.sequence] + first) * shape_.heads + unit.key_head * heads_) * shape_.value_dim;
    for (int64_t r = 0; r < tokens * heads_; r++) {
      T* place = to + (r / heads_ * shape_.heads + r % heads_) * shape_.value_dim;
      for (int64_t d = 0; d < shape_.value_dim; d++) place[d] = static_cast<T>(found[r * padded_ + d] / sums[r]);
    }
  }

  // A row's scores become weights, and what was found before is made smaller if one is the largest so far. The row sees
  // keys up to `last` of the stretch, which may be beyond it and begins at `at` of what the unit has.
  void weigh(const Unit<T>& unit, int64_t at, float* scores, int64_t last, float& most, float& sum, float* found) const {
    const int64_t from = shape_.window > 0 ? std::max<int64_t>(0, last + 1 - shape_.window) : 0;
    const bool whole = from == 0 && last >= kKeys - 1;
    Lanes most_of = all(kNothing);
    for (int64_t i = 0; i < kKeys; i += kLanes) {
      Lanes part = load(scores + i) * shape_.scale;
      if constexpr (kCoded<C>) part *= load(&unit.key_scales[at + i]);
      if (shape_.softcap > 0) part = capped(part, shape_.softcap);
      if (!whole) part = between(i, from, last) ? part : all(kNothing);
      most_of = part > most_of ? part : most_of;
      store(part, scores + i);
    }
    const float now = std::max(most, largest(most_of));
    if (now == kNothing) {  // it sees none of them
      std::fill_n(scores, kKeys, 0.0f);
      return;
    }
    Lanes sums = {};
    for (int64_t i = 0; i < kKeys; i += kLanes) {
      const Lanes weights = exponential(load(scores + i) - now);
      sums += weights;
      if constexpr (kCoded<C>) store(weights * load(&unit.value_scales[at + i]), scores + i);
      else store(weights, scores + i);
    }
    if (now > most) {
      const float share = std::exp(most - now);
      sum *= share;
      for (int64_t d = 0; d < padded_; d++) found[d] *= share;
      most = now;
    }
    sum += total(sums);
  }

  const Step<T, C>& step_;
  const Shape& shape_;
  const int64_t heads_, queries_, rows_, padded_, dims_;  // `dims_` Numbers of a key
};

template <class T, class C>
void prefill(const Step<T, C>& step, const std::vector<int64_t>& sequences) {
  if (!sequences.empty()) Prefill<T, C>(step).run(sequences);
}

}  // namespace xinfer
