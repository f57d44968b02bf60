#include <tessera/rules/dim_map.h>
#include <tessera/rules/shape.h>

#include <algorithm>
#include <numeric>

#include <c10/util/irange.h>

namespace tessera::rules {

namespace {

/// The dims that arguments name, counted from the start. Those that the operator lacks name none.
Shape named_dims(const OpCall& call, const Names& names, int64_t ndim) {
  Shape dims;
  for (const std::string& name : names) {
    if (!call.position(name)) continue;
    for (const int64_t dim : call.integers(name)) dims.push_back(wrapped(dim, ndim));
  }
  if (ndim == 0) dims.clear();  // which is then 0 or -1
  return dims;
}

/// A DimMap, of a call.
class Mapped {
 public:
  Mapped(const DimMap& form, const OpCall& call)
      : form_(form), call_(call), spec_(call.tensors[0]), input_(identity(spec_.ndim())) {}

  std::optional<Strategies> strategies() {
    const int64_t ndim = spec_.ndim() - form_.last_dropped;
    if (ndim < 0) return std::nullopt;
    find_dims(ndim);
    Shape unsharded = unsharded_;
    unsharded.insert(unsharded.end(), dropped_.begin(), dropped_.end());
    if (form_.if_sharded && is_sharded_on(spec_, unsharded))
      return Strategies{{}, {}, {}, form_.if_sharded->compute, form_.if_sharded->writes};
    for (const int64_t dim : unsharded) input_[dim] = kUnsharded;
    std::fill(input_.begin() + ndim, input_.end(), kUnsharded);
    write_output(ndim);
    if (!find_results()) return std::nullopt;
    Strategies result{strategies_of({.inputs = {input_},
                                     .outputs = {output_},
                                     .contracted = std::nullopt,
                                     .linear = form_.linear ? linear_tensors(call_, {{call_.name_of(0)}})
                                                            : std::vector<std::vector<size_t>>{},
                                     .keeps_all = !form_.linear}),
                      std::move(results_)};
    if (form_.exchanges && unsharded_.size() == 1) {
      const Placement sharded = Shard(unsharded_[0]);
      result.options.insert(result.options.begin(), Strategy{{sharded}, {sharded}});
    }
    if (!form_.sizes.empty()) {
      result.localize = [position = *call_.position(form_.sizes)](const ChosenSpecs& chosen) {
        return LocalCall{{{position, c10::IValue(chosen.outputs[0].local_shape().vec())}}};
      };
    }
    return result;
  }

 private:
  void find_dims(int64_t ndim) {
    unsharded_ = named_dims(call_, form_.unsharded, ndim);
    if (form_.empty_is_all && unsharded_.empty()) unsharded_ = wrapped(Shape(), ndim);
    dropped_ = named_dims(call_, form_.dropped, ndim);
    if (!form_.only_ones) return;
    const bool is_named =
        std::any_of(form_.dropped.begin(), form_.dropped.end(),
                    [&](const std::string& name) { return call_.position(name).has_value(); });
    if (!is_named) dropped_ = wrapped(Shape(), ndim);
    std::erase_if(dropped_, [&](int64_t dim) { return spec_.shape()[dim] != 1; });
  }

  /// Its letters, and which dim of the input each is: -1 for a new one.
  void write_output(int64_t ndim) {
    if (!form_.order.empty()) {
      for (const int64_t dim : call_.integers(form_.order)) from_.push_back(wrapped(dim, ndim));
    } else {
      for (const int64_t dim : c10::irange(ndim)) {
        if (!contains(dropped_, dim)) from_.push_back(dim);
      }
    }
    if (const Shape two = named_dims(call_, form_.swapped, ndim); two.size() == 2)
      std::swap(from_[two[0]], from_[two[1]]);
    Shape added = named_dims(call_, form_.added, static_cast<int64_t>(from_.size() + form_.added.size()));
    std::sort(added.begin(), added.end());
    for (const int64_t dim : added) from_.insert(from_.begin() + std::min<int64_t>(dim, from_.size()), -1);
    from_.insert(from_.end(), form_.last_added, -1);
  }

  bool find_results() {
    if (form_.is_view || form_.resizes) {
      results_ = computed_results(call_);
      if (results_.empty()) return false;
    } else if (!form_.sizes.empty()) {
      results_ = {{call_.integers(form_.sizes)}};
    } else {
      Shape shape;
      for (const int64_t dim : from_) shape.push_back(dim < 0 ? kLocal : spec_.shape()[dim]);
      results_ = {{shape}};
    }
    const Shape& shape = results_[0].shape;
    if (form_.resizes && shape.size() >= from_.size()) {
      from_.insert(from_.begin(), shape.size() - from_.size(), -1);
      for (const size_t i : c10::irange(shape.size())) {
        if (from_[i] >= 0 && spec_.shape()[from_[i]] != shape[i]) input_[from_[i]] = kUnsharded;
      }
    }
    for (const int64_t dim : from_) output_.push_back(dim < 0 ? kUnsharded : input_[dim]);
    return shape.size() == output_.size();
  }

  const DimMap& form_;
  const OpCall& call_;
  const Spec& spec_;
  Shape unsharded_, dropped_, from_;
  Letters input_, output_;
  std::vector<Result> results_;
};

}  // namespace

std::optional<Strategies> strategies_of(const DimMap& form, const OpCall& call) {
  if (call.tensors.size() != 1) return std::nullopt;
  return Mapped(form, call).strategies();
}

}  // namespace tessera::rules
