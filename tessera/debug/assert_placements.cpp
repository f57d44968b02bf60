#include <tessera/debug/assert_placements.h>
#include <tessera/dispatch/call_text.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/error.h>
#include <tessera/placement/text.h>

namespace tessera {

void assert_placements(const at::Tensor& tensor, Placements placements) {
  TESSERA_CHECK_VALUE(
      tensor.defined() && DTensor::is_dtensor(tensor), "assert_placements: expected a tensor placed ",
      to_text(placements), ", but this one is ",
      tensor.defined() ? "a plain tensor. Distribute it with distribute_tensor." : "not defined.");
  const Spec& spec = DTensor(tensor).spec();
  const Placements expected = normalize(placements, tensor.dim());
  TESSERA_CHECK_VALUE(expected == spec.placements(), "assert_placements: expected ", to_text(expected),
                      ", but the tensor is ", spec,
                      ". To bring it there: ", redistribute_code("x", expected));
}

}  // namespace tessera
