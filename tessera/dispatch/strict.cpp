#include <tessera/carried.h>
#include <tessera/dispatch/guards.h>
#include <tessera/dispatch/strict_state.h>
#include <tessera/error.h>

#include <algorithm>
#include <optional>

namespace tessera {

namespace {

HostLanguage& host_language_slot() {
  static HostLanguage value;
  return value;
}

}  // namespace

Strict::Strict(StrictOptions options)
    : state_(std::make_unique<State>(std::move(options))),
      guard_(state_->options.level, state_->options.local),
      scope_(state_.get()) {
  TESSERA_CHECK_VALUE(state_->options.above >= 0, "Strict: `above` is ", state_->options.above,
                      " bytes: expected 0 or more.");
  Carried<State*, Strict>::push(state_.get());
}
Strict::~Strict() { Carried<State*, Strict>::pop(); }

const StrictOptions& Strict::options() const { return state_->options; }
const std::vector<ImplicitMove>& Strict::moves() const { return state_->moves(); }

int64_t Strict::calls() const {
  int64_t sum = 0;
  for (const ImplicitMove& move : moves()) sum += move.calls;
  return sum;
}

int64_t Strict::bytes() const {
  int64_t sum = 0;
  for (const ImplicitMove& move : moves()) sum += move.bytes;
  return sum;
}

Strict::State* Strict::current() {
  State* innermost = ThreadScope<State*, Strict>::current();
  if (!innermost) innermost = Carried<State*, Strict>::find_or(nullptr);
  if (innermost || implicit_communication() == ImplicitCommunication::allowed) return innermost;
  // Of guards that are no Strict, and of the environment: what was warned about is remembered for the thread.
  thread_local State everything(StrictOptions{});
  return &everything;
}

bool Strict::State::concerns(const DeviceMesh& mesh, c10::ArrayRef<int64_t> mesh_dims, int64_t bytes) const {
  if (options.above > 0 && bytes <= options.above) return false;
  if (options.mesh_dims.empty()) return true;
  const auto& names = mesh.mesh_dim_names();
  return std::any_of(mesh_dims.begin(), mesh_dims.end(), [&](int64_t dim) {
    const auto& wanted = options.mesh_dims;
    return std::find(wanted.begin(), wanted.end(), std::to_string(dim)) != wanted.end() ||
           (!names.empty() && std::find(wanted.begin(), wanted.end(), names[dim]) != wanted.end());
  });
}

bool Strict::State::concerns(const Plan& plan) const {
  if (!plan.communicates() && !implicit_communication_is_strict()) return false;
  return std::any_of(plan.steps.begin(), plan.steps.end(), [&](const Step& step) {
    return step.communicates() == plan.communicates() &&
           concerns(step.after.mesh(), step.mesh_dims, plan.bytes());
  });
}

bool Strict::State::count(ImplicitMove move) {
  const auto [found, is_new] = index_.try_emplace({move.call, move.what, move.location}, moves_.size());
  if (is_new) {
    moves_.push_back(std::move(move));
  } else {
    moves_[found->second].calls += move.calls;
    moves_[found->second].bytes += move.bytes;
  }
  return is_new;
}

void set_host_language(HostLanguage language) { host_language_slot() = language; }
const HostLanguage& host_language() { return host_language_slot(); }

}  // namespace tessera
