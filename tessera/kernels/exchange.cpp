#include <tessera/comm/packed_all_to_all.h>
#include <tessera/error.h>
#include <tessera/kernels/exchange.h>
#include <tessera/redistribute/memory.h>

#include <algorithm>
#include <numeric>

#include <ATen/ATen.h>
#include <c10/util/irange.h>

namespace tessera::kernels {

namespace {

/// Numbers k from `first` to `last`.
struct Numbers {
  int64_t first, last;
};

int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }

/// Which of k in [0, count) have start + k * step in the range.
Numbers inside(const Range& range, int64_t start, int64_t step, int64_t count) {
  const int64_t low = step > 0 ? range.offset - start : range.end() - 1 - start;
  const int64_t high = step > 0 ? range.end() - 1 - start : range.offset - start;
  return {std::max<int64_t>(0, -floor_div(-low, step)), std::min(count - 1, floor_div(high, step))};
}

/// A part of a local tensor along one dim: from `start`, `count` elements, `step` apart; `step` may be
/// negative.
struct Part {
  int64_t start, step, count;

  at::Tensor of(const at::Tensor& local, int64_t dim) const {
    if (step > 0) return local.slice(dim, start, start + (count - 1) * step + 1, step);
    return local.slice(dim, start + (count - 1) * step, start + 1, -step).flip(dim);
  }
};

}  // namespace

Group group_of(const DeviceMesh& mesh, const std::vector<int64_t>& mesh_dims) {
  std::vector<MeshDim> dims;
  for (const int64_t mesh_dim : mesh_dims) dims.emplace_back(mesh_dim);
  return mesh.get_group(dims);
}

std::vector<int64_t> mesh_dims_of(const Spec& spec, int64_t dim) {
  std::vector<int64_t> result;
  for (const size_t m : c10::irange(spec.placements().size())) {
    if (spec.placement(m).is_shard_like(dim)) result.push_back(static_cast<int64_t>(m));
  }
  return result;
}

std::vector<int64_t> mesh_dims_of(const Spec& spec) {
  std::vector<int64_t> result;
  for (const size_t m : c10::irange(spec.placements().size())) {
    if (spec.placement(m).is_shard_like()) result.push_back(static_cast<int64_t>(m));
  }
  return result;
}

ShardGroup::ShardGroup(const Spec& spec, const std::vector<int64_t>& mesh_dims, int64_t dim)
    : group_(group_of(spec.mesh(), mesh_dims)) {
  const auto coordinates = spec.mesh().coordinates_along(mesh_dims);
  const auto here = *spec.mesh().get_coordinate();
  ranks_.resize(coordinates.size());
  std::iota(ranks_.begin(), ranks_.end(), 0);
  std::stable_sort(ranks_.begin(), ranks_.end(), [&](size_t a, size_t b) {
    return spec.global_offset(coordinates[a])[dim] < spec.global_offset(coordinates[b])[dim];
  });
  for (const size_t rank : ranks_) {
    if (std::equal(here.begin(), here.end(), coordinates[rank].begin())) self_ = shard_sizes_.size();
    shard_sizes_.push_back(spec.local_shape(coordinates[rank])[dim]);
  }
}

std::vector<int64_t> ShardGroup::sizes(const at::Tensor& own, int64_t dim) const {
  const at::Tensor all = new_memory({static_cast<int64_t>(ranks_.size())}, own.options().dtype(at::kLong));
  comm::all_gather_into(all, at::full({1}, own.size(dim), all.options()), group_).wait();
  const at::Tensor known = all.cpu();
  std::vector<int64_t> result;
  for (const size_t rank : ranks_) result.push_back(known.const_data_ptr<int64_t>()[rank]);
  return result;
}

at::Tensor ShardGroup::join(const at::Tensor& own, int64_t dim, const std::vector<int64_t>& sizes) const {
  comm::Tensors outputs(ranks_.size()), received;
  auto shape = own.sizes().vec();
  for (const size_t i : c10::irange(ranks_.size())) {
    shape[dim] = sizes[i];
    received.push_back(outputs[ranks_[i]] = new_memory(shape, own.options()));
  }
  comm::all_gather(outputs, own.contiguous(), group_).wait();
  return at::cat(received, dim);
}

at::Tensor gathered(const at::Tensor& own, const Group& group) {
  auto shape = own.sizes().vec();
  shape.insert(shape.begin(), group->getSize());
  at::Tensor all = new_memory(shape, own.options());
  comm::all_gather_into(all, own.contiguous(), group).wait();
  return all;
}

