// The first example of the README: a matrix product over a 2 x 2 mesh, and its gradient.

#include <tessera/tessera.h>

#include <iostream>

using namespace tessera;

int main() {
  run(4, [] {  // four ranks, threads of this process
    auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
    random::manual_seed(0);  // the same numbers on any mesh
    at::Tensor w = randn({512, 512}, mesh, {Replicate(), Shard(1)}).requires_grad_();
    at::Tensor x = randn({64, 512}, mesh, {Shard(0), Replicate()});
    at::Tensor y = torch::relu(torch::mm(x, w));  // [S(0), S(1)]: nothing was communicated
    y.sum().backward();                           // w.grad(): [P(sum), S(1)]
    if (mesh.get_rank() == 0) std::cout << DTensor(w.grad()) << '\n';
  });
}
