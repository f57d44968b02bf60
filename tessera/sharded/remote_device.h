#pragma once

#include <tessera/export.h>

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <optional>
#include <string>
#include <string_view>

#include <c10/core/Device.h>

namespace tessera::sharded {

/// A device, and whose: that of a rank, of an RPC worker, or simply the local one.
///
///   "rank:1/cuda:0"   device cuda:0 of (global) rank 1; "rank:1" is its CPU
///   "trainer/cuda:0"  device cuda:0 of the worker of that name; "trainer" is its CPU
///   "cuda:0"          a local device
class TESSERA_API RemoteDevice {
 public:
  /// Throws on text of any other form, and says which are known.
  RemoteDevice(std::string_view text);
  RemoteDevice(const char* text) : RemoteDevice(std::string_view(text)) {}
  RemoteDevice(const std::string& text) : RemoteDevice(std::string_view(text)) {}
  RemoteDevice(c10::Device device) : device_(device) {}
  RemoteDevice(int64_t rank, c10::Device device);

  const std::optional<std::string>& worker_name() const { return worker_name_; }
  const std::optional<int64_t>& rank() const { return rank_; }
  c10::Device device() const { return device_; }
  /// The same owner's other device.
  RemoteDevice with_device(c10::Device device) const;

  bool operator==(const RemoteDevice&) const = default;
  size_t hash() const;
  /// Reads back as the same value.
  std::string str() const;
  friend TESSERA_API std::ostream& operator<<(std::ostream& out, const RemoteDevice& device);

 private:
  std::optional<std::string> worker_name_;
  std::optional<int64_t> rank_;
  c10::Device device_ = c10::kCPU;
};

}  // namespace tessera::sharded

template <>
struct std::hash<tessera::sharded::RemoteDevice> {
  size_t operator()(const tessera::sharded::RemoteDevice& device) const { return device.hash(); }
};
