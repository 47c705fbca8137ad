// Attention of sequences with several new tokens each, as in flash-attention: tiles of queries go over the context in
// stretches, and what they have found is made smaller whenever a larger score comes.
//
// A tile's rows are the heads that share keys of some tokens. Keys and values are made float32 once for all tiles, keys
// with those of a stretch side by side, so that a row's scores are sums of rows of the stretch.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "step.h"

namespace xinfer {

constexpr int64_t kKeys = 64;             // of a stretch: as many sums as stay in registers
constexpr int64_t kRows = 64;             // of a tile, about
constexpr int64_t kHeld = 16 << 20;       // numbers of keys and values that are float32 at once
constexpr int64_t kTogether = 4;          // rows whose sums are in registers together
constexpr int64_t kWide = kKeys / kLanes;

// One key head of a sequence, with what its tiles read.
struct Unit {
  int64_t sequence, key_head;
  int64_t first, end;    // tokens that are read, `first` a multiple of kKeys
  std::vector<float> keys;    // [stretches, key_dim, kKeys]
  std::vector<float> values;  // [tokens, padded]
};

// sums[r, :] += of 4 rows: weights[r, i] * rows[i, :], N lanes wide, over `count` i.
template <int N>
inline void accumulate(const float* weights, int64_t apart, const float* rows, int64_t stride, int64_t count, float* sums,
                       int64_t width) {
  Lanes sum[kTogether][N];
  for (int r = 0; r < kTogether; r++)
    for (int n = 0; n < N; n++) sum[r][n] = load(sums + r * width + n * kLanes);
  for (int64_t i = 0; i < count; i++) {
    Lanes row[N];
    for (int n = 0; n < N; n++) row[n] = load(rows + i * stride + n * kLanes);
    for (int r = 0; r < kTogether; r++)
      for (int n = 0; n < N; n++) sum[r][n] += row[n] * weights[r * apart + i];
  }
  for (int r = 0; r < kTogether; r++)
    for (int n = 0; n < N; n++) store(sum[r][n], sums + r * width + n * kLanes);
}

template <class T>
class Prefill {
 public:
  explicit Prefill(const Step<T>& step)
      : step_(step), shape_(step.shape), heads_(shape_.heads / shape_.kv_heads),
        queries_(std::max<int64_t>(1, kRows / heads_)), rows_((queries_ * heads_ + kTogether - 1) / kTogether * kTogether),
        padded_((shape_.value_dim + kLanes - 1) / kLanes * kLanes) {}

