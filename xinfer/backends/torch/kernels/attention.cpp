// Attention to a cache in blocks; of sequences with one new token it is read where it lies.
//
// A layer's cache is [slots, width]: of each slot the keys of all key heads, then their values, which may be the first
// numbers of the keys. Work is shared out by sequence, key head and stretch of the context; stretches are put together
// as in flash-decoding: each has its own maximum, sum and weighed values.

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/tanh.h>
#include <torch/library.h>

#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "lanes.h"

namespace xinfer {
namespace {

constexpr int64_t kStretch = 128;  // tokens; a multiple of kLanes
constexpr int64_t kScores = 1 << 24;  // held at once where torch has no kernel
constexpr float kNothing = -std::numeric_limits<float>::infinity();

struct Shape {
  int64_t heads, kv_heads, key_dim, value_dim, value_at, width, block_size;
  float scale, softcap;
  int64_t window;  // tokens that are seen; 0 for all
};

// What a stretch of a context comes to for one key head.
template <class T>
struct Stretch {
  const Shape& shape;
  int64_t key_head, count = 0;
  const T* entries[kStretch];  // filled up to a multiple of kLanes with the last one

  Stretch(const Shape& shape, const T* pool, const int32_t* blocks, int64_t key_head, int64_t first, int64_t end)
      : shape(shape), key_head(key_head), count(end - first) {
    int64_t block = first / shape.block_size, within = first % shape.block_size;
    for (int64_t t = 0; t < count; t++) {
      entries[t] = pool + (blocks[block] * shape.block_size + within) * shape.width;
      if (++within == shape.block_size) block++, within = 0;
    }
    for (int64_t t = count; t % kLanes != 0; t++) entries[t] = entries[count - 1];
  }

  // Of a query, filled with 0 up to whole lanes: the largest score, the sum of weights and the weighed values.
  void attend(const float* query, float& most, float& sum, float* values) const {
    float weights[kStretch];
    Lanes largest = all(kNothing);
    for (int64_t t = 0; t < count; t += kLanes) {
      Lanes scores = products(query, t) * shape.scale;
      if (shape.softcap > 0)
        for (int64_t i = 0; i < kLanes; i++) scores[i] = std::tanh(scores[i] / shape.softcap) * shape.softcap;
      for (int64_t i = count - t; i < kLanes; i++) scores[i] = kNothing;
      largest = scores > largest ? scores : largest;
      store(scores, weights + t);
    }
    most = kNothing;
    for (int64_t i = 0; i < kLanes; i++) most = std::max(most, largest[i]);
    Lanes sums = {};
    for (int64_t t = 0; t < count; t += kLanes) {
      const Lanes weight = exponential(load(weights + t) - most);
      sums += weight;
      store(weight, weights + t);
    }
    sum = total(sums);
    weigh(weights, values);
  }

