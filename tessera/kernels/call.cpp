#include <tessera/error.h>
#include <tessera/kernels/call.h>

namespace tessera::kernels {

Stack call_operator(const c10::OperatorHandle& op, Stack arguments) {
  op.callBoxed(arguments);
  return arguments;
}

bool NamedArguments::has(const char* name) const {
  const auto position = schema_.argumentIndexWithName(name);
  return position && !values_[*position].isNone();
}

c10::IValue& NamedArguments::operator[](const char* name) const {
  const auto position = schema_.argumentIndexWithName(name);
  TESSERA_CHECK(position, schema_.name(), ": has no argument '", name, "'.");
  return values_[*position];
}

at::Tensor NamedArguments::tensor(const char* name) const {
  return has(name) ? (*this)[name].toTensor() : at::Tensor();
}

}  // namespace tessera::kernels