  void run(const std::vector<int64_t>& sequences) {
    std::vector<Unit> units;
    int64_t held = 0;
    for (const int64_t s : sequences) {
      const int64_t end = step_.contexts[s], start = end - (step_.starts[s + 1] - step_.starts[s]);
      const int64_t first = shape_.window > 0 ? std::max<int64_t>(0, start + 1 - shape_.window) / kKeys * kKeys : 0;
      for (int64_t g = 0; g < shape_.kv_heads; g++) {
        const int64_t stretches = (end - first + kKeys - 1) / kKeys;
        units.push_back({s, g, first, end, std::vector<float>(stretches * kKeys * shape_.key_dim),
                         std::vector<float>(stretches * kKeys * padded_)});
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
  struct Task {
    int64_t unit, first;  // query of the sequence's new ones, or a stretch
  };

  // Does tasks in turns, each thread the next one.
  template <class Work>
  static void share(const std::vector<Task>& tasks, Work work) {
    std::atomic<size_t> next{0};
    at::parallel_for(0, std::min<int64_t>(at::get_num_threads(), tasks.size()), 1, [&](int64_t, int64_t) {
      for (size_t i; (i = next.fetch_add(1)) < tasks.size();) work(tasks[i]);
    });
  }

  int64_t count(const Unit& unit) const {
    return step_.starts[unit.sequence + 1] - step_.starts[unit.sequence];
  }

  void flush(std::vector<Unit>& units) const {
    std::vector<Task> stretches, tiles;
    for (size_t u = 0; u < units.size(); u++) {
      const int64_t unit = static_cast<int64_t>(u);
      for (int64_t first = units[u].first; first < units[u].end; first += kKeys) stretches.push_back({unit, first});
      for (int64_t first = 0; first < count(units[u]); first += queries_) tiles.push_back({unit, first});
    }
    std::reverse(tiles.begin(), tiles.end());  // the last ones, which take longest, come first
    share(stretches, [&](const Task& task) { widen(units[task.unit], task.first); });
    share(tiles, [&](const Task& task) { attend(units[task.unit], task.first); });
  }

  void widen(Unit& unit, int64_t first) const {
    const T* entries[kKeys];
    const int64_t size = std::min(kKeys, unit.end - first), at = first - unit.first;
    step_.find(unit.sequence, first, first + size, entries);
    float* keys = unit.keys.data() + at * shape_.key_dim;
    for (int64_t d = 0; d < shape_.key_dim; d++)
      for (int64_t t = 0; t < size; t++)
        keys[d * kKeys + t] = static_cast<float>(entries[t][unit.key_head * shape_.key_dim + d]);
    for (int64_t t = 0; t < size; t++) {
      const T* from = entries[t] + shape_.values(unit.key_head);
      float* to = unit.values.data() + (at + t) * padded_;
      for (int64_t d = 0; d < shape_.value_dim; d++) to[d] = static_cast<float>(from[d]);
    }
  }

  // New tokens from `first` on, as many as a tile has.
  void attend(const Unit& unit, int64_t first) const {
    const int64_t tokens = std::min(queries_, count(unit) - first), start = unit.end - count(unit) + first;
    std::vector<float> q(rows_ * shape_.key_dim), found(rows_ * padded_), scores(rows_ * kKeys);
    std::vector<float> most(rows_, kNothing), sums(rows_);
    const T* from = step_.q + ((step_.starts[unit.sequence] + first) * shape_.heads + unit.key_head * heads_) * shape_.key_dim;
    for (int64_t i = 0; i < tokens; i++)
      for (int64_t j = 0; j < heads_ * shape_.key_dim; j++)
        q[i * heads_ * shape_.key_dim + j] = static_cast<float>(from[i * shape_.heads * shape_.key_dim + j]) * shape_.scale;
    if (step_.sinks != nullptr) {
      for (int64_t r = 0; r < tokens * heads_; r++) {
        most[r] = step_.sinks[unit.key_head * heads_ + r % heads_];
        sums[r] = 1;
      }
    }
    const int64_t last = start + tokens;  // of the keys that any of them sees, behind the last
    for (int64_t key = unit.first; key < last; key += kKeys) {
      const float* keys = unit.keys.data() + (key - unit.first) * shape_.key_dim;
      const float* values = unit.values.data() + (key - unit.first) * padded_;
      std::fill(scores.begin(), scores.end(), 0.0f);
      for (int64_t r = 0; r < rows_; r += kTogether)
        accumulate<kWide>(&q[r * shape_.key_dim], shape_.key_dim, keys, kKeys, shape_.key_dim, &scores[r * kKeys], kKeys);
      for (int64_t r = 0; r < tokens * heads_; r++)
        weigh(&scores[r * kKeys], start + r / heads_ - key, most[r], sums[r], &found[r * padded_]);
      const int64_t seen = std::min(kKeys, last - key);
      for (int64_t r = 0; r < rows_; r += kTogether) {
        const float* weights = &scores[r * kKeys];
        int64_t d = 0;
        for (; d + kWide * kLanes <= padded_; d += kWide * kLanes)
          accumulate<kWide>(weights, kKeys, values + d, padded_, seen, &found[r * padded_ + d], padded_);
        for (; d < padded_; d += kLanes)
          accumulate<1>(weights, kKeys, values + d, padded_, seen, &found[r * padded_ + d], padded_);
      }
    }
    T* to = step_.out + ((step_.starts[unit.sequence] + first) * shape_.heads + unit.key_head * heads_) * shape_.value_dim;
    for (int64_t r = 0; r < tokens * heads_; r++) {
      T* place = to + (r / heads_ * shape_.heads + r % heads_) * shape_.value_dim;
      for (int64_t d = 0; d < shape_.value_dim; d++) place[d] = static_cast<T>(found[r * padded_ + d] / sums[r]);
    }
  }

  // A row's scores become weights, and what was found before is made smaller if one is the largest so far. The row sees
  // keys up to `last` of the stretch, which may be beyond it.
  void weigh(float* scores, int64_t last, float& most, float& sum, float* found) const {
    const int64_t from = shape_.window > 0 ? std::max<int64_t>(0, last + 1 - shape_.window) : 0;
    const bool whole = from == 0 && last >= kKeys - 1;
    Lanes most_of = all(kNothing);
    for (int64_t i = 0; i < kKeys; i += kLanes) {
      Lanes part = load(scores + i);
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
      store(weights, scores + i);
    }
    if (now > most) {
      const float share = std::exp(most - now);
      sum *= share;
      for (int64_t d = 0; d < padded_; d++) found[d] *= share;
      most = now;
    }
    sum += total(sums);
  }

  const Step<T>& step_;
  const Shape& shape_;
  const int64_t heads_, queries_, rows_, padded_;
};

template <class T>
void prefill(const Step<T>& step, const std::vector<int64_t>& sequences) {
  if (!sequences.empty()) Prefill<T>(step).run(sequences);
}

}  // namespace xinfer
