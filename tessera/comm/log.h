#pragma once

#include <tessera/export.h>

#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include <c10/util/StringUtil.h>

/// What Tessera does, line by line on stderr, for those who ask: TESSERA_LOG=info, debug, or debug:dispatch for one layer.
///
///   [tessera rank 2/8 dispatch +1.204 s] aten::_pdist_forward takes the replicated fallback
namespace tessera {

enum class LogLevel { off, info, debug };

/// What TESSERA_LOG says.
struct LogSetting {
  LogLevel level = LogLevel::off;
  std::string layer = {};  // empty: all

  bool operator==(const LogSetting&) const = default;
};
/// Throws on text of any other form, and says which are known.
TESSERA_API LogSetting parse_log_setting(std::string_view text);

/// Whether lines of this level and layer are written.
TESSERA_API bool logs(LogLevel level, std::string_view layer);
/// Writes one line, in one piece, with the rank of the calling thread. `rank`: where that is not known yet.
TESSERA_API void write_log(std::string_view layer, const std::string& text,
                           std::optional<std::pair<int64_t, int64_t>> rank = std::nullopt);

}  // namespace tessera

/// Does not look at its arguments unless the line is written.
#define TESSERA_LOG(level, layer, ...)                                   \
  do {                                                                   \
    if (::tessera::logs(::tessera::LogLevel::level, layer)) [[unlikely]] \
      ::tessera::write_log(layer, ::c10::str(__VA_ARGS__));              \
  } while (false)
