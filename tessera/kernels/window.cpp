#include <tessera/kernels/window.h>

#include <algorithm>

#include <ATen/ATen.h>
#include <c10/util/irange.h>

namespace tessera::kernels {

int64_t Sliding::size(int64_t input, bool ceil) const {
  const int64_t room = input + 2 * padding - extent() - 1;
  if (room < 0) return 0;
  const int64_t windows = (room + (ceil ? stride - 1 : 0)) / stride + 1;
  return ceil && (windows - 1) * stride >= input + padding ? windows - 1 : windows;
}

Range Sliding::reach(const Range& of_result) const {
  return {of_result.offset * stride - padding, (of_result.size - 1) * stride + extent() + 1};
}

namespace {

Range only(const Pieces& pieces) { return pieces.empty() ? Range{} : pieces[0]; }
Pieces pieces_of(const Range& range) { return range.size > 0 ? Pieces{range} : Pieces{}; }

}  // namespace

Halo::Halo(const Spec& input, const Spec& result, int64_t dim, const Reach& reach) : dim_(dim) {
  const DeviceMesh& mesh = input.mesh();
  const Holding has = holding(input, dim),
                wants = [=, of_result = holding(result, dim)](c10::IntArrayRef coordinate) {
                  const Range part = only(of_result(coordinate));
                  return pieces_of(part.size > 0 ? reach(part) : Range{});
                };
  const auto here = *mesh.get_coordinate();
  local_ = only(holding(result, dim)(here));
  needed_ = only(wants(here));
  own_ = only(has(here));
  // Ranks along other mesh dims need the same, so all agree on whether anything is moved.
  const auto mesh_dims = mesh_dims_of(input, dim);
  const int64_t size = input.shape()[dim];
  for (const auto& coordinate : mesh.coordinates_along(mesh_dims)) {
    const Range need = only(wants(coordinate)), own = only(has(coordinate));
    const int64_t begin = std::max<int64_t>(0, need.offset), end = std::min(size, need.end());
    communicates_ |= begin < end && (begin < own.offset || end > own.end());
  }
  const std::vector<StridedSegment> all{{0, 1, 0, 1, size}};
  const auto between = communicates_ ? mesh_dims : std::vector<int64_t>{};
  ways_.emplace_back(mesh, between, dim, has, wants, all);
  ways_.emplace_back(mesh, between, dim, wants, has, all);
}

at::Tensor Halo::fetch(const at::Tensor& input, const c10::Scalar& fill) const {
  if (!communicates_ && needed_ == own_) return input;
  auto shape = input.sizes().vec();
  shape[dim_] = needed_.size;
  const at::Tensor result = at::full(shape, fill, input.options());
  ways_[0](result, input);
  return result;
}

at::Tensor Halo::give_back(const at::Tensor& needed) const {
  if (!communicates_ && needed_ == own_) return needed;
  auto shape = needed.sizes().vec();
  shape[dim_] = own_.size;
  const at::Tensor result = at::zeros(shape, needed.options());
  ways_[1](result, needed, Exchange::kAdd);
  return result;
}

Halos::Halos(const Spec& input, const Spec& result, int64_t first, const std::vector<Reach>& reach) {
  for (const size_t i : c10::irange(reach.size())) {
    const int64_t dim = first + static_cast<int64_t>(i);
    if (!mesh_dims_of(input, dim).empty()) halos_.emplace_back(input, result, dim, reach[i]);
  }
}

bool Halos::communicates() const {
  return std::any_of(halos_.begin(), halos_.end(), [](const Halo& halo) { return halo.communicates(); });
}

bool Halos::idle() const {
  return std::any_of(halos_.begin(), halos_.end(), [](const Halo& halo) { return halo.local().size == 0; });
}

const Halo* Halos::of(int64_t dim) const {
  const auto found =
      std::find_if(halos_.begin(), halos_.end(), [&](const Halo& halo) { return halo.dim() == dim; });
  return found == halos_.end() ? nullptr : &*found;
}

at::Tensor Halos::fetch(at::Tensor input, const c10::Scalar& fill) const {
  // Ranks that exchange along one dim need the same of the others, so corners come along.
  for (const Halo& halo : halos_) input = halo.fetch(input, fill);
  return input;
}

at::Tensor Halos::shaped(const at::Tensor& input) const {
  auto shape = input.sizes().vec();
  for (const Halo& halo : halos_) shape[halo.dim()] = halo.needed().size;
  return at::empty({1}, input.options()).expand(shape);
}

at::Tensor Halos::give_back(at::Tensor needed) const {
  for (auto halo = halos_.rbegin(); halo != halos_.rend(); ++halo) needed = halo->give_back(needed);
  return needed;
}

at::Tensor Halos::cropped(at::Tensor result, const Cover& cover) const {
  for (const Halo& halo : halos_)
    result = result.narrow(halo.dim(), halo.local().offset - cover(halo).offset, halo.local().size);
  return result.contiguous();
}

at::Tensor Halos::padded(at::Tensor result, const Cover& cover) const {
  std::vector<int64_t> pads(2 * result.dim(), 0);
  for (const Halo& halo : halos_) {
    const int64_t last = 2 * (result.dim() - 1 - halo.dim());  // pads count from the last dim
    pads[last] = halo.local().offset - cover(halo).offset;
    pads[last + 1] = cover(halo).end() - halo.local().end();
  }
  const bool none = std::all_of(pads.begin(), pads.end(), [](int64_t pad) { return pad == 0; });
  return none ? result : at::constant_pad_nd(result, pads);
}

}  // namespace tessera::kernels
