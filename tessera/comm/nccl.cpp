#include <tessera/comm/builtin_backends.h>
#include <tessera/error.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#ifdef USE_C10D_NCCL
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#endif

namespace tessera {

#ifdef USE_C10D_NCCL

c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const BackendRequest& request) {
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = request.timeout;
  options->group_name = request.name;
  options->global_ranks_in_group.assign(request.ranks.begin(), request.ranks.end());
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(request.store, static_cast<int>(request.member),
                                                     static_cast<int>(request.ranks.size()),
                                                     std::move(options));
}

#else

c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const BackendRequest&) {
  TESSERA_CHECK(false,
                "This Tessera was built against a libtorch without CUDA, so it has no \"nccl\" backend. "
                "Use CPU tensors, or build against a libtorch with CUDA.");
  return {};
}

#endif

}  // namespace tessera
