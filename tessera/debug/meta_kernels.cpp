#include <tessera/debug/meta_kernels.h>

#include <array>
#include <mutex>
#include <tuple>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <ATen/OpMathType.h>
#include <torch/library.h>

namespace tessera {

namespace {

at::Tensor like(const at::Tensor& tensor) { return at::empty_like(tensor, at::MemoryFormat::Contiguous); }

at::Tensor index_select(const at::Tensor& self, int64_t dim, const at::Tensor& index) {
  auto shape = self.sizes().vec();
  if (self.dim() > 0) shape[at::maybe_wrap_dim(dim, self.dim())] = index.numel();
  return at::empty(shape, self.options());
}

at::Tensor where(const at::Tensor& condition, const at::Tensor& self, const at::Tensor& other) {
  const auto shape = at::infer_size(condition.sizes(), at::infer_size(self.sizes(), other.sizes()));
  return at::empty(shape, self.options().dtype(at::result_type(self, other)));
}

at::Tensor logical(const at::Tensor& self, const at::Tensor& other) {
  return at::empty(at::infer_size(self.sizes(), other.sizes()), self.options().dtype(at::kBool));
}

at::Tensor logical_not(const at::Tensor& self) {
  return at::empty(self.sizes(), self.options().dtype(at::kBool));
}

at::Tensor absolute(const at::Tensor& self) {
  return at::empty_like(self, self.options().dtype(c10::toRealValueType(self.scalar_type())));
}

at::Tensor extreme(const at::Tensor& self) { return at::empty({}, self.options()); }

at::Tensor flip(const at::Tensor& self, at::IntArrayRef /*dims*/) { return at::empty_like(self); }

at::Tensor rsub(const at::Tensor& self, const at::Tensor& other, const at::Scalar& /*alpha*/) {
  return at::empty(at::infer_size(self.sizes(), other.sizes()),
                   self.options().dtype(at::result_type(self, other)));
}

at::Tensor embedding_dense_backward(const at::Tensor& grad, const at::Tensor& /*indices*/,
                                    int64_t num_weights, int64_t /*padding_idx*/, bool /*scale*/) {
  return at::empty({num_weights, grad.size(-1)}, grad.options());
}

using ThreeTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

ThreeTensors native_layer_norm(const at::Tensor& input, at::IntArrayRef normalized_shape,
                               const std::optional<at::Tensor>& /*weight*/,
                               const std::optional<at::Tensor>& /*bias*/, double /*eps*/) {
  auto shape = input.sizes().vec();
  for (size_t i = 0; i < normalized_shape.size(); ++i) shape[shape.size() - 1 - i] = 1;
  const auto options = input.options().dtype(at::toOpMathType(input.scalar_type()));
  const bool mixed = options.dtype() != input.dtype();  // then the kernel of the CPU keeps the input's
  const auto statistics = mixed ? input.options() : options;
  return {like(input), at::empty(shape, statistics), at::empty(shape, statistics)};
}

ThreeTensors native_layer_norm_backward(const at::Tensor& /*grad_out*/, const at::Tensor& input,
                                        at::IntArrayRef normalized_shape, const at::Tensor& /*mean*/,
                                        const at::Tensor& /*rstd*/, const std::optional<at::Tensor>& weight,
                                        const std::optional<at::Tensor>& /*bias*/,
                                        std::array<bool, 3> output_mask) {
  const auto of_weight = weight && weight->defined() ? weight->options() : input.options();
  ThreeTensors result;
  if (output_mask[0]) std::get<0>(result) = like(input);
  if (output_mask[1]) std::get<1>(result) = at::empty(normalized_shape, of_weight);
  if (output_mask[2]) std::get<2>(result) = at::empty(normalized_shape, of_weight);
  return result;
}

/// In memory as [batch, length, heads, size], of [batch, heads, length, size].
at::Tensor attended(const at::Tensor& like, int64_t size) {
  return at::empty({like.size(0), like.size(2), like.size(1), size}, like.options()).transpose(1, 2);
}

std::tuple<at::Tensor, at::Tensor> flash_attention(const at::Tensor& query, const at::Tensor& /*key*/,
                                                   const at::Tensor& value, double /*dropout_p*/,
                                                   bool /*is_causal*/,
                                                   const std::optional<at::Tensor>& /*attn_mask*/,
                                                   std::optional<double> /*scale*/) {
  const auto wide = query.options().dtype(at::toOpMathType(query.scalar_type()));
  return {attended(query, value.size(3)),
          at::empty({query.size(0), query.size(2), query.size(1)}, wide).transpose(1, 2)};
}

ThreeTensors flash_attention_backward(const at::Tensor& /*grad_out*/, const at::Tensor& query,
                                      const at::Tensor& key, const at::Tensor& value,
                                      const at::Tensor& /*out*/, const at::Tensor& /*logsumexp*/,
                                      double /*dropout_p*/, bool /*is_causal*/,
                                      const std::optional<at::Tensor>& /*attn_mask*/,
                                      std::optional<double> /*scale*/) {
  return {attended(query, query.size(3)), attended(key, key.size(3)), attended(value, value.size(3))};
}

std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double /*p*/,
                                                  std::optional<bool> /*train*/) {
  return {like(input), at::empty(input.sizes(), input.options().dtype(at::kBool))};
}

at::Tensor native_dropout_backward(const at::Tensor& grad, const at::Tensor& /*mask*/, double /*scale*/) {
  return like(grad);
}

}  // namespace

void register_meta_kernels() {
  static std::once_flag once;
  std::call_once(once, [] {
    static auto& library = *new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::Meta, __FILE__,
                                               __LINE__);  // never undone
    const auto add = [&](const char* name, const char* overload, auto&& function) {
      const auto op =
          c10::Dispatcher::singleton().findSchemaOrThrow((std::string("aten::") + name).c_str(), overload);
      const std::string full = *overload ? c10::str(name, ".", overload) : name;
      if (!op.hasKernelForDispatchKey(c10::DispatchKey::Meta)) library.impl(full.c_str(), function);
    };
    add("index_select", "", index_select);
    add("where", "self", where);
    add("abs", "", absolute);
    add("max", "", extreme);
    add("min", "", extreme);
    add("flip", "", flip);
    add("rsub", "Tensor", rsub);
    for (const char* name : {"logical_and", "logical_or", "logical_xor"}) add(name, "", logical);
    add("logical_not", "", logical_not);
    add("embedding_dense_backward", "", embedding_dense_backward);
    add("native_layer_norm", "", native_layer_norm);
    add("native_layer_norm_backward", "", native_layer_norm_backward);
    add("_scaled_dot_product_flash_attention_for_cpu", "", flash_attention);
    add("_scaled_dot_product_flash_attention_for_cpu_backward", "", flash_attention_backward);
    add("native_dropout", "", native_dropout);
    add("native_dropout_backward", "", native_dropout_backward);
  });
}

}  // namespace tessera
