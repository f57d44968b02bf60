// Ranks, a mesh, a sharded tensor and the collectives at work. Started by hand it has four ranks, threads
// of one process;
//   torchrun --no-python --nproc-per-node 4 build/examples/tour/tour
// runs the same program with four processes.

#include <tessera/tessera.h>

#include <chrono>
#include <cstdio>
#include <iostream>
#include <sstream>
#include <string>
#include <unistd.h>

#include <ATen/ATen.h>
#include <CLI/CLI.hpp>

namespace {

using namespace tessera;
using c10d::ReduceOp;

bool colours() { return isatty(STDOUT_FILENO) != 0; }

void heading(const std::string& text) {
  std::cout << '\n' << (colours() ? "\033[1m" : "") << text << (colours() ? "\033[0m" : "") << "\n\n";
}

void draw_mesh(const DeviceMesh& mesh) {
  for (int64_t row = 0; row < mesh.size(0); ++row) {
    std::printf("    dp %lld  |", static_cast<long long>(row));
    for (int64_t column = 0; column < mesh.size(1); ++column) {
      std::printf("  rank %lld", static_cast<long long>(mesh.rank_at({row, column})));
    }
    std::printf("\n");
  }
}

/// Each element of a matrix as the ranks that hold it.
void draw_tensor(const Spec& spec) {
  const int64_t rows = spec.shape()[0], columns = spec.shape()[1];
  std::vector<std::string> holders(rows * columns);
  const DeviceMesh& mesh = spec.mesh();
  for (int64_t dp = 0; dp < mesh.size(0); ++dp) {
    for (int64_t tp = 0; tp < mesh.size(1); ++tp) {
      const auto pieces = spec.local_pieces({dp, tp});
      for (const Range& r : pieces[0]) {
        for (const Range& c : pieces[1]) {
          for (int64_t i = r.offset; i < r.end(); ++i) {
            for (int64_t j = c.offset; j < c.end(); ++j)
              holders[i * columns + j] += std::to_string(mesh.rank_at({dp, tp}));
          }
        }
      }
    }
  }
  std::cout << "  " << spec << "\n\n";
  size_t width = 1;
  for (const std::string& holder : holders) width = std::max(width, holder.size());
  for (int64_t i = 0; i < rows; ++i) {
    std::cout << "    ";
    for (int64_t j = 0; j < columns; ++j) {
      const std::string& holder = holders[i * columns + j];
      if (colours()) std::cout << "\033[3" << 1 + (holder[0] - '0') % 6 << 'm';
      std::cout << std::string(width - holder.size() + 1, ' ') << holder;
      if (colours()) std::cout << "\033[0m";
    }
    std::cout << '\n';
  }
  std::cout << "\n    local shapes:";
  for (int64_t dp = 0; dp < mesh.size(0); ++dp) {
    for (int64_t tp = 0; tp < mesh.size(1); ++tp) {
      std::cout << "  rank " << mesh.rank_at({dp, tp}) << ' ' << c10::IntArrayRef(spec.local_shape({dp, tp}));
    }
  }
  std::cout << "\n\n";
}

template <class F>
double milliseconds(F&& call, int repeats) {
  call();
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < repeats; ++i) call();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count() /
         repeats;
}

/// Runs each collective on `bytes` a rank, checks the result and says how long it took. True if all were
/// right.
bool exercise(const Group& group, int64_t bytes) {
  const int64_t n = group->getSize(), me = group->getRank();
  const int64_t part = bytes / 4 / n;
  const auto rank_sum = static_cast<float>(n * (n - 1) / 2);
  const at::Tensor mine = at::full({part}, static_cast<float>(me));
  at::Tensor global = at::empty({part * n}), piece = at::empty({part});
  bool all_right = true;

  auto report = [&](const char* name, double time, bool right) {
    at::Tensor wrong = at::full({1}, right ? 0.0f : 1.0f);
    comm::all_reduce(wrong, ReduceOp::MAX, group).wait();
    right = wrong.item<float>() == 0;
    all_right = all_right && right;
    if (me == 0) {
      std::printf("    %-16s%10.3f ms%10.2f GB/s   %s\n", name, time,
                  static_cast<double>(part * n * 4) / time / 1e6, right ? "right" : "WRONG");
    }
  };
  auto parts_are_ranks = [&](const at::Tensor& tensor) {
    return at::equal(tensor.view({n, part}), at::arange(n).to(at::kFloat).unsqueeze(1).expand({n, part}));
  };
  const int repeats = bytes > (1 << 20) ? 5 : 50;

  double time = milliseconds(
      [&] { comm::all_reduce(global.fill_(static_cast<float>(me)), ReduceOp::SUM, group).wait(); }, repeats);
  report("all_reduce", time, at::equal(global, at::full_like(global, rank_sum)));
  time = milliseconds([&] { comm::all_gather_into(global, mine, group).wait(); }, repeats);
  report("all_gather", time, parts_are_ranks(global));
  time =
      milliseconds([&] { comm::reduce_scatter_from(piece, global, ReduceOp::SUM, group).wait(); }, repeats);
  report("reduce_scatter", time, at::equal(piece, at::full_like(piece, static_cast<float>(n * me))));
  const auto outputs = global.split(part);
  time = milliseconds([&] { comm::all_to_all(outputs, comm::Tensors(n, mine), group).wait(); }, repeats);
  report("all_to_all", time, parts_are_ranks(global));
  time = milliseconds([&] { comm::broadcast(global.fill_(static_cast<float>(me)), n - 1, group).wait(); },
                      repeats);
  report("broadcast", time, at::equal(global, at::full_like(global, static_cast<float>(n - 1))));
  return all_right;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Ranks, a mesh, a sharded tensor and the collectives at work");
  int64_t ranks = 4;
  app.add_option("--ranks", ranks, "How many ranks, where no launcher says it (even)")
      ->check(CLI::Range(2, 8));
  CLI11_PARSE(app, argc, argv);
  if (ranks % 2 != 0) {
    std::cerr << "--ranks: " << ranks << " ranks cannot be a mesh of two rows; give an even number\n";
    return 1;
  }

  bool right = true;
  try {
    launch(ranks, [&] {
      const auto world = current_world();
      const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, world->size() / 2}, {"dp", "tp"});
      if (world->rank() == 0) {
        heading(c10::str(world->size(), " ranks over \"", world->backend(at::kCPU), "\" as ", mesh));
        draw_mesh(mesh);
        heading("Who holds what of a tensor");
        draw_tensor(Spec(mesh, {Shard(0), Shard(1)}, {6, 8}));
        draw_tensor(Spec(mesh, {Replicate(), Shard(1)}, {4, 8}));
        draw_tensor(Spec(mesh, {Shard(0), Shard(0)}, {7, 8}, std::nullopt, at::kBFloat16, /*order=*/{1, 0}));
      }
      for (const int64_t kib : {4, 1024, 16384}) {
        if (world->rank() == 0) heading(c10::str("Collectives on ", kib, " KiB a rank"));
        const bool these_are = exercise(world->group(), kib << 10);
        if (world->rank() == 0) right = right && these_are;
      }
    });
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << '\n';
    return 1;
  }
  return right ? 0 : 1;
}
