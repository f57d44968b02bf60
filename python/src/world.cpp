#include <tessera/comm/backends.h>
#include <tessera/comm/collectives.h>
#include <tessera/comm/forward_ad.h>
#include <tessera/comm/run.h>
#include <tessera/comm/world.h>
#include <tessera/error.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <stdexcept>
#include <thread>

#include <ATen/ThreadLocalState.h>

#include "bindings.h"

namespace tessera::python {

namespace {

/// A Python exception on its way from a rank to the caller of `run`. Made, and taken apart again, with
/// the GIL held.
class RankError : public std::runtime_error {
 public:
  explicit RankError(py::error_already_set& error)
      : std::runtime_error(error.what()), error_(std::make_shared<py::error_already_set>(error)) {}
  [[noreturn]] void raise() const { throw py::error_already_set(*error_); }

 private:
  std::shared_ptr<py::error_already_set> error_;
};

/// Runs `ranks`, which waits for other threads, without Python's lock, but looks after signals: `interrupt`
/// is called if one raised an exception, which is thrown in the end.
template <class Ranks, class Interrupt>
void run_interruptibly(const Ranks& ranks, const Interrupt& interrupt) {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  std::exception_ptr failure;
  const at::ThreadLocalState state;
  std::thread thread([&] {
    try {
      const at::ThreadLocalStateGuard guard(state);
      ranks();
    } catch (...) {
      failure = std::current_exception();
    }
    const std::lock_guard lock(mutex);
    done = true;
    changed.notify_one();
  });
  std::exception_ptr signal;
  {
    const py::gil_scoped_release release;
    std::unique_lock lock(mutex);
    while (!changed.wait_for(lock, std::chrono::milliseconds(50), [&] { return done; })) {
      lock.unlock();
      {
        const py::gil_scoped_acquire acquire;
        if (!signal && PyErr_CheckSignals() != 0) {
          signal = std::make_exception_ptr(py::error_already_set());
          interrupt();
        }
      }
      lock.lock();
    }
    lock.unlock();
    thread.join();
  }
  if (signal) std::rethrow_exception(signal);
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  if (!failure) return;
  try {
    std::rethrow_exception(failure);
  } catch (const RankError& error) {
    error.raise();
  }
}

py::list run_ranks(int64_t world_size, const py::object& function, const py::tuple& args, double timeout,
                   const std::string& backend, int threads_per_rank) {
  TESSERA_CHECK_VALUE(timeout > 0 && timeout < 1e9,
                      "run: the timeout must be a positive number of seconds, got ", timeout, ".");
  RunOptions options;
  options.timeout = std::chrono::milliseconds(std::max<int64_t>(1, static_cast<int64_t>(timeout * 1000)));
  options.backend = backend;
  options.threads_per_rank = threads_per_rank;
  py::list results(static_cast<size_t>(std::max<int64_t>(world_size, 0)));
  std::mutex mutex;
  std::vector<std::weak_ptr<World>> worlds;
  auto rank_main = [&] {
    const auto world = current_world();
    {
      const std::lock_guard lock(mutex);
      worlds.push_back(world);
    }
    const py::gil_scoped_acquire acquire;
    try {
      results[world->rank()] = function(*args);
    } catch (py::error_already_set& error) {
      if (py::hasattr(error.value(), "add_note"))
        error.value().attr("add_note")(
            c10::str("This was raised on rank ", world->rank(), " of ", world_size, "."));
      throw RankError(error);
    }
  };
  run_interruptibly([&] { run(world_size, rank_main, options); },
                    [&] {
                      const std::lock_guard lock(mutex);
                      for (const auto& known : worlds) {
                        if (const auto world = known.lock()) return world->report_failure("interrupted");
                      }
                    });
  return results;
}

/// Makes the world of this process that of torch.distributed, by its default group and store. The latter is None if the
/// backend is "fake", whose ranks are not there.
void adopt_process_group(int64_t rank, int64_t size, const py::object& store, double timeout,
                         const std::string& backend) {
  WorldOptions options;
  options.rank = rank;
  options.size = size;
  options.timeout = std::chrono::milliseconds(static_cast<int64_t>(timeout * 1000));
  options.backend = backend;
  if (!store.is_none())
    options.store = c10::intrusive_ptr<c10d::Store>::reclaim_copy(store.cast<c10d::Store*>());
  options.existing_group = [](c10::IntArrayRef ranks, c10::DeviceType) {
    const py::gil_scoped_acquire acquire;
    return to_group(py::module_::import("tessera._world").attr("group_of")(ranks.vec()));
  };
  const py::gil_scoped_release release;
  destroy_process_group();
  init_process_group(std::move(options));
}

/// A group of these processes whose backend is "shm". torch.distributed takes the backend out of it, as it knows how to turn
/// that into an object of Python.
py::object make_shm_group(const py::object& store, int64_t member, const std::vector<int64_t>& ranks,
                          double timeout, const std::string& name) {
  BackendRequest request;
  request.store = c10::intrusive_ptr<c10d::Store>::reclaim_copy(store.cast<c10d::Store*>());
  request.ranks = ranks;
  request.member = member;
  request.name = name;
  request.timeout = std::chrono::milliseconds(static_cast<int64_t>(timeout * 1000));
  Group group;
  {
    const py::gil_scoped_release release;
    group = c10::make_intrusive<c10d::ProcessGroup>(request.store, static_cast<int>(member),
                                                    static_cast<int>(ranks.size()));
    group->setBackend(at::kCPU, c10d::ProcessGroup::BackendType::CUSTOM, make_backend("shm", request));
  }
  return from_group(group);
}

}  // namespace

void ensure_world() { py::module_::import("tessera._world").attr("ensure")(); }

void bind_worlds(py::module_& module) {
  module.def("run_ranks", &run_ranks, py::arg("world_size"), py::arg("function"), py::arg("args"),
             py::arg("timeout"), py::arg("backend"), py::arg("threads_per_rank"));
  module.def("adopt_process_group", &adopt_process_group, py::arg("rank"), py::arg("size"), py::arg("store"),
             py::arg("timeout"), py::arg("backend"));
  module.def("make_shm_group", &make_shm_group, py::arg("store"), py::arg("member"), py::arg("ranks"),
             py::arg("timeout"), py::arg("name"));
  module.def("forget_process_group", [] {
    const py::gil_scoped_release release;
    destroy_process_group();
  });
  module.def(
      "report_failure",
      [](const std::string& reason) {
        const py::gil_scoped_release release;
        if (has_current_world()) current_world()->report_failure(reason);
      },
      py::arg("reason"));
  module.def("is_rank_thread", [] {
    return has_current_world() && (current_world()->is_threads() || current_world()->is_dry_run());
  });
  module.def("shares_process", [] {
    return has_current_world() && current_world()->is_threads() && current_world()->size() > 1;
  });
  module.def(
      "meet", [](const std::string& what) { current_world()->meet(what); }, py::arg("what"));
  module.def("enter_dual_level", &enter_dual_level);
  module.def("exit_dual_level", &exit_dual_level, py::arg("is_failing"));
  module.def("is_in_dual_level", &is_in_dual_level);
  module.def(
      "get_rank",
      [] {
        ensure_world();
        return get_rank();
      },
      "Which of the ranks this is.");
  module.def(
      "get_world_size",
      [] {
        ensure_world();
        return get_world_size();
      },
      "How many ranks there are.");
}

}  // namespace tessera::python