  // A query's products with sixteen keys, from t on.
  Lanes products(const float* query, int64_t t) const {
    const int64_t at = key_head * shape.key_dim;
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
    const int64_t at = shape.value_at + key_head * (shape.value_at == 0 ? shape.key_dim : shape.value_dim);
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
  std::vector<float> shares(count);
  for (int64_t j = 0; j < count; j++) {
    shares[j] = std::exp(states[j * apart * 2] - most);
    sum += shares[j] * states[j * apart * 2 + 1];
  }
  for (int64_t d = 0; d < dim; d++) {
    float value = 0;
    for (int64_t j = 0; j < count; j++) value += shares[j] * values[j * apart * dim + d];
    to[d] = static_cast<T>(value / sum);
  }
}

// What a step attends with, as the operator gets it.
struct Step {
  const at::Tensor &q, &kv, &pool, &query_starts, &context_lens, &block_tables;
  const std::optional<at::Tensor>& sinks;
  const Shape& shape;
};

// Sequences with one new token each.
template <class T>
void decode(const Step& step, const std::vector<int64_t>& sequences, at::Tensor& out) {
  const Shape& shape = step.shape;
  const int64_t heads = shape.heads / shape.kv_heads, padded = (shape.key_dim + kLanes - 1) / kLanes * kLanes;
  const T *q = step.q.const_data_ptr<T>(), *pool = step.pool.const_data_ptr<T>();
  const int32_t *starts = step.query_starts.const_data_ptr<int32_t>(), *tables = step.block_tables.const_data_ptr<int32_t>();
  const std::vector<Task> tasks = tasks_of(sequences, step.context_lens.const_data_ptr<int32_t>(), shape);
  const int64_t count = static_cast<int64_t>(tasks.size()), width = step.block_tables.size(1);
  std::vector<float> states(count * heads * 2), values(count * heads * shape.value_dim);
  at::parallel_for(0, count, 1, [&](int64_t begin, int64_t stop) {
    std::vector<float> query(heads * padded);
    for (int64_t i = begin; i < stop; i++) {
      const Task& task = tasks[i];
      const T* own = q + (starts[task.sequence] * shape.heads + task.key_head * heads) * shape.key_dim;
      for (int64_t h = 0; h < heads; h++)
        for (int64_t d = 0; d < shape.key_dim; d++) query[h * padded + d] = static_cast<float>(own[h * shape.key_dim + d]);
      const Stretch<T> stretch(shape, pool, tables + task.sequence * width, task.key_head, task.first, task.end);
      for (int64_t h = 0, at = i * heads; h < heads; h++, at++)
        stretch.attend(&query[h * padded], states[2 * at], states[2 * at + 1], &values[at * shape.value_dim]);
    }
  });
  const at::Tensor sinks = step.sinks.has_value() ? step.sinks->to(at::kFloat) : at::Tensor();
  for (int64_t i = 0, next; i < count; i = next) {
    const Task& task = tasks[i];
    for (next = i + 1; next < count && tasks[next].sequence == task.sequence && tasks[next].key_head == task.key_head;) next++;
    for (int64_t h = 0; h < heads; h++) {
      const int64_t head = task.key_head * heads + h, at = i * heads + h;
      combine(&states[2 * at], &values[at * shape.value_dim], next - i, heads,
              sinks.defined() ? sinks.const_data_ptr<float>() + head : nullptr, shape.value_dim,
              out.mutable_data_ptr<T>() + (starts[task.sequence] * shape.heads + head) * shape.value_dim);
    }
  }
}

// Attention that torch has no kernel for [1, Q, M, V], capped or with sinks, so many scores at a time.
at::Tensor by_hand(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& seen,
                   const std::optional<at::Tensor>& sinks, const Shape& shape) {
  const int64_t groups = shape.kv_heads, queries = q.size(2), keys = k.size(2);
  const at::Tensor own = q.reshape({groups, -1, queries, shape.key_dim}), k_t = k.squeeze(0).unsqueeze(1).transpose(2, 3);
  const at::Tensor values = v.squeeze(0).unsqueeze(1);
  std::vector<at::Tensor> outs;
  const int64_t rows = std::max<int64_t>(4, kScores / (shape.heads * keys));
  for (int64_t start = 0; start < queries; start += rows) {
    const int64_t count = std::min(rows, queries - start);
    at::Tensor scores = at::matmul(own.narrow(2, start, count), k_t).to(at::kFloat) * shape.scale;
    if (shape.softcap > 0) scores = at::tanh(scores / shape.softcap) * shape.softcap;
    scores.masked_fill_(seen.narrow(0, start, count).logical_not(), kNothing);
    if (sinks.has_value()) {
      const at::Tensor more = sinks->to(at::kFloat).view({groups, -1, 1, 1}).expand({groups, own.size(1), count, 1});
      scores = at::softmax(at::cat({scores, more}, -1), -1).narrow(-1, 0, keys);
    } else {
      scores = at::softmax(scores, -1);
    }
    outs.push_back(at::matmul(scores.to(v.scalar_type()), values));
  }
  return at::cat(outs, 2).reshape({1, shape.heads, queries, shape.value_dim});
}

// Several new tokens of one sequence, by torch's own attention.
at::Tensor prefill(const Step& step, int64_t sequence, int64_t start, int64_t count) {
  const Shape& shape = step.shape;
  const int64_t context = step.context_lens.const_data_ptr<int32_t>()[sequence], groups = shape.kv_heads;
  at::Tensor entries;
  if (context == count) {
    entries = step.kv.narrow(0, start, count);  // all are new: nothing need be read back
  } else {
    const at::Tensor places = at::arange(context, at::kLong);
    const at::Tensor blocks = step.block_tables.select(0, sequence).to(at::kLong);
    const at::Tensor slots = blocks.index_select(0, places.floor_divide(shape.block_size)) * shape.block_size +
                             places.remainder(shape.block_size);
    entries = step.pool.index_select(0, slots);
  }
  const int64_t keys = groups * shape.key_dim;
  const at::Tensor k = entries.narrow(1, 0, keys).view({1, context, groups, shape.key_dim}).transpose(1, 2);
  const at::Tensor v = shape.value_at == 0
                           ? k.narrow(3, 0, shape.value_dim)
                           : entries.narrow(1, keys, groups * shape.value_dim)
                                 .view({1, context, groups, shape.value_dim}).transpose(1, 2);
  const at::Tensor q = step.q.narrow(0, start, count).transpose(0, 1).unsqueeze(0);
  const bool plain = shape.softcap == 0 && !step.sinks.has_value();
  const bool causal = plain && count == context && (shape.window == 0 || shape.window >= count);
  std::optional<at::Tensor> seen;
  if (!causal) {
    const at::Tensor last = at::arange(context - count, context, at::kLong).unsqueeze(1);
    const at::Tensor places = at::arange(context, at::kLong);
    seen = places <= last;
    if (shape.window > 0) seen = seen->logical_and(places > last - shape.window);
  }
  const at::Tensor out = plain ? at::scaled_dot_product_attention(q, k, v, seen, 0.0, causal, shape.scale, groups != shape.heads)
                               : by_hand(q, k, v, *seen, step.sinks, shape);
  return out.squeeze(0).transpose(0, 1).reshape({count, -1});
}

at::Tensor attention(const at::Tensor& q, const at::Tensor& kv, const at::Tensor& pool, const at::Tensor& query_starts,
                     const at::Tensor& context_lens, const at::Tensor& block_tables,
                     const std::optional<at::Tensor>& sinks, int64_t block_size, int64_t kv_heads, int64_t value_dim,
                     bool latent, double scale, double softcap, int64_t window) {
  const at::Tensor queries = q.contiguous();
  const Shape shape{queries.size(1), kv_heads, queries.size(2), value_dim, latent ? 0 : kv_heads * queries.size(2),
                    pool.size(1), block_size, static_cast<float>(scale), static_cast<float>(softcap), window};
  const Step step{queries, kv, pool, query_starts, context_lens, block_tables, sinks, shape};
  const int32_t* starts = query_starts.const_data_ptr<int32_t>();
  at::Tensor out = at::empty({queries.size(0), shape.heads * value_dim}, queries.options());
  std::vector<int64_t> single;
  for (int64_t s = 0; s < context_lens.size(0); s++) {
    const int64_t start = starts[s], count = starts[s + 1] - start;
    if (count == 1) {
      single.push_back(s);
    } else if (count > 1) {
      out.narrow(0, start, count).copy_(prefill(step, s, start, count));
    }
  }
  AT_DISPATCH_SWITCH(pool.scalar_type(), "attention",
                     AT_DISPATCH_CASE(at::kFloat, [&] { decode<scalar_t>(step, single, out); })
                     AT_DISPATCH_CASE(at::kBFloat16, [&] { decode<scalar_t>(step, single, out); })
                     AT_DISPATCH_CASE(at::kHalf, [&] { decode<scalar_t>(step, single, out); }));
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(xinfer, library) {
  library.def(
      "attention(Tensor q, Tensor kv, Tensor pool, Tensor query_starts, Tensor context_lens, Tensor block_tables, "
      "Tensor? sinks, int block_size, int kv_heads, int value_dim, bool latent, float scale, float softcap, int window) "
      "-> Tensor");
}

TORCH_LIBRARY_IMPL(xinfer, CPU, library) {
  library.impl("attention", TORCH_FN(attention));
}

}  // namespace xinfer
