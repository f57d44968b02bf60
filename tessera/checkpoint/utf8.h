#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace tessera::checkpoint {

/// The length of the character that begins at `text`, which is not empty, and its code point; 0 if it is no valid
/// UTF-8.
size_t utf8_character(std::string_view text, uint32_t& code);

bool is_utf8(std::string_view text);

}  // namespace tessera::checkpoint
