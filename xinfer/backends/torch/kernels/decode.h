// Attention of sequences with one new token each, to a cache that is read where it lies.
//
// Work is shared out by sequence, key head and stretch of the context; stretches are put together as in flash-decoding:
// each has its own maximum, sum and weighed values.
#pragma once

#include <algorithm>
#include <vector>

#include "sharing.h"
#include "step.h"

namespace xinfer {


constexpr int64_t kStretch = 128;  // tokens; a multiple of kLanes

// What a stretch of a context comes to for one key head. Codes are multiplied as they are: their scales are factors of
// scores and of weights.
template <class C>
struct Stretch {
  const Shape& shape;
  int64_t key_head, count = 0;
  const C* entries[kStretch];  // filled up to a multiple of kLanes with the last one
  float key_scales[kCoded<C> ? kStretch : 1], value_scales[kCoded<C> ? kStretch : 1];

  template <class T>
  Stretch(const Step<T, C>& step, int64_t sequence, int64_t key_head, int64_t first, int64_t end)
      : shape(step.shape), key_head(key_head), count(end - first) {
    step.find(sequence, first, end, entries);
    for (int64_t t = count; t % kLanes != 0; t++) entries[t] = entries[count - 1];
    for (int64_t t = 0; t < count; t++) prefetch(entries[t] + shape.keys(key_head), shape.key_dim);
    for (int64_t t = 0; t < count; t++) prefetch(entries[t] + shape.values(key_head), shape.value_dim);
    if constexpr (kCoded<C>) {
      const int64_t filled = (count + kLanes - 1) / kLanes * kLanes;
      scales_of(entries, filled, key_head, key_scales);
      scales_of(entries, filled, shape.kv_heads + key_head, value_scales);
    }
  }

  static void prefetch(const C* from, int64_t numbers) {
    for (int64_t i = 0; i < numbers; i += 64 / sizeof(C)) __builtin_prefetch(from + i);
  }

  // Of a query: the largest score, the sum of weights and the weighed values.
  template <class Q>
  void attend(const Q* query, float& most, float& sum, float* values) const {
    float weights[kStretch];
    Lanes most_of = all(kNothing);
    for (int64_t t = 0; t < count; t += kLanes) {
      Lanes scores = products(query, t) * shape.scale;
      if constexpr (kCoded<C>) scores *= load(key_scales + t);
      if (shape.softcap > 0) scores = capped(scores, shape.softcap);
      if (t + kLanes > count) scores = between(t, 0, count - 1) ? scores : all(kNothing);
      most_of = scores > most_of ? scores : most_of;
      store(scores, weights + t);
    }
    most = largest(most_of);
    Lanes sums = {};
    for (int64_t t = 0; t < count; t += kLanes) {
      const Lanes weight = exponential(load(weights + t) - most);
      sums += weight;
      if constexpr (kCoded<C>) store(weight * load(value_scales + t), weights + t);
      else store(weight, weights + t);
    }
    sum = total(sums);
    weigh(weights, values);
  }

  // A query's products with kLanes keys, from t on; of float32 it is filled with 0 up to whole lanes.
  template <class Q>
  Lanes products(const Q* query, int64_t t) const {
    const int64_t at = shape.keys(key_head);
    Lanes sums[kLanes] = {};
    int64_t i = 0;
    if constexpr (std::is_same_v<Q, float>) {
      for (; i + kLanes <= shape.key_dim; i += kLanes)
        for (int64_t j = 0; j < kLanes; j++) sums[j] += load(query + i) * load(entries[t + j] + at + i);
    } else {
#if defined(__AVX512BF16__)
      for (; i + kPairs <= shape.key_dim; i += kPairs)
        for (int64_t j = 0; j < kLanes; j++)
          sums[j] = add_products(sums[j], load_pairs(query + i), load_pairs(entries[t + j] + at + i));
      if (const int64_t rest = shape.key_dim - i; rest > 0)
        for (int64_t j = 0; j < kLanes; j++)
          sums[j] = add_products(sums[j], load_pairs(query + i, rest), load_pairs(entries[t + j] + at + i, rest));
      i = shape.key_dim;
#endif
    }
    Lanes result = totals(sums);
    for (; i < shape.key_dim; i++)
      for (int64_t j = 0; j < kLanes; j++) result[j] += query[i] * static_cast<float>(entries[t + j][at + i]);
    return result;
  }

