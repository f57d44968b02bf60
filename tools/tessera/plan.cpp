#include "tools/tessera/plan.h"

#include <tessera/debug/dry_run.h>
#include <tessera/debug/explain.h>
#include <tessera/redistribute/plan.h>
#include <tessera/redistribute/plan_text.h>

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <iostream>
#include <map>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "examples/train_gpt/dry_run.h"
#include "tools/tessera/parameter_table.h"

struct PlanCommand::Options {
  gpt::Config model{.vocabulary = 50304, .context = 1024, .width = 768, .heads = 12, .layers = 12};
  int64_t batch = 512, rank = 0, most = 20;
  std::string dtype = "f32", parallel, mesh = "dp=8", table;
  std::string bandwidth, latency, memory;
  double flops = 1e14;
  bool sequence = false, sweep = false;
};

namespace {

using namespace tessera;
using Options = PlanCommand::Options;

/// "25GB", "1.5 us": a number and a unit out of `units`; a number alone is of 1.
double read_quantity(const std::string& text, const std::map<std::string, double>& units,
                     const char* option) {
  const char* begin = text.c_str();
  char* end = nullptr;
  const double number = std::strtod(begin, &end);
  std::string unit(end);
  unit.erase(0, unit.find_first_not_of(' ') == unit.npos ? unit.size() : unit.find_first_not_of(' '));
  const auto found = units.find(unit);
  if (end == begin || !std::isfinite(number) || number < 0 || (!unit.empty() && found == units.end())) {
    std::string known;
    for (const auto& [name, factor] : units) known.append(known.empty() ? "" : ", ").append(name);
    TORCH_CHECK_VALUE(false, option, ": cannot read \"", text, "\"; expected a number and a unit: ", known,
                      ".");
  }
  return unit.empty() ? number : number * found->second;
}

const std::map<std::string, double> kBytes{{"B", 1},         {"KB", 1e3},      {"MB", 1e6},
                                           {"GB", 1e9},      {"TB", 1e12},     {"KiB", 1024.0},
                                           {"MiB", 1 << 20}, {"GiB", 1 << 30}, {"TiB", 1024.0 * (1 << 30)}};
const std::map<std::string, double> kSeconds{{"s", 1}, {"ms", 1e-3}, {"us", 1e-6}, {"ns", 1e-9}};

/// "dp=25GB/s,tp=300GB/s", or one for all dims.
std::map<std::string, double> read_by_dim(const std::string& text, const std::map<std::string, double>& units,
                                          const Layout& mesh, const char* option) {
  std::map<std::string, double> result;
  std::istringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) {
    const size_t equals = part.find('=');
    std::string value = equals == part.npos ? part : part.substr(equals + 1);
    if (value.ends_with("/s")) value.resize(value.size() - 2);
    const double number = read_quantity(value, units, option);
    for (const std::string& name : mesh.mesh_dim_names) {
      if (equals == part.npos || part.substr(0, equals) == name) result[name] = number;
    }
    const bool known = equals == part.npos || result.contains(part.substr(0, equals));
    TORCH_CHECK_VALUE(known, option, ": there is no mesh dim \"", part.substr(0, equals),
                      "\"; there are dp and tp.");
  }
  return result;
}

CostModel cost_model(const Options& options, const Layout& mesh) {
  const auto bandwidths = read_by_dim(options.bandwidth, kBytes, mesh, "--bandwidth");
  const auto latencies = read_by_dim(options.latency, kSeconds, mesh, "--latency");
  CostModel model;
  for (const std::string& name : mesh.mesh_dim_names) {
    LinkCost link = LinkCost::of_backend("fake");
    if (bandwidths.contains(name)) {
      TORCH_CHECK_VALUE(bandwidths.at(name) > 0, "--bandwidth: that of ", name, " is 0.");
      link.per_byte = 1 / bandwidths.at(name);
    }
    if (latencies.contains(name)) link.latency = latencies.at(name);
    model.links.push_back(link);
  }
  return model;
}

