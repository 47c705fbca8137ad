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

constexpr int64_t kKeys = 64;             // of a stretch
constexpr int64_t kRows = 64;             // of a tile, about
constexpr int64_t kHeld = 16 << 20;       // numbers of keys and values that are float32 at once
constexpr int64_t kTogether = 4;          // rows whose sums are in registers together
constexpr int kWide = kRegisters / 8;     // vectors of each: sums take half of the registers

// What is multiplied: a number, or a pair of them.
typedef uint32_t Pair;
template <class T>
using Number = std::conditional_t<kPaired<T>, Pair, float>;

// One key head of a sequence, with what its tiles read.
template <class T>
struct Unit {
  int64_t sequence, key_head;
  int64_t first, end;             // tokens that are read, `first` a multiple of kKeys
  std::vector<Number<T>> keys;    // [stretches, dims, kKeys]
  std::vector<Number<T>> values;  // [tokens (of pairs: half), padded]
  std::vector<float> key_scales, value_scales;  // [tokens] of codes, which are laid out as numbers
};

// sums[r, :] += of 4 rows: weights[r, i] * rows[i, :], N lanes wide, over `count` i; `kFresh` if there are no sums yet.
template <int N, bool kFresh, class Number>
inline void accumulate(const Number* weights, int64_t apart, const Number* rows, int64_t stride, int64_t count,
                       float* sums, int64_t width) {
  Lanes sum[kTogether][N];
  for (int r = 0; r < kTogether; r++)
    for (int n = 0; n < N; n++) sum[r][n] = kFresh ? Lanes{} : load(sums + r * width + n * kLanes);
  for (int64_t i = 0; i < count; i++) {
    if constexpr (std::is_same_v<Number, float>) {
      Lanes row[N];
      for (int n = 0; n < N; n++) row[n] = load(rows + i * stride + n * kLanes);
      for (int r = 0; r < kTogether; r++)
        for (int n = 0; n < N; n++) sum[r][n] += row[n] * weights[r * apart + i];
    } else {
#if defined(__AVX512BF16__)
      __m512bh row[N];
      for (int n = 0; n < N; n++) row[n] = load_pairs(rows + i * stride + n * kLanes);
      for (int r = 0; r < kTogether; r++) {
        const __m512bh weight = all_pairs(weights[r * apart + i]);
        for (int n = 0; n < N; n++) sum[r][n] = add_products(sum[r][n], weight, row[n]);
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
        padded_((shape_.value_dim + kLanes - 1) / kLanes * kLanes),
        dims_(((shape_.key_dim + kEach - 1) / kEach + kLanes - 1) / kLanes * kLanes) {}

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
        held += stretches * kKeys * (dims_ * kEach + padded_);
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
    for (int64_t t = 0; t < size; t += kLanes) {
      for (int64_t d = 0; d < dims_; d += kLanes) {
        Lanes block[kLanes] = {};
        for (int64_t i = 0; i < std::min(kLanes, size - t); i++)
          block[i] = numbers(entries[t + i] + shape_.keys(unit.key_head), d, shape_.key_dim);
        transpose(block);
        for (int64_t i = 0; i < kLanes; i++) store(block[i], reinterpret_cast<float*>(keys + (d + i) * kKeys + t));
      }
    }
    for (int64_t t = 0; t < size; t += kEach) {
      const C* from = entries[t] + shape_.values(unit.key_head);
      const C* next = t + 1 < size ? entries[t + 1] + shape_.values(unit.key_head) : nullptr;
      float* to = reinterpret_cast<float*>(unit.values.data() + (at + t) / kEach * padded_);
      for (int64_t d = 0; d < shape_.value_dim; d += kLanes) {
        Lanes values = load(from + d, shape_.value_dim - d);
        if constexpr (kPaired<T>) {  // of a number of bfloat16 as float32 the lower half is 0
          const Lanes others = next == nullptr ? Lanes{} : load(next + d, shape_.value_dim - d);
          values = reinterpret_cast<Lanes>(reinterpret_cast<Bits>(values) >> 16 | reinterpret_cast<Bits>(others));
        }
        store(values, to + d);
      }
    }
  }

  // kLanes Numbers of a row of so many numbers, from the `at`th Number on, and zeros; codes are bfloat16 as they are.
  template <class Row>
  static Lanes numbers(const Row* row, int64_t at, int64_t size) {
    const int64_t from = at * kEach;
    if constexpr (!kPaired<T>) {
      return load(row + from, size - from);
    } else {
#if defined(__AVX512BF16__)
      if constexpr (kPaired<Row>) return (Lanes)load_pairs(row + from, size - from);
      c10::BFloat16 both[kPairs];
      store(load(row + from, size - from), both);
      store(load(row + from + kLanes, size - from - kLanes), both + kLanes);
      return (Lanes)load_pairs(both);
#endif
    }
  }

  // New tokens from `first` on, as many as a tile has.
  void attend(const Unit<T>& unit, int64_t first) const {
    const int64_t tokens = std::min(queries_, count(unit) - first), start = unit.end - count(unit) + first;
    std::vector<Number<T>> q(rows_ * dims_), rounded(kPaired<T> ? rows_ * kKeys / kEach : 0);
    std::vector<float> found(rows_ * padded_), scores(rows_ * kKeys), most(rows_, kNothing);
    std::vector<Lanes> sums(rows_);
    const T* from = step_.q + ((step_.starts[unit.sequence] + first) * shape_.heads + unit.key_head * heads_) * shape_.key_dim;
    for (int64_t r = 0; r < tokens * heads_; r++) {
      const T* row = from + (r / heads_ * shape_.heads + r % heads_) * shape_.key_dim;
      for (int64_t d = 0; d < dims_; d += kLanes)
        store(numbers(row, d, shape_.key_dim), reinterpret_cast<float*>(&q[r * dims_ + d]));
    }
    if (step_.sinks != nullptr) {
      for (int64_t r = 0; r < tokens * heads_; r++) {
        most[r] = step_.sinks[unit.key_head * heads_ + r % heads_];
        sums[r] = Lanes{1};
      }
    }
    const auto weights = [&] {
      if constexpr (kPaired<T>) return reinterpret_cast<T*>(rounded.data());
      else return scores.data();
    }();
    const int64_t last = start + tokens;  // of the keys that any of them sees, behind the last
    for (int64_t key = unit.first; key < last; key += kKeys) {
      const Number<T>* keys = unit.keys.data() + (key - unit.first) * dims_;
      const Number<T>* values = unit.values.data() + (key - unit.first) / kEach * padded_;
      for (int64_t r = 0; r < rows_; r += kTogether)
        for (int64_t t = 0; t < kKeys; t += kWide * kLanes)
          accumulate<kWide, true>(&q[r * dims_], dims_, keys + t, kKeys, dims_, &scores[r * kKeys + t], kKeys);
      for (int64_t r = 0; r < tokens * heads_; r++)
        weigh(unit, key - unit.first, start + r / heads_ - key, &scores[r * kKeys], most[r], sums[r],
              &found[r * padded_], weights + r * kKeys);
      const int64_t seen = (std::min(kKeys, last - key) + kEach - 1) / kEach, apart = kKeys / kEach;
      for (int64_t r = 0; r < rows_; r += kTogether) {
        const Number<T>* own = reinterpret_cast<const Number<T>*>(weights) + r * apart;
        int64_t d = 0;
        for (; d + kWide * kLanes <= padded_; d += kWide * kLanes)
          accumulate<kWide, false>(own, apart, values + d, padded_, seen, &found[r * padded_ + d], padded_);
        for (; d < padded_; d += kLanes)
          accumulate<1, false>(own, apart, values + d, padded_, seen, &found[r * padded_ + d], padded_);
      }
    }
    T* to = step_.out + ((step_.starts[unit.sequence] + first) * shape_.heads + unit.key_head * heads_) * shape_.value_dim;
    for (int64_t r = 0; r < tokens * heads_; r++) {
      T* place = to + (r / heads_ * shape_.heads + r % heads_) * shape_.value_dim;
      const float share = 1 / total(sums[r]);
      for (int64_t d = 0; d < shape_.value_dim; d += kLanes)
        store(load(&found[r * padded_ + d]) * share, place + d, shape_.value_dim - d);
    }
  }

  // A row's scores become weights, and what was found before is made smaller if one is the largest so far. The row sees
  // keys up to `last` of the stretch, which may be beyond it and begins at `at` of what the unit has.
  template <class Weight>
  void weigh(const Unit<T>& unit, int64_t at, int64_t last, float* scores, float& most, Lanes& sums, float* found,
             Weight* weights) const {
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
      for (int64_t i = 0; i < kKeys; i += kLanes) store(Lanes{}, weights + i);
      return;
    }
    if (now > most) {
      const float share = std::exp(most - now);
      sums *= share;
      for (int64_t d = 0; d < padded_; d += kLanes) store(load(found + d) * share, found + d);
      most = now;
    }
    for (int64_t i = 0; i < kKeys; i += kLanes) {
      const Lanes own = exponential(load(scores + i) - now);
      sums += own;
      if constexpr (kCoded<C>) store(own * load(&unit.value_scales[at + i]), weights + i);
      else store(own, weights + i);
    }
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
