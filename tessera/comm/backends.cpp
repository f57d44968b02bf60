#include <tessera/comm/builtin_backends.h>
#include <tessera/comm/hierarchical.h>
#include <tessera/comm/shm/backend.h>
#include <tessera/comm/threads/backend.h>
#include <tessera/error.h>

#include <map>
#include <mutex>

namespace tessera {

namespace {

struct Registry {
  std::mutex mutex;
  std::map<std::string, BackendFactory> factories{
      {threads::kBackendName, threads::make_threads_backend},
      {shm::kBackendName, shm::make_shm_backend},
      {"gloo", make_gloo_backend},
      {hierarchical::kBackendName, hierarchical::make_hierarchical_backend},
      {"nccl", make_nccl_backend},
      {"fake", make_fake_backend}};
};

Registry& registry() {
  static Registry instance;
  return instance;
}

}  // namespace

void register_backend(const std::string& name, BackendFactory factory) {
  TESSERA_CHECK_VALUE(!name.empty() && name.find_first_of(":,") == std::string::npos, "\"", name,
                      "\" cannot name a backend: it must not be empty or contain ':' or ','.");
  TESSERA_CHECK_VALUE(factory, "The factory of backend \"", name, "\" is empty.");
  std::lock_guard lock(registry().mutex);
  registry().factories[name] = std::move(factory);
}

c10::intrusive_ptr<c10d::Backend> make_backend(const std::string& name, const BackendRequest& request) {
  BackendFactory factory;
  {
    std::lock_guard lock(registry().mutex);
    const auto& factories = registry().factories;
    const auto found = factories.find(name);
    if (found == factories.end()) {
      std::string known;
      for (const auto& entry : factories) known += (known.empty() ? "" : ", ") + entry.first;
      TESSERA_CHECK_VALUE(false, "There is no backend \"", name, "\". Known are: ", known,
                          ". Add others with tessera::register_backend.");
    }
    factory = found->second;
  }
  return factory(request);
}

}  // namespace tessera