/// Of "dp=8" or "dp=8,tp=4", with both dims.
std::pair<int64_t, int64_t> read_mesh(const std::string& text) {
  const Layout mesh = parse_mesh(text);
  int64_t dp = 1, tp = 1;
  TORCH_CHECK_VALUE(!mesh.mesh_dim_names.empty(), "--mesh: name the dims, as in dp=64,tp=8.");
  for (size_t i = 0; i < mesh.mesh_shape.size(); ++i) {
    const std::string& name = mesh.mesh_dim_names[i];
    TORCH_CHECK_VALUE(name == "dp" || name == "tp", "--mesh: there is no dim \"", name,
                      "\"; ranks share the batch along dp, and layers along tp, as in dp=64,tp=8.");
    (name == "dp" ? dp : tp) = mesh.mesh_shape[i];
  }
  return {dp, tp};
}

struct Candidate {
  int64_t dp = 1, tp = 1;
  std::string parallel;
  bool sequence = false;

  std::string mesh() const { return c10::str("dp=", dp, ",tp=", tp); }
  std::string name() const { return parallel + (sequence ? ", sequence" : ""); }
};

/// Why it makes no sense; empty if it does.
std::string objection(const Options& options, const Candidate& candidate) {
  const auto parallel = gpt::parallel_named(candidate.parallel);
  if (!parallel)
    return c10::str("--parallel: \"", candidate.parallel, "\" is none of dp, tp, tp+dp, fsdp and fsdp+tp.");
  if (!options.table.empty() && parallel->tensor)
    return "--table: a table of parameters has no layers, so tensor parallel is unknown; say --parallel dp "
           "or fsdp.";
  if (candidate.tp > 1 && !parallel->tensor)
    return c10::str("--mesh: tp=", candidate.tp, " needs tensor parallel: --parallel tp, tp+dp or fsdp+tp.");
  if (candidate.sequence && !parallel->tensor)
    return "--sequence-parallel needs tensor parallel: --parallel tp, tp+dp or fsdp+tp.";
  if (!options.table.empty()) return "";
  if (options.model.heads % candidate.tp != 0)
    return c10::str(options.model.heads, " heads cannot be dealt to tp=", candidate.tp, " ranks.");
  if (options.model.width % options.model.heads != 0)
    return c10::str("--width: ", options.model.width, " cannot be divided among ", options.model.heads,
                    " heads.");
  if (options.batch % candidate.dp != 0)
    return c10::str("--batch: ", options.batch, " pieces cannot be dealt to dp=", candidate.dp, " ranks.");
  return "";
}

struct Planned {
  Candidate candidate;
  StepCost cost;
  double compute = 0;  // seconds
  bool fits = true;

  double seconds() const { return compute + cost.communication_seconds(); }
};

class Planner {
 public:
  explicit Planner(const Options& options) : options_(options) {
    if (!options.table.empty()) rows_ = read_parameter_table(options.table);
    const auto dtype = parse_dtype(options.dtype);
    TORCH_CHECK_VALUE(dtype && at::isFloatingType(*dtype), "--dtype: \"", options.dtype,
                      "\" is none; say f32, bf16 or f16.");
    dtype_ = *dtype;
    if (!options.memory.empty()) memory_ = read_quantity(options.memory, kBytes, "--memory");
  }

  Planned plan(const Candidate& candidate) const {
    const Layout mesh = parse_mesh(candidate.mesh());
    gpt::Parallel parallel = *gpt::parallel_named(candidate.parallel);
    parallel.sequence = candidate.sequence;
    const gpt::Training training{
        .model = options_.model, .parallel = parallel, .batch = options_.batch, .dtype = dtype_};
    const auto make = [&](const DeviceMesh& on) {
      return rows_.empty() ? gpt::training_on_meta(training, on)
                           : training_of_table(rows_, parallel.shard, on);
    };
    Planned result{candidate,
                   plan_model(mesh, make, {.rank = options_.rank, .cost = cost_model(options_, mesh)})};
    result.compute = result.cost.flops / options_.flops;
    result.fits = !memory_ || static_cast<double>(result.cost.memory.peak) <= *memory_;
    return result;
  }

