#include <tessera/placement/text.h>
#include <tessera/redistribute/plan.h>
#include <tessera/redistribute/plan_text.h>

#include <array>
#include <iomanip>
#include <iterator>
#include <ostream>
#include <sstream>

namespace tessera {

namespace {

std::string mesh_dim_text(const DeviceMesh& mesh, int64_t mesh_dim) {
  return mesh.mesh_dim_names().empty() ? std::to_string(mesh_dim) : mesh.mesh_dim_names()[mesh_dim];
}

std::string text(double value, int digits) {
  std::ostringstream out;
  out << std::fixed << std::setprecision(digits) << value;
  return out.str();
}

std::string layout_text(const Spec& spec) {
  std::string out = to_text(spec.placements());
  if (spec.order().empty()) return out;
  out += " order (";
  for (size_t i = 0; i < spec.order().size(); ++i) {
    out += (i == 0 ? "" : ", ") + mesh_dim_text(spec.mesh(), spec.order()[i]);
  }
  return out + ")";
}

std::string tensor_dims_text(const Step& step) {
  std::string out;
  for (const int64_t d : step.tensor_dims) out += (out.empty() ? "dim " : ",") + std::to_string(d);
  return out;
}

}  // namespace

std::string bytes_text(int64_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  auto value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < std::size(kUnits)) value /= 1024, ++unit;
  return text(value, unit == 0 ? 0 : 1) + " " + kUnits[unit];
}

std::string seconds_text(double seconds) {
  if (seconds >= 1) return text(seconds, 1) + " s";
  if (seconds >= 1e-3) return text(seconds * 1e3, 1) + " ms";
  return text(seconds * 1e6, 1) + " us";
}

std::string_view name(StepKind kind) {
  constexpr std::string_view kNames[] = {"all_gather", "all_reduce", "reduce_scatter", "all_to_all",
                                         "slice",      "to_partial", "rescale"};
  return kNames[static_cast<size_t>(kind)];
}

std::ostream& operator<<(std::ostream& out, const Plan& plan) { return out << plan.str(); }

std::string Plan::str() const {
  std::ostringstream out;
  out << layout_text(from) << " -> " << layout_text(to) << "   " << to_text(to.dtype()) << to.shape()
      << " on " << to.mesh();
  // Columns: kind, mesh dims, tensor dims, bytes, cost.
  std::vector<std::array<std::string, 5>> rows;
  std::array<size_t, 5> width{};
  for (const Step& step : steps) {
    std::array<std::string, 5> row{std::string(name(step.kind)), "", tensor_dims_text(step), "local", ""};
    for (const int64_t i : step.mesh_dims)
      row[1] += c10::str(row[1].empty() ? "" : ",", mesh_dim_text(to.mesh(), i));
    if (step.communicates()) {
      row[3] = bytes_text(step.bytes) + "/rank";
      row[4] = seconds_text(step.seconds);
    }
    for (size_t i = 0; i < row.size(); ++i) width[i] = std::max(width[i], row[i].size());
    rows.push_back(std::move(row));
  }
  for (size_t i = 0; i < rows.size(); ++i) {
    std::string line = c10::str("\n  ", i + 1, ".");
    for (size_t j = 0; j < width.size(); ++j) {
      if (width[j] == 0) continue;
      const std::string pad(width[j] - rows[i][j].size(), ' ');
      line += c10::str(j == 0 ? " " : "  ", j < 3 ? rows[i][j] + pad : pad + rows[i][j]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    out << line;
  }
  if (steps.empty()) out << "\n  nothing to do";
  return out.str();
}

}  // namespace tessera
