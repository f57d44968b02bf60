#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <type_traits>
#include <typeinfo>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

namespace tessera::testing {

/// The message, without libtorch's stack trace, of what `call` throws: exactly an `Error`, or anything if
/// that is std::exception. A failure of the test if it throws nothing.
template <typename Error = std::exception, typename Call>
std::string error_of(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    if (!std::is_same_v<Error, std::exception>) {
      EXPECT_EQ(typeid(error), typeid(Error)) << error.what();
    }
    const auto* known = dynamic_cast<const c10::Error*>(&error);
    return known ? known->what_without_backtrace() : error.what();
  }
  ADD_FAILURE() << "expected an error, but there was none";
  return "";
}

/// `call` throws an `Error` whose message contains all of `parts`.
template <typename Error, typename Call>
void expect_error(Call&& call, std::initializer_list<std::string_view> parts) {
  const std::string message = error_of<Error>(call);
  for (const std::string_view part : parts) {
    EXPECT_NE(message.find(part), std::string::npos) << '"' << part << "\" is not in: " << message;
  }
}

}  // namespace tessera::testing
