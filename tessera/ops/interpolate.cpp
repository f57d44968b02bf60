#include <tessera/ops/planes.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include <ATen/native/UpSample.h>
#include <c10/util/irange.h>

namespace tessera::ops {

namespace {

/// How positions between those of the input are filled. Smooth ones, the last, are those
/// against aliasing.
enum class Filter { nearest, nearest_exact, linear, cubic, smooth_linear, smooth_cubic, smooth_lanczos };

/// One dim of a call.
struct Dim {
  int64_t input, result;
  bool align_corners;
  std::optional<double> scale;  // as the call says it

  bool is_same_size() const { return input == result; }
  bool is_kept() const { return is_same_size() && (!scale || *scale == 1); }
};

/// As libtorch computes them, in the precision that it computes them in: T.
template <typename T>
Taps linear_taps(const Dim& dim, int64_t position) {
  const T ratio =
      at::native::area_pixel_compute_scale<T>(dim.input, dim.result, dim.align_corners, dim.scale);
  int64_t first = 0, second = 0;
  T of_first = 0, of_second = 0;
  at::native::compute_source_index_and_lambda(first, second, of_first, of_second, ratio, position, dim.input,
                                              dim.result, dim.align_corners);
  return {{first, of_first}, {second, of_second}};
}

template <typename T>
Taps cubic_taps(const Dim& dim, int64_t position) {
  const T ratio =
      at::native::area_pixel_compute_scale<T>(dim.input, dim.result, dim.align_corners, dim.scale);
  const T source = at::native::area_pixel_compute_source_index<T>(ratio, position, dim.align_corners, true);
  int64_t below = 0;
  T beyond = 0, weights[4];
  at::native::guard_index_and_lambda(source, dim.input, below, beyond);
  at::native::get_cubic_upsample_coefficients<T>(weights, beyond);
  Taps taps;
  for (const int64_t k : c10::irange(4))
    taps.push_back({std::clamp<int64_t>(below - 1 + k, 0, dim.input - 1), weights[k]});
  return taps;
}

/// A filter against aliasing: how far it reaches at a scale of 1, and its weight at a distance.
template <typename T>
struct Smooth {
  T radius;
  T (*weight)(T);
};
template <typename T>
Smooth<T> smooth(Filter filter) {
  switch (filter) {
    case Filter::smooth_linear:
      return {1, [](T x) { return std::max<T>(0, 1 - std::abs(x)); }};
    case Filter::smooth_cubic:
      return {2, [](T x) {
                constexpr T a = -0.5;
                x = std::abs(x);
                if (x < 1) return at::native::cubic_convolution1<T>(x, a);
                return x < 2 ? at::native::cubic_convolution2<T>(x, a) : T(0);
              }};
    default:
      return {3, [](T x) {
                auto sinc = [](T y) {
                  y *= std::numbers::pi_v<T>;
                  return y == 0 ? T(1) : std::sin(y) / y;
                };
                return std::abs(x) < 3 ? sinc(x) * sinc(x / 3) : T(0);
              }};
  }
}

/// The filter is stretched where the result is smaller; weights together are 1.
template <typename T>
Taps smooth_taps(const Smooth<T>& filter, const Dim& dim, int64_t position) {
  const T ratio =
      at::native::area_pixel_compute_scale<T>(dim.input, dim.result, dim.align_corners, dim.scale);
  const T stretch = std::max<T>(ratio, 1), radius = filter.radius * stretch;
  const auto center = static_cast<T>(ratio * (static_cast<double>(position) + 0.5));
  const auto first = std::max<int64_t>(static_cast<int64_t>(center - radius + 0.5), 0);
  const auto end = std::min(static_cast<int64_t>(center + radius + 0.5), dim.input);
  Taps taps;
  T sum = 0;
  for (const int64_t i : c10::irange(first, std::max(first, end))) {
    const T weight = filter.weight(static_cast<T>((static_cast<T>(i) - center + 0.5) * (1 / stretch)));
    taps.push_back({i, weight});
    sum += weight;
  }
  for (Tap& tap : taps) {
    if (sum != 0) tap.weight = static_cast<T>(tap.weight) / sum;
  }
  if (taps.empty()) taps.push_back({std::min(first, dim.input - 1), 0});
  return taps;
}

template <typename T>
std::function<Taps(int64_t)> taps_of(Filter filter, const Dim& dim) {
  if (dim.is_kept()) return [](int64_t position) -> Taps { return {{position}}; };
  switch (filter) {
    case Filter::nearest:
      return [=](int64_t position) -> Taps {
        return {{at::native::nearest_idx(position, dim.input, dim.result, dim.scale)}};
      };
    case Filter::nearest_exact:
      return [=](int64_t position) -> Taps {
        return {{at::native::nearest_exact_idx(position, dim.input, dim.result, dim.scale)}};
      };
    case Filter::linear:
      return [=](int64_t position) { return linear_taps<T>(dim, position); };
    case Filter::cubic:
      return [=](int64_t position) { return cubic_taps<T>(dim, position); };
    default:
      return
          [=, filter = smooth<T>(filter)](int64_t position) { return smooth_taps<T>(filter, dim, position); };
  }
}

std::optional<std::vector<LinearMap>> maps(Filter filter, const OpCall& call, c10::IntArrayRef sizes) {
  const Shape results = call.integers("output_size");
  const size_t inner = sizes.size();
  if (results.size() != inner) return std::nullopt;
  // There libtorch gives all rows the weights of the first one, and so shall we: by the operator itself.
  if (filter >= Filter::smooth_linear && results.back() == 1) return std::nullopt;
  const std::vector<std::string_view> scales =
      inner == 1 ? std::vector<std::string_view>{"scales"}
                 : std::vector<std::string_view>{"scales_d", "scales_h", "scales_w"};
  std::vector<LinearMap> all;
  for (const size_t i : c10::irange(inner)) {
    if (sizes[i] < 1 || results[i] < 1) return std::nullopt;
    Dim dim{sizes[i], results[i], call.position("align_corners") && call.flag("align_corners"), std::nullopt};
    const std::string_view name = scales[scales.size() - inner + i];
    if (call.has(name)) dim.scale = call.value(name).toDouble();
    // libtorch does not agree with itself whether such a scale counts.
    if (filter >= Filter::cubic && dim.is_same_size() && !dim.is_kept()) return std::nullopt;
    const bool is_double = call.tensors[0].dtype() == at::kDouble;
    all.push_back({dim.result, is_double ? taps_of<double>(filter, dim) : taps_of<float>(filter, dim)});
  }
  return all;
}

/// Operators by the number of spatial dims.
struct Operators {
  Filter filter;
  std::vector<std::pair<int64_t, std::string>> names;
};

/// CPUs lack kernels of the smaller floats.
bool no_smooth_image(Dtypes dtypes) {
  return dtypes[0] != at::kByte && (not_one_float(dtypes) || at::isReducedFloatingType(dtypes[0]));
}

}  // namespace

Table interpolate_rules() {
  const Operators all[] = {
      {Filter::nearest, {{1, "upsample_nearest1d"}, {2, "upsample_nearest2d"}, {3, "upsample_nearest3d"}}},
      {Filter::nearest_exact,
       {{1, "_upsample_nearest_exact1d"},
        {2, "_upsample_nearest_exact2d"},
        {3, "_upsample_nearest_exact3d"}}},
      {Filter::linear, {{1, "upsample_linear1d"}, {2, "upsample_bilinear2d"}, {3, "upsample_trilinear3d"}}},
      {Filter::cubic, {{2, "upsample_bicubic2d"}}},
      {Filter::smooth_linear, {{2, "_upsample_bilinear2d_aa"}}},
      {Filter::smooth_cubic, {{2, "_upsample_bicubic2d_aa"}}},
      {Filter::smooth_lanczos, {{2, "_upsample_lanczos2d_aa"}}},
  };
  Table table;
  for (const auto& [filter, names] : all) {
    const bool copies = filter == Filter::nearest || filter == Filter::nearest_exact;
    for (const auto& [inner, name] : names) {
      const Separable op{
          inner,
          copies,
          [filter](const OpCall& call, c10::IntArrayRef sizes) { return maps(filter, call, sizes); },
          {"output_size", "align_corners", "scales", "scales_d", "scales_h", "scales_w"}};
      table.push_back({{name}, separable(op)});
      table.push_back({{name + "_backward"}, separable_backward(op)});
      if (!name.ends_with("_aa")) continue;
      for (Entry* entry : {&table.back() - 1, &table.back()}) entry->rule.may_refuse_dtypes = no_smooth_image;
    }
  }
  return table;
}

}  // namespace tessera::ops
