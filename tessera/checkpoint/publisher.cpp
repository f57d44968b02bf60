#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/dcp.h>
#include <tessera/checkpoint/huggingface.h>
#include <tessera/checkpoint/native.h>
#include <tessera/checkpoint/open.h>
#include <tessera/checkpoint/publisher.h>
#include <tessera/error.h>

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <random>
#include <string_view>
#include <utility>

#include <c10/util/StringUtil.h>

namespace tessera::checkpoint {

namespace {

/// Directories that checkpoints are written into before they are published, and those that are on their way out:
/// ".<name>.saving.<16 digits>". Each has other digits, so that a process that is left over from a save that was given
/// up cannot write into the next one.
constexpr std::string_view kFreshMiddle = ".saving.";
constexpr size_t kFreshDigits = 16;

std::string name_in_path(const std::string& path) {
  const std::string trimmed = path.substr(0, path.find_last_not_of('/') + 1);
  return trimmed.substr(trimmed.rfind('/') + 1);
}

std::string fresh_name(const std::string& path) {
  std::random_device random;
  char digits[kFreshDigits + 1];
  std::snprintf(digits, sizeof digits, "%08x%08x", random(), random());
  return beside(path, c10::str(kFreshMiddle, digits));
}

/// The name of the checkpoint that such a directory was made for; nothing of others.
std::optional<std::string> name_of_fresh(const std::string& name) {
  const size_t tail = kFreshMiddle.size() + kFreshDigits;
  if (name.size() <= tail + 1 || name.front() != '.') return std::nullopt;
  const std::string_view end = std::string_view(name).substr(name.size() - tail);
  if (!end.starts_with(kFreshMiddle) ||
      end.find_first_not_of("0123456789abcdef", kFreshMiddle.size()) != std::string_view::npos)
    return std::nullopt;
  return name.substr(1, name.size() - tail - 1);
}

/// "step-100" and "step-7" are of one series, and have the numbers 100 and 7.
std::pair<std::string, std::string> series_and_number(const std::string& name) {
  const size_t end = name.find_last_of("0123456789");
  if (end == std::string::npos) return {name, ""};
  const size_t before = name.find_last_not_of("0123456789", end);
  const size_t begin = before == std::string::npos ? 0 : before + 1;
  std::string number = name.substr(begin, end + 1 - begin);
  number.erase(0, std::min(number.find_first_not_of('0'), number.size() - 1));
  return {name.substr(0, begin) + "#" + name.substr(end + 1), number};
}

/// Removes what saves that were killed left, of this checkpoint, whose lock the caller holds, and of others of its
/// series that nobody is saving.
void remove_left_over(const std::string& path) {
  const std::string directory = parent_of(path), mine = name_in_path(path);
  for (const std::string& name : list_directory(directory)) {
    const auto made_for = name_of_fresh(name);
    if (!made_for || series_and_number(*made_for).first != series_and_number(mine).first) continue;
    std::optional<DirectoryLock> lock;
    if (*made_for != mine) lock = DirectoryLock::try_take(directory + "/" + *made_for);
    if (*made_for == mine || lock) remove_all(directory + "/" + name);
  }
}

/// Whether a checkpoint of that format has files of that name.
bool is_file_of(Format format, const std::string& name) {
  switch (format) {
    case Format::Tessera:
      return name == kIndexFile || name.ends_with(".safetensors");
    case Format::HuggingFace:
      return name == kHuggingFaceIndexFile || name.ends_with(".safetensors");
    case Format::DCP:
      return name == kDCPMetadataFile || name.ends_with(".distcp");
  }
  return false;
}

/// Throws if something is at `path` that is not ours to remove.
void check_replaceable(const std::string& path) {
  if (!exists(path)) return;
  TESSERA_CHECK(is_directory(path), path, " is a file. A checkpoint is a directory: choose another path.");
  const auto names = list_directory(path);
  const auto format = find_format(path);
  TESSERA_CHECK(
      names.empty() || format, path,
      " is a directory that holds something else than a checkpoint. Choose another path, or remove it.");
  for (const std::string& name : names)
    TESSERA_CHECK(is_file_of(*format, name) && !is_directory(path + "/" + name), path,
                  " is a checkpoint, but also holds ", name,
                  ", which would be lost. Choose another path, or move that away.");
}

bool less_number(const std::string& a, const std::string& b) {
  return a.size() != b.size() ? a.size() < b.size() : a < b;
}

/// Older checkpoints of the series of `path` than the `keep_last` newest.
std::vector<std::string> find_older(const std::string& path, int64_t keep_last) {
  const auto [series, number] = series_and_number(name_in_path(path));
  if (keep_last == 0 || number.empty()) return {};
  const std::string directory = parent_of(path);
  std::vector<std::pair<std::string, std::string>> others;  // number, path
  for (const std::string& name : list_directory(directory)) {
    const auto [other_series, other_number] = series_and_number(name);
    const std::string other = directory + "/" + name;
    if (other_series == series && name != name_in_path(path) && is_directory(other) && find_format(other))
      others.emplace_back(other_number, other);
  }
  std::sort(others.begin(), others.end(),
            [](const auto& a, const auto& b) { return less_number(b.first, a.first); });
  std::vector<std::string> result;
  for (size_t i = static_cast<size_t>(keep_last) - 1; i < others.size(); ++i)
    result.push_back(others[i].second);
  return result;
}

}  // namespace

Publisher::~Publisher() {
  try {
    if (lock_ && !fresh_.empty()) remove_all(fresh_);
  } catch (const std::exception& error) {
    std::cerr << "tessera: " << error.what() << "\n";
  }
}

void Publisher::begin() {
  make_directories(parent_of(path_));
  lock_ = DirectoryLock::try_take(path_);
  TESSERA_CHECK(lock_, "Another save into ", path_, " is under way. Wait for it, or choose another path.");
  check_replaceable(path_);
  remove_left_over(path_);
  fresh_ = fresh_name(path_);
  make_directory(fresh_);
}

void Publisher::publish_now() {
  sync_directory(fresh_);
  publish(fresh_, path_);
}

std::vector<std::string> Publisher::retire(int64_t keep_last) {
  retired_.push_back({fresh_, std::nullopt});
  for (const std::string& older : find_older(path_, keep_last)) {
    auto lock = DirectoryLock::try_take(older);
    if (!lock) continue;  // somebody saves there
    const std::string gone = fresh_name(older);
    publish(older, gone);
    retired_.push_back({gone, std::move(lock)});
  }
  std::vector<std::string> files;
  for (const Retired& each : retired_) {
    if (!exists(each.path)) continue;
    for (const std::string& name : list_directory(each.path)) files.push_back(each.path + "/" + name);
  }
  return files;
}

void Publisher::clean_up() {
  for (const Retired& each : retired_) remove_all(each.path);
  retired_.clear();
  lock_.reset();
}

std::string latest(const std::string& directory) {
  std::string best, best_number;
  if (!is_directory(directory)) return best;
  for (const std::string& name : list_directory(directory)) {
    const std::string number = series_and_number(name).second;
    const std::string path = directory + "/" + name;
    if (number.empty() || name.front() == '.' || !is_directory(path) || !find_format(path)) continue;
    if (best.empty() || less_number(best_number, number)) {
      best = path;
      best_number = number;
    }
  }
  return best;
}

}  // namespace tessera::checkpoint
