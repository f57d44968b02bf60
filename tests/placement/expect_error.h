#pragma once

#include <initializer_list>
#include <string>
#include <string_view>

#include <gtest/gtest.h>

namespace tessera {

/// The message of the `Error` that `call` throws. A failure of the test if it throws none.
template <typename Error, typename Call>
std::string error_of(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what_without_backtrace();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

/// `call` throws an `Error` whose message contains all of `parts`.
template <typename Error, typename Call>
void expect_error(Call call, std::initializer_list<std::string_view> parts) {
  const std::string message = error_of<Error>(call);
  for (const std::string_view part : parts) {
    EXPECT_NE(message.find(part), std::string::npos) << "\"" << part << "\" is not in: " << message;
  }
}

}  // namespace tessera
