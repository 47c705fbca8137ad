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
    if constexpr (kCoded<C>) {
      const int64_t filled = (count + kLanes - 1) / kLanes * kLanes;
      scales_of(entries, filled, key_head, key_scales);
      scales_of(entries, filled, shape.kv_heads + key_head, value_scales);
    }
  }

  // Of a query, filled with 0 up to whole lanes: the largest score, the sum of weights and the weighed values.
  void attend(const float* query, float& most, float& sum, float* values) const {
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

  // A query's products with sixteen keys, from t on.
  Lanes products(const float* query, int64_t t) const {
    const int64_t at = shape.keys(key_head);
    Lanes sums[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= shape.key_dim; i += kLanes)
      for (int64_t j = 0; j < kLanes; j++) sums[j] += load(query + i) * load(entries[t + j] + at + i);
    Lanes result = totals(sums);
    for (; i < shape.key_dim; i++)
      for (int64_t j = 0; j < kLanes; j++) result[j] += query[i] * static_cast<float>(entries[t + j][at + i]);
    return result;
  }

  void weigh(const float* weights, float* to) const {
    const int64_t at = shape.values(key_head);
    int64_t i = 0;
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
    std::vector<float> query(heads * padded);
    for (int64_t i = begin; i < stop; i++) {
      const Task& task = tasks[i];
      const T* own = step.q + (step.starts[task.sequence] * shape.heads + task.key_head * heads) * shape.key_dim;
      for (int64_t h = 0; h < heads; h++)
        for (int64_t d = 0; d < shape.key_dim; d++) query[h * padded + d] = static_cast<float>(own[h * shape.key_dim + d]);
      const Stretch<C> stretch(step, task.sequence, task.key_head, task.first, task.end);
      for (int64_t h = 0, at = i * heads; h < heads; h++, at++)
        stretch.attend(&query[h * padded], states[2 * at], states[2 * at + 1], &values[at * shape.value_dim]);
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
