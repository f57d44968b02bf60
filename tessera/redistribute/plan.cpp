#include <tessera/error.h>
#include <tessera/placement/text.h>
#include <tessera/redistribute/plan.h>
#include <tessera/redistribute/plan_search.h>

#include <algorithm>

namespace tessera {

int64_t Plan::bytes() const {
  int64_t sum = 0;
  for (const Step& step : steps) sum += step.bytes;
  return sum;
}

double Plan::seconds() const {
  double sum = 0;
  for (const Step& step : steps) sum += step.seconds;
  return sum;
}

bool Plan::communicates() const {
  return std::any_of(steps.begin(), steps.end(), [](const Step& step) { return step.communicates(); });
}

Plan plan(const Spec& from, const Spec& to, const CostModel& costs) {
  TESSERA_CHECK_VALUE(from.mesh() == to.mesh(), "cannot redistribute a tensor from ", from.mesh(), " to ",
                      to.mesh(), ": both specs must have the same mesh");
  TESSERA_CHECK_VALUE(from.shape() == to.shape(), "cannot redistribute a tensor of shape ", from.shape(),
                      " to one of shape ", to.shape(), ": both specs must have the same global shape");
  TESSERA_CHECK_VALUE(from.dtype() == to.dtype(), "cannot redistribute a tensor of dtype ",
                      to_text(from.dtype()), " to dtype ", to_text(to.dtype()),
                      ": both specs must have the same dtype; convert it before or after");
  Plan out{from, to, {}};
  if (from.placements() == to.placements() && from.order() == to.order()) return out;
  if (from.numel() > 0) {
    out.steps = cheapest_steps(from, to, costs);
    return out;
  }
  // There is nothing to be moved, but local shapes may change.
  Step step{StepKind::slice, {}, {}, {}, to, 0, 0};
  for (int64_t i = 0; i < from.mesh().ndim(); ++i) {
    if (from.placement(i) != to.placement(i)) step.mesh_dims.push_back(i);
  }
  out.steps.push_back(std::move(step));
  return out;
}

}  // namespace tessera
