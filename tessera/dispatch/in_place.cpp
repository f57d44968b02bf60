#include <tessera/dispatch/guards.h>
#include <tessera/dispatch/in_place.h>
#include <tessera/dispatch/views.h>
#include <tessera/error.h>
#include <tessera/redistribute/execute.h>
#include <tessera/redistribute/plan_cache.h>

#include <utility>

#include <c10/util/irange.h>

namespace tessera {

namespace {

using c10::IValue;

/// Whether a result is of another dtype than what it is to be written into.
bool is_converted(const OperatorInfo& info, const Arguments& arguments, const Stack& results) {
  for (const size_t i : c10::irange(info.schema.returns().size())) {
    const IValue& target = arguments[info.returned_argument[i]];
    if (results[i].toTensor().scalar_type() != target.toTensor().scalar_type()) return true;
  }
  return false;
}

/// Writes a result into the argument at `position`.
void put(const OperatorInfo& info, const at::Tensor& result, const at::Tensor& target, size_t position) {
  DTensorImpl* impl = DTensorImpl::of(target);
  if (info.reshapes_in_place) {
    impl->take(*DTensorImpl::of(result));
    return;
  }
  if (!impl && implicit_replication()) {
    const DTensorImpl& source = *DTensorImpl::of(result);
    const at::Tensor full = execute(*cached_plan(source.spec(), replicated(source.spec())), source.local());
    if (target.sizes() != full.sizes()) target.resize_(full.sizes());
    target.copy_(full);
    return;
  }
  TESSERA_CHECK_VALUE(
      impl, info.name, ": argument '", info.argument_name(position),
      "' is a plain tensor, but is to be written with a distributed one. Give it a distributed "
      "tensor.");
  TESSERA_CHECK(result.sizes() == target.sizes(), info.name, ": would change the shape of '",
                info.argument_name(position), "' from ", target.sizes(), " to ", result.sizes(),
                ", which a distributed tensor cannot do in place.");
  TESSERA_CHECK(at::canCast(result.scalar_type(), target.scalar_type()), info.name,
                ": its result is of type ", result.scalar_type(), ", which cannot be written into '",
                info.argument_name(position), "' of type ", target.scalar_type(), ".");
  target.copy_(result);
}

}  // namespace

bool run_reallocation(const OperatorInfo& info, Arguments& arguments) {
  const auto argument = [&](const char* name) -> const IValue& {
    return arguments[*info.schema.argumentIndexWithName(name)];
  };
  const at::Tensor self = argument("self").toTensor();
  DTensorImpl* impl = DTensorImpl::of(self);
  if (info.name == "aten::set_.source_Tensor") {
    const at::Tensor source = argument("source").toTensor();
    TESSERA_CHECK(impl && DTensorImpl::of(source), info.name, ": only a distributed tensor can become ",
                  "another distributed one, but '", impl ? "source" : "self", "' is a plain tensor of shape ",
                  impl ? source.sizes() : self.sizes(), ". Distribute it with distribute_tensor first.");
    TESSERA_CHECK(self.scalar_type() == source.scalar_type(), info.name, ": 'source' is of type ",
                  source.scalar_type(), ", but 'self' of type ", self.scalar_type(), ".");
    if (!self.is_same(source)) impl->take(*DTensorImpl::of(source));
  } else if (!impl || info.name != "aten::resize_" || !self.sizes().equals(argument("size").toIntVector()) ||
             !argument("memory_format").isNone()) {
    return false;
  }
  arguments.replace_by({self});
  return true;
}

bool run_functional(const OperatorInfo& info, Arguments& arguments) {
  TESSERA_CHECK(!info.reallocates, info.name,
                ": the memory of a distributed tensor cannot be changed in place.");
  Stack inputs;
  for (const size_t i : c10::irange(info.schema.arguments().size())) {
    if (!info.schema.arguments()[i].is_out()) inputs.push_back(arguments[i]);
  }
  if (info.reshapes_in_place) inputs[0] = as_it_was(inputs[0].toTensor());
  info.functional()->callBoxed(inputs);
  if (info.has_out && !info.is_random && is_converted(info, arguments, inputs)) return false;
  Stack results;
  for (const size_t i : c10::irange(info.schema.returns().size())) {
    results.push_back(arguments[info.returned_argument[i]]);
    put(info, inputs[i].toTensor(), results.back().toTensor(), info.returned_argument[i]);
  }
  arguments.replace_by(std::move(results));
  return true;
}

}  // namespace tessera
