#include <tessera/nn/attachment.h>

namespace tessera {

namespace {
constexpr const char* kName = "tessera";
}

Attachment* find_attachment(const torch::nn::Module& module) {
  const auto children = module.named_children();
  const auto* found = children.find(kName);
  return found ? dynamic_cast<Attachment*>(found->get()) : nullptr;
}

Attachment& attachment(torch::nn::Module& module) {
  if (Attachment* known = find_attachment(module)) return *known;
  return *module.register_module(kName, std::make_shared<Attachment>());
}

}  // namespace tessera
