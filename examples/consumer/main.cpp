#include <tessera/tessera.h>

#include <cstdlib>
#include <iostream>

#include <ATen/ATen.h>

using namespace tessera;

int main() {
  bool ok = true;
  run(4, [&] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
    at::Tensor tensor = at::full({3}, static_cast<float>(get_rank()));
    comm::all_reduce(tensor, c10d::ReduceOp::SUM, mesh.get_group("tp")).wait();
    const Spec spec(mesh, {Shard(0), Replicate()}, {6, 4});
    if (get_rank() == 3) {
      std::cout << spec << ": rank 3 holds " << spec.local_shape() << " at " << spec.global_offset() << '\n';
      ok = tensor[0].item<float>() == 5 && spec.local_shape() == at::IntArrayRef({3, 4});
    }
  });
  return ok ? EXIT_SUCCESS : EXIT_FAILURE;
}