  std::string model_text() const {
    const gpt::Config& model = options_.model;
    if (!rows_.empty()) return c10::str(options_.table, ", ", rows_.size(), " parameters, without a forward");
    return c10::str("GPT of ", model.layers, " layers, width ", model.width, ", ", model.heads,
                    " heads, vocabulary ", model.vocabulary, ", ", options_.dtype, "; ", options_.batch,
                    " pieces of ", model.context, " tokens a step");
  }

 private:
  const Options& options_;
  std::vector<TableRow> rows_;
  at::ScalarType dtype_ = at::kFloat;
  std::optional<double> memory_;
};

/// All ways to use so many ranks that make sense.
std::vector<Candidate> candidates(const Options& options, int64_t ranks) {
  std::vector<Candidate> result;
  for (int64_t tp = 1; tp <= ranks; ++tp) {
    if (ranks % tp != 0) continue;
    for (const char* parallel : {"dp", "fsdp", "tp", "tp+dp", "fsdp+tp"}) {
      for (const bool sequence : {false, true}) {
        const Candidate candidate{ranks / tp, tp, parallel, sequence};
        const bool tensor = candidate.parallel.find("tp") != std::string::npos;
        if (tensor != (tp > 1)) continue;
        if (tensor && (candidate.parallel == "tp") != (candidate.dp == 1)) continue;
        if (objection(options, candidate).empty()) result.push_back(candidate);
      }
    }
  }
  return result;
}

std::string bar(double share, const char* letter, int64_t width) {
  std::string text;
  for (int64_t i = 0; i < std::llround(share * static_cast<double>(width)); ++i) text += letter;
  return text;
}

void show_sweep(std::vector<Planned> planned, const Options& options, std::ostream& out) {
  std::stable_sort(planned.begin(), planned.end(), [](const Planned& a, const Planned& b) {
    return std::pair(!a.fits, a.seconds()) < std::pair(!b.fits, b.seconds());
  });
  const size_t shown = std::min(planned.size(), static_cast<size_t>(options.most));
  double longest = 0;
  for (size_t i = 0; i < shown; ++i) longest = std::max(longest, planned[i].seconds());
  out << "  " << std::left << std::setw(16) << "mesh" << std::setw(20) << "parallel" << std::right
      << std::setw(11) << "memory" << std::setw(11) << "moved" << std::setw(11) << "compute" << std::setw(14)
      << "communication" << std::setw(11) << "step"
      << "\n";
  for (size_t i = 0; i < shown; ++i) {
    const Planned& each = planned[i];
    const double communication = each.cost.communication_seconds();
    out << "  " << std::left << std::setw(16) << each.candidate.mesh() << std::setw(20)
        << each.candidate.name() << std::right << std::setw(11) << bytes_text(each.cost.memory.peak)
        << std::setw(11) << bytes_text(each.cost.bytes()) << std::setw(11) << seconds_text(each.compute)
        << std::setw(14) << seconds_text(communication) << std::setw(11) << seconds_text(each.seconds())
        << "  " << bar(each.compute / longest, "█", 30) << bar(communication / longest, "░", 30)
        << (each.fits ? "" : "  does not fit") << '\n';
  }
  if (shown < planned.size()) out << "  and " << planned.size() - shown << " more (--most)\n";
  out << "\n  memory: the most that rank " << options.rank
      << " has at a time; █ compute, ░ communication, not overlapped\n";
}

}  // namespace

