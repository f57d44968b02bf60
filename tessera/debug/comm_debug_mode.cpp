#include <tessera/comm/world.h>
#include <tessera/debug/comm_debug_mode.h>
#include <tessera/redistribute/plan.h>

#include <ostream>

namespace tessera {

void CommDebugMode::called(const comm::Event& event) {
  const std::string mesh_dim = has_current_world() ? current_world()->name_of(event.group) : "";
  for (Count* count : {&counts_[event.name], &by_mesh_dim_[event.name][mesh_dim]}) {
    ++count->calls;
    count->bytes += event.bytes;
  }
}

void CommDebugMode::reset() {
  counts_.clear();
  by_mesh_dim_.clear();
}

int64_t CommDebugMode::calls(const std::string& name) const {
  const auto found = counts_.find(name);
  return found == counts_.end() ? 0 : found->second.calls;
}

int64_t CommDebugMode::get_total_counts() const {
  int64_t sum = 0;
  for (const auto& [name, count] : counts_) sum += count.calls;
  return sum;
}

int64_t CommDebugMode::total_bytes() const {
  int64_t sum = 0;
  for (const auto& [name, count] : counts_) sum += count.bytes;
  return sum;
}

std::ostream& operator<<(std::ostream& out, const CommDebugMode& mode) {
  const char* separator = "";
  for (const auto& [name, count] : mode.get_comm_counts()) {
    out << separator << name << ' ' << count.calls << " (" << bytes_text(count.bytes) << ')';
    separator = ", ";
  }
  return *separator ? out : out << "none";
}

}  // namespace tessera
