#include "tools/tessera/parameter_table.h"

#include <tessera/dtensor/dtensor.h>
#include <tessera/error.h>
#include <tessera/nn/fully_shard.h>
#include <tessera/nn/replicate.h>
#include <tessera/placement/text.h>

#include <algorithm>
#include <cctype>
#include <fstream>
#include <map>
#include <memory>
#include <sstream>

#include <ATen/Functions.h>
#include <nlohmann/json.hpp>
#include <torch/nn/module.h>
#include <torch/optim/adamw.h>

namespace {

using namespace tessera;

at::ScalarType dtype_named(std::string name, const std::string& where) {
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::tolower(c); });
  const auto dtype = parse_dtype(name);
  TORCH_CHECK_VALUE(dtype, where, ": there is no dtype \"", name, "\"; say f32, bf16, f16, i64, ...");
  return *dtype;
}

int64_t size_of(const std::string& text, const std::string& where) {
  const bool is_number =
      !text.empty() && text.size() < 16 && text.find_first_not_of("0123456789") == text.npos;
  TORCH_CHECK_VALUE(is_number, where, ": \"", text, "\" is no size.");
  return std::stoll(text);
}

/// "blocks.0.up.weight bf16[4096, 1024]"
TableRow row_of(const std::string& line, const std::string& where) {
  std::istringstream words(line);
  TableRow row;
  words >> row.name >> std::ws;
  std::string rest;
  std::getline(words, rest);
  rest.erase(std::remove_if(rest.begin(), rest.end(), [](unsigned char c) { return std::isspace(c); }),
             rest.end());
  const size_t open = rest.find('[');
  TORCH_CHECK_VALUE(open != rest.npos && rest.ends_with(']'), where,
                    ": expected a name, a dtype and a shape, as in ",
                    "\"blocks.0.up.weight bf16[4096, 1024]\", got \"", line, "\".");
  row.dtype = dtype_named(rest.substr(0, open), where);
  std::istringstream sizes(rest.substr(open + 1, rest.size() - open - 2));
  for (std::string size; std::getline(sizes, size, ',');) row.shape.push_back(size_of(size, where));
  return row;
}

std::vector<TableRow> rows_of_json(const std::string& text, const std::string& path) {
  std::vector<TableRow> rows;
  try {
    const auto table = nlohmann::ordered_json::parse(text);
    for (const auto& [name, value] : table.items()) {
      if (name == "__metadata__") continue;
      const std::string where = path + ": " + name;
      rows.push_back({name, dtype_named(value.at("dtype").get<std::string>(), where),
                      value.at("shape").get<std::vector<int64_t>>()});
    }
  } catch (const nlohmann::json::exception& error) {
    TORCH_CHECK_VALUE(
        false, path,
        ": expected {\"name\": {\"dtype\": \"bf16\", \"shape\": [4096, 1024]}, ...}: ", error.what());
  }
  return rows;
}

/// "model.layers.12." of "model.layers.12.mlp.weight"; "" if there is no number.
std::string layer_of(const std::string& name) {
  size_t begin = 0;
  for (size_t end; (end = name.find('.', begin)) != name.npos; begin = end + 1) {
    const std::string part = name.substr(begin, end - begin);
    if (!part.empty() && part.find_first_not_of("0123456789") == part.npos) return name.substr(0, end + 1);
  }
  return "";
}

/// Parameters that are gathered together.
struct LayerImpl : torch::nn::Module {
  void add(const TableRow& row) {
    std::string name = row.name;
    std::replace(name.begin(), name.end(), '.', '/');
    register_parameter(name, at::empty(row.shape, at::TensorOptions(row.dtype).device(at::kMeta)),
                       at::isFloatingType(row.dtype));
  }
};

}  // namespace

std::vector<TableRow> read_parameter_table(const std::string& path) {
  std::ifstream file(path);
  TORCH_CHECK_VALUE(file, "cannot read ", path, ".");
  std::stringstream content;
  content << file.rdbuf();
  const std::string text = content.str();
  std::vector<TableRow> rows;
  const size_t first = text.find_first_not_of(" \t\r\n");
  if (first != text.npos && text[first] == '{') {
    rows = rows_of_json(text, path);
  } else {
    std::istringstream lines(text);
    int64_t number = 0;
    for (std::string line; std::getline(lines, line);) {
      ++number;
      const size_t begin = line.find_first_not_of(" \t\r");
      if (begin != line.npos && line[begin] != '#')
        rows.push_back(row_of(line, c10::str(path, ", line ", number)));
    }
  }
  TORCH_CHECK_VALUE(!rows.empty(), path, " has no parameters.");
  for (const TableRow& row : rows) {
    double bytes = static_cast<double>(c10::elementSize(row.dtype));
    for (const int64_t size : row.shape) {
      TORCH_CHECK_VALUE(size >= 0, path, ": ", row.name, " has the size ", size, ".");
      bytes *= static_cast<double>(size);
    }
    TORCH_CHECK_VALUE(bytes < 1e15, path, ": ", row.name, " has ", bytes, " bytes, more than one can mean.");
  }
  return rows;
}

TrainingStep training_of_table(const std::vector<TableRow>& rows, bool sharded, const DeviceMesh& mesh) {
  struct Training {
    std::shared_ptr<LayerImpl> model = std::make_shared<LayerImpl>();
    std::unique_ptr<torch::optim::AdamW> optimizer;
  };
  const auto state = std::make_shared<Training>();
  std::map<std::string, std::shared_ptr<LayerImpl>> layers;
  for (const TableRow& row : rows) {
    const std::string layer = layer_of(row.name);
    if (layer.empty() || !sharded) {
      state->model->add(row);
      continue;
    }
    auto& known = layers[layer];
    if (!known)
      known = state->model->register_module(c10::str("layer", layers.size()), std::make_shared<LayerImpl>());
    known->add(row);
  }
  if (sharded) {
    for (const auto& [name, layer] : layers) fully_shard(*layer, mesh, {.dims = {"dp"}});
    fully_shard(*state->model, mesh, {.dims = {"dp"}});
  } else {
    replicate(*state->model, mesh);
  }
  state->optimizer = std::make_unique<torch::optim::AdamW>(state->model->parameters());
  return {.parameters = state->model->parameters(),
          .loss =
              [=] {
                // Of each rank's batch something else, so that gradients have to be reduced.
                Placements placements(mesh.ndim(), Replicate());
                placements[0] = Shard(0);
                const auto options = at::TensorOptions(at::kFloat).device(at::kMeta);
                const at::Tensor factor = empty({mesh.size(0)}, mesh, placements, options).sum();
                at::Tensor loss;
                for (const at::Tensor& parameter : state->model->parameters()) {
                  if (!parameter.requires_grad()) continue;
                  const at::Tensor part = parameter.sum() * factor;
                  loss = loss.defined() ? loss + part : part;
                }
                TORCH_CHECK_VALUE(loss.defined(), "the table has no parameters of a floating point dtype.");
                return loss;
              },
          .update = [=] { state->optimizer->step(); },
          .model = state};
}