PlanCommand::PlanCommand(CLI::App& app) : options_(new Options) {
  Options& options = *options_;
  app.get_formatter()->column_width(36);
  app.add_option("--mesh", options.mesh,
                 "Ranks that share the batch (dp) and each layer (tp), as in dp=64,tp=8")
      ->capture_default_str();
  app.add_option("--parallel", options.parallel,
                 "dp, tp, tp+dp, fsdp or fsdp+tp; by default what the mesh allows, sharded");
  app.add_flag("--sequence-parallel", options.sequence,
               "Shard what flows between the blocks along the sequence");
  app.add_flag("--sweep", options.sweep,
               "Try all meshes of that many ranks and all ways, and rank them by time");
  const auto positive = CLI::Range(int64_t{1}, int64_t{1} << 30);
  const auto number = [&](const char* name, int64_t& value, const char* words) {
    app.add_option(name, value, words)->capture_default_str()->check(positive);
  };
  number("--layers", options.model.layers, "Blocks of the GPT");
  number("--width", options.model.width, "Its width");
  number("--heads", options.model.heads, "Its attention heads");
  number("--vocabulary", options.model.vocabulary, "Its tokens");
  number("--context", options.model.context, "Tokens in a piece");
  number("--batch", options.batch, "Pieces in a step, on all ranks together");
  number("--most", options.most, "Rows of a sweep to show");
  app.add_option("--dtype", options.dtype, "Of parameters and all that is computed: f32, bf16 or f16")
      ->capture_default_str();
  app.add_option("--table", options.table,
                 "Instead of the GPT, a file of parameters: lines \"name f32[64, 32]\", or JSON");
  app.add_option("--rank", options.rank, "Whose costs are shown")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  app.add_option("--bandwidth", options.bandwidth,
                 "Of each mesh dim: dp=25GB/s,tp=300GB/s; by default 10GB/s");
  app.add_option("--latency", options.latency, "Of each mesh dim: dp=20us,tp=5us; by default 10us");
  app.add_option("--flops", options.flops, "Operations that a rank computes in a second")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  app.add_option("--memory", options.memory, "Of a rank: what needs more does not fit; 80GiB");
}

PlanCommand::~PlanCommand() { delete options_; }

void PlanCommand::run(std::ostream& out) const {
  const Options& options = *options_;
  const auto [dp, tp] = read_mesh(options.mesh);
  const Planner planner(options);
  if (options.sweep) {
    std::vector<Planned> planned;
    for (const Candidate& candidate : candidates(options, dp * tp))
      planned.push_back(planner.plan(candidate));
    TORCH_CHECK_VALUE(!planned.empty(), "there is no way to use ", dp * tp, " ranks: batch ", options.batch,
                      " and ", options.model.heads,
                      " heads cannot be dealt to them. Change --batch or the number of ranks.");
    out << planner.model_text() << ", on " << dp * tp << " ranks\n\n";
    return show_sweep(std::move(planned), options, out);
  }
  const std::string usual = tp == 1 ? "fsdp" : dp == 1 ? "tp" : "fsdp+tp";
  const Candidate candidate{dp, tp, options.parallel.empty() ? usual : options.parallel, options.sequence};
  const std::string wrong = objection(options, candidate);
  TORCH_CHECK_VALUE(wrong.empty(), wrong);
  const Planned planned = planner.plan(candidate);
  const MemoryOfRank& memory = planned.cost.memory;
  out << planner.model_text() << "; " << candidate.name() << "\n\n"
      << planned.cost << "  compute in a step\n    " << std::left << std::setw(24)
      << c10::str(planned.cost.flops / 1e12, " Tflop") << std::right << std::setw(38)
      << seconds_text(planned.compute) << "\n  step, without overlap" << std::setw(43)
      << seconds_text(planned.seconds()) << "\n\n";
  const std::pair<const char*, int64_t> uses[] = {{"parameters", memory.parameters},
                                                  {"gradients", memory.gradients},
                                                  {"optimizer", memory.optimizer},
                                                  {"activations", memory.activations},
                                                  {"in flight", memory.in_flight}};
  for (const auto& [name, bytes] : uses)
    out << "  " << std::left << std::setw(12) << name
        << bar(static_cast<double>(bytes) / static_cast<double>(std::max<int64_t>(memory.peak, 1)), "█", 50)
        << '\n';
  if (!planned.fits)
    out << "\n  It does not fit: rank " << options.rank << " needs " << bytes_text(memory.peak)
        << ", and has " << options.memory << ".\n";
}