int64_t ShardGroup::before(const std::vector<int64_t>& sizes) const {
  return std::accumulate(sizes.begin(), sizes.begin() + static_cast<std::ptrdiff_t>(self_), int64_t{0});
}

Holding holding(const Spec& spec, int64_t dim) {
  return [spec, dim](c10::IntArrayRef coordinate) { return spec.local_pieces(coordinate)[dim]; };
}

/// What goes from a rank that has `source` to one that has `target`: segments of both, in the same order.
struct Exchange::Route {
  std::vector<Part> source, target;
};

Exchange::Route Exchange::route(const Pieces& source, const Pieces& target,
                                const std::vector<StridedSegment>& segments) {
  Route result;
  for (const StridedSegment& segment : segments) {
    int64_t before = 0;
    for (const Range& piece : target) {
      const Numbers wanted = inside(piece, segment.to, segment.to_step, segment.count);
      int64_t kept = 0;
      for (const Range& other : source) {
        const Numbers there = inside(other, segment.from, segment.from_step, segment.count);
        const int64_t first = std::max(wanted.first, there.first), last = std::min(wanted.last, there.last);
        if (first <= last) {
          const int64_t count = last - first + 1;
          result.target.push_back(
              {segment.to + first * segment.to_step - piece.offset + before, segment.to_step, count});
          result.source.push_back(
              {segment.from + first * segment.from_step - other.offset + kept, segment.from_step, count});
        }
        kept += other.size;
      }
      before += piece.size;
    }
  }
  return result;
}

Exchange::Exchange(const DeviceMesh& mesh, const std::vector<int64_t>& mesh_dims, int64_t dim,
                   const Holding& source, const Holding& target, const std::vector<StridedSegment>& segments)
    : mesh_(mesh), mesh_dims_(mesh_dims), dim_(dim) {
  const auto here = *mesh.get_coordinate();
  const Pieces mine = source(here), wanted = target(here);
  for (const auto& coordinate : mesh.coordinates_along(mesh_dims)) {
    out_.push_back(route(mine, target(coordinate), segments));
    in_.push_back(route(source(coordinate), wanted, segments));
  }
}

Exchange::~Exchange() = default;
Exchange::Exchange(Exchange&&) noexcept = default;

void Exchange::operator()(const at::Tensor& target, const at::Tensor& source, Mode mode) const {
  std::vector<comm::Tensors> sent(out_.size()), received(in_.size());
  for (const size_t i : c10::irange(out_.size())) {
    for (const Part& part : out_[i].source) sent[i].push_back(part.of(source, dim_));
    for (const Part& part : in_[i].target) received[i].push_back(part.of(target, dim_));
  }
  const Group group = out_.size() < 2 ? Group() : group_of(mesh_, mesh_dims_);
  comm::packed_all_to_all(received, sent, source.options(), group,
                          mode == kAdd ? comm::Write::add : comm::Write::copy);
}

void exchange(const at::Tensor& target, const Spec& target_spec, const at::Tensor& source,
              const Spec& source_spec, int64_t dim, const std::vector<StridedSegment>& segments) {
  const std::vector<int64_t> mesh_dims = mesh_dims_of(source_spec, dim);
  TESSERA_CHECK(mesh_dims == mesh_dims_of(target_spec, dim), "cannot exchange along dim ", dim, " from ",
                source_spec, " to ", target_spec, ": both must be sharded alike.");
  Exchange(source_spec.mesh(), mesh_dims, dim, holding(source_spec, dim), holding(target_spec, dim),
           segments)(target, source);
}

rules::Localize exchanged(int64_t dim, std::vector<StridedSegment> segments, std::optional<at::Scalar> fill) {
  return [=, segments = std::move(segments)](const rules::ChosenSpecs& chosen) {
    rules::LocalCall local;
    const Spec &input = chosen.inputs[0], &output = chosen.outputs[0];
    if (mesh_dims_of(input, dim).empty()) return local;
    local.communicates = true;
    local.compute = [=](const c10::OperatorHandle&, rules::Stack arguments) {
      const at::Tensor x = rules::self_tensor(arguments);
      const at::Tensor result = fill ? at::full(output.local_shape(), *fill, x.options())
                                     : new_memory(output.local_shape(), x.options());
      exchange(result, output, x, input, dim, segments);
      return rules::Stack{result};
    };
    return local;
  };
}

}  // namespace tessera::kernels
