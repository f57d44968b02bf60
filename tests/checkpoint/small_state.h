#pragma once

#include <tessera/checkpoint/checkpoint.h>
#include <tessera/comm/run.h>
#include <tessera/dtensor/dtensor.h>

#include <filesystem>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

/// A state of a few bytes in which every element says which one it is, to tell the old from the new from a mixture.
namespace tessera::checkpoint {

inline const char* name_of_format(Format format) {
  return format == Format::Tessera ? "Tessera" : format == Format::DCP ? "DCP" : "HuggingFace";
}

/// On the ranks of the current world, or on none. `number` is in every element.
inline StateDict small_state(int64_t number, Format format = Format::Tessera) {
  StateDict state;
  const at::Tensor full = at::full({4, 3}, static_cast<double>(number), at::kFloat);
  if (has_current_world()) {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {get_world_size()});
    state["sharded"] = distribute_tensor(full, mesh, {Shard(0)}, std::nullopt);
  } else {
    state["sharded"] = full;
  }
  state["replicated"] = at::full({5}, number, at::kLong);
  if (format != Format::HuggingFace) state["step"] = number;
  return state;
}

/// The number of a state, all of which must say the same.
inline int64_t number_in(const StateDict& state) {
  const at::Tensor sharded = state.at("sharded").tensor();
  const at::Tensor full = DTensor::is_dtensor(sharded) ? DTensor(sharded).full_tensor() : sharded;
  const at::Tensor replicated = state.at("replicated").tensor();
  const int64_t number = replicated[0].item<int64_t>();
  EXPECT_TRUE(full.eq(number).all().item<bool>()) << full;
  EXPECT_TRUE(replicated.eq(number).all().item<bool>()) << replicated;
  for (const Value::Entry& entry : state.values().entries()) {
    if (entry.key == "step") {
      EXPECT_EQ(entry.value.integer(), number);
    }
  }
  return number;
}

inline int64_t load_number(const std::string& path, Format format = Format::Tessera) {
  StateDict state = small_state(-1, format);
  load(state, path);
  return number_in(state);
}

/// The names in a directory, hidden ones too.
inline std::vector<std::string> names_in(const std::string& directory) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(directory))
    names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace tessera::checkpoint