  void weigh(const float* weights, float* to) const {
    const int64_t at = shape.values(key_head);
    int64_t i = 0;
#if defined(__AVX512BF16__)
    if constexpr (kPaired<C>) {
      C rounded[kStretch];
      for (int64_t t = 0; t < count; t += kLanes) store(load(weights + t), rounded + t);
      for (; i + 2 * kPairs <= shape.value_dim; i += 2 * kPairs) weigh_pairs<2>(rounded, at + i, to + i);
      for (; i + kPairs <= shape.value_dim; i += kPairs) weigh_pairs<1>(rounded, at + i, to + i);
    }
#endif
    for (; i + 4 * kLanes <= shape.value_dim; i += 4 * kLanes) {
      Lanes sums[4] = {};
      for (int64_t t = 0; t < count; t++)
        for (int64_t j = 0; j < 4; j++) sums[j] += load(entries[t] + at + i + j * kLanes) * weights[t];
      for (int64_t j = 0; j < 4; j++) store(sums[j], to + i + j * kLanes);
    }
    for (; i < shape.value_dim; i++) {
      float sum = 0;
      for (int64_t t = 0; t < count; t++) sum += static_cast<float>(entries[t][at + i]) * weights[t];
      to[i] = sum;
    }
  }

#if defined(__AVX512BF16__)
  // N times 32 of the weighed values, those of two tokens at a time.
  template <int N>
  void weigh_pairs(const C* weights, int64_t at, float* to) const {
    Lanes low[N] = {}, high[N] = {};
    for (int64_t t = 0; t < count; t += 2) {
      uint32_t pair;
      std::memcpy(&pair, weights + t, sizeof pair);
      for (int n = 0; n < N; n++) {
        const __m512i one = (__m512i)load_pairs(entries[t] + at + n * kPairs);
        const __m512i other = (__m512i)load_pairs(entries[t + 1] + at + n * kPairs);
        low[n] = add_products(low[n], all_pairs(pair), (__m512bh)_mm512_unpacklo_epi16(one, other));
        high[n] = add_products(high[n], all_pairs(pair), (__m512bh)_mm512_unpackhi_epi16(one, other));
      }
    }
    for (int n = 0; n < N; n++, to += kPairs) {  // of each eight numbers, `low` has the first four
      store(__builtin_shufflevector(low[n], high[n], 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23), to);
      const Lanes last =
          __builtin_shufflevector(low[n], high[n], 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
      store(last, to + kLanes);
    }
  }
#endif
};

struct Task {
  int64_t sequence, key_head, first, end;
};

// Stretches of sequences with one new token, each sequence's and key head's side by side.
std::vector<Task> tasks_of(const std::vector<int64_t>& sequences, const int32_t* contexts, const Shape& shape) {
  std::vector<Task> tasks;
  for (const int64_t s : sequences) {
    const int64_t end = contexts[s];
    const int64_t seen = shape.window > 0 ? std::max<int64_t>(0, end - shape.window) : 0;
    for (int64_t g = 0; g < shape.kv_heads; g++)
      for (int64_t first = seen; first < end; first += kStretch)
        tasks.push_back({s, g, first, std::min(end, first + kStretch)});
  }
  return tasks;
}

// Puts the stretches of one head of one sequence together; states are [n, 2] and values [n, value_dim], `apart` from
// stretch to stretch.
template <class T>
void combine(const float* states, const float* values, int64_t count, int64_t apart, const float* sink, int64_t dim, T* to) {
  float most = sink == nullptr ? kNothing : *sink;
  for (int64_t j = 0; j < count; j++) most = std::max(most, states[j * apart * 2]);
  float sum = sink == nullptr ? 0 : std::exp(*sink - most);
  std::vector<float> whole(dim);
  for (int64_t j = 0; j < count; j++) {
    const float share = std::exp(states[j * apart * 2] - most);
    sum += share * states[j * apart * 2 + 1];
    for (int64_t d = 0; d < dim; d++) whole[d] += share * values[j * apart * dim + d];
  }
  for (int64_t d = 0; d < dim; d++) to[d] = static_cast<T>(whole[d] / sum);
}

// Sequences with one new token each.
template <class T, class C>
void decode(const Step<T, C>& step, const std::vector<int64_t>& sequences) {
  const Shape& shape = step.shape;
  const int64_t heads = shape.heads / shape.kv_heads, padded = (shape.key_dim + kLanes - 1) / kLanes * kLanes;
  const std::vector<Task> tasks = tasks_of(sequences, step.contexts, shape);
  const int64_t count = static_cast<int64_t>(tasks.size());
  std::vector<float> states(count * heads * 2), values(count * heads * shape.value_dim);
  share_out_rows(count, 1, [&](int64_t begin, int64_t stop) {
    std::vector<float> query(padded);
    for (int64_t i = begin; i < stop; i++) {
      const Task& task = tasks[i];
      const T* own = step.q + (step.starts[task.sequence] * shape.heads + task.key_head * heads) * shape.key_dim;
      const Stretch<C> stretch(step, task.sequence, task.key_head, task.first, task.end);
      for (int64_t h = 0, at = i * heads; h < heads; h++, at++, own += shape.key_dim) {
        float &most = states[2 * at], &sum = states[2 * at + 1], *to = &values[at * shape.value_dim];
        if constexpr (kPaired<C>) {
          stretch.attend(own, most, sum, to);
        } else {
          for (int64_t d = 0; d < shape.key_dim; d++) query[d] = static_cast<float>(own[d]);
          stretch.attend(query.data(), most, sum, to);
        }
      }
    }
  });
  for (int64_t i = 0, next; i < count; i = next) {
    const Task& task = tasks[i];
    for (next = i + 1; next < count && tasks[next].sequence == task.sequence && tasks[next].key_head == task.key_head;) next++;
    for (int64_t h = 0; h < heads; h++) {
      const int64_t head = task.key_head * heads + h, at = i * heads + h;
      combine(&states[2 * at], &values[at * shape.value_dim], next - i, heads,
              step.sinks == nullptr ? nullptr : step.sinks + head, shape.value_dim,
              step.out + (step.starts[task.sequence] * shape.heads + head) * shape.value_dim);
    }
  }
}

}  // namespace xinfer
