#pragma once

#include <string>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

/// Errors are libtorch's own types, so that they turn into the fitting Python exceptions, but without its
/// stack trace: our messages are for the person who made the call.
///   TESSERA_CHECK        c10::Error       something went wrong, or cannot be done
///   TESSERA_CHECK_VALUE  c10::ValueError  an argument has a value that makes no sense
///   TESSERA_CHECK_INDEX  c10::IndexError  a dim, rank or position is out of range
#define TESSERA_CHECK_AS(type, condition, ...)                    \
  do {                                                            \
    if (!(condition)) [[unlikely]] {                              \
      throw type(::c10::str(__VA_ARGS__), /*backtrace=*/nullptr); \
    }                                                             \
  } while (false)

#define TESSERA_CHECK(condition, ...) TESSERA_CHECK_AS(::c10::Error, condition, __VA_ARGS__)
#define TESSERA_CHECK_VALUE(condition, ...) TESSERA_CHECK_AS(::c10::ValueError, condition, __VA_ARGS__)
#define TESSERA_CHECK_INDEX(condition, ...) TESSERA_CHECK_AS(::c10::IndexError, condition, __VA_ARGS__)
