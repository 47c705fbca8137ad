// Attention to a cache in blocks, of all sequences of a step.
//
// A layer's cache is [slots, width]: of each slot the keys of all key heads, then their values, which may be the first
// numbers of the keys. Where these are codes, their scales come before them (see `kCoded`).

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <optional>
#include <vector>

#include "decode.h"
#include "prefill.h"

namespace xinfer {
namespace {

at::Tensor attention(const at::Tensor& q, const at::Tensor& pool, const at::Tensor& query_starts,
                     const at::Tensor& context_lens, const at::Tensor& block_tables,
                     const std::optional<at::Tensor>& sinks, int64_t block_size, int64_t kv_heads, int64_t value_dim,
                     bool latent, double scale, double softcap, int64_t window) {
  const at::Tensor queries = q.contiguous();
  const bool coded = pool.element_size() == 1;
  TORCH_CHECK(!coded || !latent, "keys that are values too are not kept as codes");
  const int64_t key_at = coded ? 2 * kv_heads * sizeof(float) : 0;
  const Shape shape{queries.size(1), kv_heads, queries.size(2), value_dim, key_at,
                    latent ? key_at : key_at + kv_heads * queries.size(2), pool.size(1), block_size,
                    static_cast<float>(scale), static_cast<float>(softcap), window};
  const std::optional<at::Tensor> wide = sinks.has_value() ? std::make_optional(sinks->to(at::kFloat)) : std::nullopt;
  const int32_t* starts = query_starts.const_data_ptr<int32_t>();
  at::Tensor out = at::empty({queries.size(0), shape.heads * value_dim}, queries.options());
  std::vector<int64_t> single, several;
  for (int64_t i = 0; i < context_lens.size(0); i++) {
    const int32_t count = starts[i + 1] - starts[i];
    if (count > 0) (count == 1 ? single : several).push_back(i);
  }
  const auto attend = [&]<class T, class C>(T, C) {
    const Step<T, C> step{shape,
                       queries.const_data_ptr<T>(),
                       pool.const_data_ptr<C>(),
                       starts,
                       context_lens.const_data_ptr<int32_t>(),
                       block_tables.const_data_ptr<int32_t>(),
                       block_tables.size(1),
                       wide.has_value() ? wide->const_data_ptr<float>() : nullptr,
                       out.mutable_data_ptr<T>()};
    decode(step, single);
    prefill(step, several);
  };
  const auto attend_to = [&]<class T>(T number) {
    if (pool.scalar_type() == at::kChar) attend(number, int8_t());
    else if (pool.scalar_type() == at::kFloat8_e4m3fn) attend(number, at::Float8_e4m3fn());
    else attend(number, number);
  };
  if (queries.scalar_type() == at::kFloat) attend_to(float());
  else if (queries.scalar_type() == at::kBFloat16) attend_to(at::BFloat16());
  else attend_to(at::Half());
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(xinfer, library) {
  library.def(
      "attention(Tensor q, Tensor pool, Tensor query_starts, Tensor context_lens, Tensor block_tables, "
      "Tensor? sinks, int block_size, int kv_heads, int value_dim, bool latent, float scale, float softcap, int window) "
      "-> Tensor");
}

TORCH_LIBRARY_IMPL(xinfer, CPU, library) {
  library.impl("attention", TORCH_FN(attention));
}

}  // namespace xinfer
