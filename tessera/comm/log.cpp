#include <tessera/comm/log.h>
#include <tessera/comm/world.h>
#include <tessera/error.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>

namespace tessera {

namespace {

constexpr std::string_view kLayers[] = {"comm", "redistribute", "dispatch"};

/// Read once. The clock of the lines begins then.
const LogSetting& log_setting() {
  static const LogSetting setting = [] {
    const char* const given = std::getenv("TESSERA_LOG");
    return parse_log_setting(given ? given : "");
  }();
  return setting;
}

double log_seconds() {
  static const auto begin = std::chrono::steady_clock::now();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace

LogSetting parse_log_setting(std::string_view text) {
  LogSetting setting;
  const size_t colon = text.find(':');
  const std::string_view level = text.substr(0, colon);
  if (colon != std::string_view::npos) setting.layer = text.substr(colon + 1);
  std::string layers;
  for (const std::string_view each : kLayers) layers += c10::str(layers.empty() ? "" : ", ", each);
  const bool knows_layer =
      colon == std::string_view::npos ||
      std::find(std::begin(kLayers), std::end(kLayers), setting.layer) != std::end(kLayers);
  const bool is_off = text.empty() || text == "off" || text == "0";
  TESSERA_CHECK_VALUE((is_off || level == "info" || level == "debug") && knows_layer, "TESSERA_LOG is \"",
                      text, "\": expected info or debug, perhaps with one layer as in debug:dispatch (of ",
                      layers, ").");
  if (!is_off) setting.level = level == "info" ? LogLevel::info : LogLevel::debug;
  return setting;
}

bool logs(LogLevel level, std::string_view layer) {
  const LogSetting& setting = log_setting();
  return level <= setting.level && (setting.layer.empty() || setting.layer == layer);
}

void write_log(std::string_view layer, const std::string& text,
               std::optional<std::pair<int64_t, int64_t>> rank) {
  if (!rank && has_current_world()) rank = {current_world()->rank(), current_world()->size()};
  char when[32];
  std::snprintf(when, sizeof when, "%+.3f s", log_seconds());
  const std::string line =
      c10::str("[tessera ", rank ? c10::str("rank ", rank->first, "/", rank->second, " ") : "", layer, " ",
               when, "] ", text, "\n");
  std::fwrite(line.data(), 1, line.size(), stderr);
}

}  // namespace tessera
