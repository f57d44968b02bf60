#include <tessera/error.h>
#include <tessera/sharded/remote_device.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <ostream>

#include <c10/util/hash.h>

namespace tessera::sharded {

namespace {

std::optional<c10::Device> parse_device(std::string_view text) {
  try {
    return c10::Device(std::string(text));
  } catch (const c10::Error&) {
    return std::nullopt;
  }
}

std::optional<int64_t> parse_rank(std::string_view digits) {
  int64_t rank = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), rank);
  if (error != std::errc() || end != digits.data() + digits.size() || digits.front() == '-')
    return std::nullopt;
  return rank;
}

}  // namespace

RemoteDevice::RemoteDevice(std::string_view text) {
  auto require = [&](bool good, const char* why) {
    TESSERA_CHECK_VALUE(good, "\"", text, "\" names no device of a rank or worker: ", why,
                        ". Known forms: \"rank:1/cuda:0\", \"worker/cuda:0\", \"cuda:0\"; without a device "
                        "after the owner it is the owner's CPU.");
  };
  const size_t slash = text.find('/');
  std::string_view owner = text.substr(0, slash);
  std::optional<c10::Device> device;
  if (slash == std::string_view::npos) {
    device = parse_device(text);
    if (device) owner = {};
  } else {
    const std::string_view rest = text.substr(slash + 1);
    require(rest.find('/') == std::string_view::npos, "there is more than one '/'");
    require(!owner.empty(), "nothing stands before the '/'");
    device = parse_device(rest);
    require(device.has_value(), "what stands after the '/' is no device");
  }
  if (device) device_ = *device;
  if (device && owner.empty()) return;
  require(!owner.empty(), "it is empty");
  const size_t colon = owner.find(':');
  if (colon == std::string_view::npos) {
    // Specs and shards are written with several of them in one text.
    const bool is_name = std::all_of(owner.begin(), owner.end(), [](unsigned char letter) {
      return std::isgraph(letter) != 0 && letter != ',';
    });
    require(is_name, "the name of a worker has no space, no comma and nothing but ASCII");
    worker_name_ = std::string(owner);
    return;
  }
  const std::string_view digits = owner.substr(colon + 1);
  require(owner.substr(0, colon) == "rank", "only \"rank\" can have a number");
  rank_ = digits.empty() ? std::nullopt : parse_rank(digits);
  require(rank_.has_value(), "a rank is an integer from 0");
}

RemoteDevice::RemoteDevice(int64_t rank, c10::Device device) : rank_(rank), device_(device) {
  TESSERA_CHECK_VALUE(rank >= 0, "A device of rank ", rank, ": ranks are numbered from 0.");
}

RemoteDevice RemoteDevice::with_device(c10::Device device) const {
  RemoteDevice result = *this;
  result.device_ = device;
  return result;
}

size_t RemoteDevice::hash() const {
  return c10::get_hash(worker_name_.value_or(""), rank_.value_or(-1), device_);
}

std::string RemoteDevice::str() const {
  if (worker_name_) return *worker_name_ + "/" + device_.str();
  if (rank_) return c10::str("rank:", *rank_, "/", device_.str());
  return device_.str();
}

std::ostream& operator<<(std::ostream& out, const RemoteDevice& device) { return out << device.str(); }

}  // namespace tessera::sharded
