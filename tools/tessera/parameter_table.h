#pragma once

#include <tessera/debug/dry_run.h>

#include <string>
#include <vector>

#include <c10/core/ScalarType.h>

struct TableRow {
  std::string name;
  at::ScalarType dtype;
  std::vector<int64_t> shape;
};

/// A file of parameters, as lines "blocks.0.up.weight bf16[4096, 1024]", or as JSON, {"blocks.0.up.weight": {"dtype":
/// "bf16", "shape": [4096, 1024]}}, in which the header of a safetensors file is written, too. Throws an error that names the
/// line.
std::vector<TableRow> read_parameter_table(const std::string& path);

/// A step of data parallel training of these, `sharded` or not: each has a gradient, but there is no forward. Layers, which are
/// what names have before their first number, are units.
tessera::TrainingStep training_of_table(const std::vector<TableRow>& rows, bool sharded,
                                        const tessera::DeviceMesh& mesh);
