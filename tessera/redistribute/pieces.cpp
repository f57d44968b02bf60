#include <tessera/comm/joined.h>
#include <tessera/redistribute/pieces.h>

#include <vector>

#include <ATen/ATen.h>

namespace tessera {

namespace {

void copy_into(const at::Tensor& tensor, c10::ArrayRef<Pieces> pieces, const at::Tensor& values, size_t dim) {
  if (values.numel() == 0) return;
  if (dim == pieces.size()) {
    tensor.copy_(values);
    return;
  }
  const auto d = static_cast<int64_t>(dim);
  int64_t done = 0;
  for (const Range& range : pieces[dim]) {
    copy_into(tensor.narrow(d, range.offset, range.size), pieces, values.narrow(d, done, range.size),
              dim + 1);
    done += range.size;
  }
}

}  // namespace

at::Tensor select_pieces(at::Tensor tensor, c10::ArrayRef<Pieces> pieces) {
  for (size_t dim = 0; dim < pieces.size(); ++dim) {
    const auto d = static_cast<int64_t>(dim);
    if (pieces[dim].size() > 1) {
      std::vector<at::Tensor> parts;
      for (const Range& range : pieces[dim]) parts.push_back(tensor.narrow(d, range.offset, range.size));
      tensor = joined(parts, d);
    } else {
      const Range range = pieces[dim].empty() ? Range{} : pieces[dim].front();
      if (range.size != tensor.size(d)) tensor = tensor.narrow(d, range.offset, range.size);
    }
  }
  return tensor;
}

void copy_into_pieces(const at::Tensor& tensor, c10::ArrayRef<Pieces> pieces, const at::Tensor& values) {
  copy_into(tensor, pieces, values, 0);
}

}  // namespace tessera
