#pragma once

#include <cstdint>
#include <exception>
#include <string>

/// An error of one rank that others throw too.
namespace tessera::comm {

/// Kinds of errors, which ranks exchange as integers.
enum class ErrorKind : int64_t { none, error, value, index, not_implemented };

ErrorKind kind_of(const std::exception_ptr& error);
/// Without libtorch's stack trace.
std::string message_of(const std::exception_ptr& error);
[[noreturn]] void throw_error(ErrorKind kind, const std::string& message);

}  // namespace tessera::comm
