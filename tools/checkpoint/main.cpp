// Looks at checkpoints, verifies them and converts them between formats: `tessera-checkpoint --help`.

#include <tessera/checkpoint/inspect.h>
#include <tessera/placement/text.h>

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <sstream>
#include <string>

#include <CLI/CLI.hpp>
#include <c10/util/Exception.h>
#include <nlohmann/json.hpp>

namespace {

using namespace tessera::checkpoint;
using tessera::to_text;

std::string bytes_text(int64_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  for (; value >= 1024 && unit + 1 < std::size(kUnits); ++unit) value /= 1024;
  char text[32];
  std::snprintf(text, sizeof text, unit == 0 ? "%.0f %s" : "%.1f %s", value, kUnits[unit]);
  return text;
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

std::string value_text(const Value& value) {
  std::ostringstream out;
  out << value;
  const std::string text = out.str();
  return text.size() <= 60 ? text : text.substr(0, 57) + "...";
}

void print_table(const std::vector<std::vector<std::string>>& rows) {
  std::vector<size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  for (const auto& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      line += row[i];
      if (i + 1 < row.size()) line += std::string(widths[i] - row[i].size() + 2, ' ');
    }
    std::cout << line << "\n";
  }
}

nlohmann::json to_json(const CheckpointInfo& info) {
  nlohmann::json tensors = nlohmann::json::object(), values = nlohmann::json::object();
  for (const TensorInfo& tensor : info.tensors) {
    nlohmann::json chunks = nlohmann::json::array();
    for (const ChunkInfo& chunk : tensor.chunks)
      chunks.push_back({{"offsets", chunk.offsets},
                        {"sizes", chunk.sizes},
                        {"file", chunk.file},
                        {"offset", chunk.offset},
                        {"length", chunk.length}});
    tensors[tensor.key] = {{"shape", tensor.shape},
                           {"dtype", std::string(to_text(tensor.dtype))},
                           {"bytes", tensor.bytes},
                           {"chunks", chunks}};
  }
  for (const Value::Entry& entry : info.values) {
    std::ostringstream text;
    text << entry.value;
    values[entry.key] = text.str();
  }
  return {
      {"format", format_name(info.format)}, {"bytes", info.bytes}, {"tensors", tensors}, {"values", values}};
}

void inspect_command(const std::string& path, bool json, bool chunks) {
  const CheckpointInfo info = inspect(path);
  if (json) {
    // Names of files that are not UTF-8 are shown as well as can be.
    std::cout << to_json(info).dump(2, ' ', false, nlohmann::json::error_handler_t::replace) << "\n";
    return;
  }
  std::vector<std::vector<std::string>> rows{{"tensor", "dtype", "shape", "size", "chunks"}};
  for (const TensorInfo& tensor : info.tensors) {
    rows.push_back({tensor.key, std::string(to_text(tensor.dtype)), shape_text(tensor.shape),
                    bytes_text(tensor.bytes), std::to_string(tensor.chunks.size())});
    if (!chunks) continue;
    for (const ChunkInfo& chunk : tensor.chunks)
      rows.push_back({"  " + shape_text(chunk.offsets), "", shape_text(chunk.sizes), bytes_text(chunk.length),
                      chunk.file});
  }
  print_table(rows);
  rows.clear();
  if (!info.values.empty()) rows.push_back({"\nother values", ""});
  for (const Value::Entry& entry : info.values) rows.push_back({entry.key, value_text(entry.value)});
  print_table(rows);
  std::cout << "\n"
            << format_name(info.format) << ": " << info.tensors.size() << " tensors, " << info.values.size()
            << " other values, " << bytes_text(info.bytes) << "\n";
}

int verify_command(const std::string& path, bool json) {
  const VerifyReport report = verify(path);
  if (json) {
    std::cout << nlohmann::json{{"errors", report.errors},
                                {"bytes", report.bytes},
                                {"unchecked", report.unchecked}}
                     .dump(2, ' ', false, nlohmann::json::error_handler_t::replace)
              << "\n";
  } else {
    for (const std::string& error : report.errors) std::cout << error << "\n";
    std::cout << (report.errors.empty() ? "whole: " : "damaged: ") << bytes_text(report.bytes) << " read";
    if (report.unchecked > 0)
      std::cout << ", " << bytes_text(report.unchecked) << " of them have no checksums";
    std::cout << "\n";
  }
  return report.errors.empty() ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app(
      "Looks at checkpoints of Tessera, Hugging Face (safetensors) and torch.distributed.checkpoint.");
  app.require_subcommand(1);
  std::string path, to, format = "tessera";
  bool json = false, chunks = false;
  int64_t file_limit = SaveOptions().file_limit;

  CLI::App* inspect_app = app.add_subcommand("inspect", "List tensors, shapes, sizes and other values.");
  inspect_app->add_option("PATH", path, "The checkpoint: a directory, or a .safetensors file")->required();
  inspect_app->add_flag("--json", json, "As JSON, with the chunks of all tensors");
  inspect_app->add_flag("--chunks", chunks, "Also list which part of a tensor lies in which file");
  CLI::App* verify_app = app.add_subcommand(
      "verify", "Read everything and compare all checksums. Exits with 1 if something is wrong.");
  verify_app->add_option("PATH", path, "The checkpoint")->required();
  verify_app->add_flag("--json", json, "As JSON");
  CLI::App* convert_app = app.add_subcommand("convert", "Write a checkpoint in another format.");
  convert_app->add_option("FROM", path, "The checkpoint")->required();
  convert_app->add_option("TO", to, "The new one")->required();
  convert_app->add_option("--format", format, "tessera, huggingface or dcp")
      ->check(CLI::IsMember({"tessera", "huggingface", "dcp"}))
      ->capture_default_str();
  convert_app->add_option("--file-limit", file_limit, "The largest file in bytes, for huggingface")
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);

  try {
    if (*inspect_app) {
      inspect_command(path, json, chunks);
    } else if (*verify_app) {
      return verify_command(path, json);
    } else {
      SaveOptions options;
      options.format = parse_format(format);
      options.file_limit = file_limit;
      convert(path, to, options);
    }
  } catch (const c10::Error& error) {
    std::cerr << "tessera-checkpoint: " << error.what_without_backtrace() << "\n";
    return 1;
  } catch (const std::exception& error) {
    std::cerr << "tessera-checkpoint: " << error.what() << "\n";
    return 1;
  }
  return 0;
}
