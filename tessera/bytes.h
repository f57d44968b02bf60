#pragma once

#include <tessera/error.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

/// Values as bytes, the same on every machine that libtorch runs on (little endian).
namespace tessera {

/// std::memcpy. If there are no bytes, the pointers may be null, as those of empty tensors are.
inline void copy_bytes(void* to, const void* from, size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

class ByteWriter {
 public:
  template <class T>
  requires std::is_arithmetic_v<T>
  void put(T value) { out_.append(reinterpret_cast<const char*>(&value), sizeof(T)); }
  void put(std::string_view text) {
    put(static_cast<int64_t>(text.size()));
    out_.append(text);
  }
  template <class Numbers>
  void put_list(const Numbers& numbers) {
    put(static_cast<int64_t>(numbers.size()));
    for (const int64_t number : numbers) put(number);
  }
  std::string take() { return std::move(out_); }

 private:
  std::string out_;
};

/// Throws where the bytes end too early, never reads beyond them.
class ByteReader {
 public:
  /// `what` is being read, for messages.
  ByteReader(std::string_view bytes, const char* what) : bytes_(bytes), what_(what) {}

  template <class T>
  requires std::is_arithmetic_v<T> T get() {
    T value;
    std::memcpy(&value, next(sizeof(T)).data(), sizeof(T));
    return value;
  }
  std::string_view get_text() {
    const auto size = get<int64_t>();
    check(size >= 0);
    return next(static_cast<size_t>(size));
  }
  std::vector<int64_t> get_list() {
    const int64_t size = get_count(sizeof(int64_t));
    std::vector<int64_t> numbers(size);
    for (int64_t& number : numbers) number = get<int64_t>();
    return numbers;
  }
  /// A count of items that follow, each of which takes at least so many bytes.
  int64_t get_count(size_t bytes_each) {
    const auto count = get<int64_t>();
    check(count >= 0 && static_cast<uint64_t>(count) <= bytes_.size() / bytes_each);
    return count;
  }
  bool done() const { return bytes_.empty(); }
  void check(bool good) const {
    TESSERA_CHECK_VALUE(good, "These bytes are no ", what_,
                        ": they are truncated, damaged, or of something else.");
  }

 private:
  std::string_view next(size_t size) {
    check(size <= bytes_.size());
    const std::string_view result = bytes_.substr(0, size);
    bytes_.remove_prefix(size);
    return result;
  }

  std::string_view bytes_;
  const char* what_;
};

}  // namespace tessera
