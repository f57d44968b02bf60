#include <tessera/comm/shared_error.h>
#include <tessera/error.h>

namespace tessera::comm {

ErrorKind kind_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::NotImplementedError&) {
    return ErrorKind::not_implemented;
  } catch (const c10::IndexError&) {
    return ErrorKind::index;
  } catch (const c10::ValueError&) {
    return ErrorKind::value;
  } catch (...) {
    return ErrorKind::error;
  }
}

std::string message_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& known) {
    return known.what_without_backtrace();
  } catch (const std::exception& known) {
    return known.what();
  } catch (...) {
    return "an exception that is not a std::exception";
  }
}

void throw_error(ErrorKind kind, const std::string& message) {
  TESSERA_CHECK_AS(c10::NotImplementedError, kind != ErrorKind::not_implemented, message);
  TESSERA_CHECK_INDEX(kind != ErrorKind::index, message);
  TESSERA_CHECK_VALUE(kind != ErrorKind::value, message);
  TESSERA_CHECK(false, message);
}

}  // namespace tessera::comm
