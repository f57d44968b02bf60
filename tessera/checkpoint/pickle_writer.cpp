#include <tessera/checkpoint/pickle.h>
#include <tessera/checkpoint/utf8.h>
#include <tessera/error.h>

#include <bit>
#include <limits>

namespace tessera::checkpoint::pickle {

Writer::Writer() : out_("\x80\x02") {}

template <typename T>
void Writer::put_raw(T value) {
  out_.append(reinterpret_cast<const char*>(&value), sizeof(T));
}

void Writer::none() { put('N'); }

void Writer::boolean(bool value) { put(value ? '\x88' : '\x89'); }

void Writer::integer(int64_t value) {
  if (value >= 0 && value <= 0xFF) {
    put('K');
    put_raw(static_cast<uint8_t>(value));
  } else if (value >= 0 && value <= 0xFFFF) {
    put('M');
    put_raw(static_cast<uint16_t>(value));
  } else if (value == static_cast<int32_t>(value)) {
    put('J');
    put_raw(static_cast<int32_t>(value));
  } else {
    // The fewest bytes of two's complement, as Python writes it.
    uint8_t size = 8;
    while (size > 1 && value >> (8 * (size - 1) - 1) == (value < 0 ? -1 : 0)) --size;
    put('\x8a');
    put_raw(size);
    out_.append(reinterpret_cast<const char*>(&value), size);
  }
}

void Writer::real(double value) {
  put('G');
  put_raw(__builtin_bswap64(std::bit_cast<uint64_t>(value)));
}

bool Writer::repeat(const std::string& key) {
  const auto found = written_.find(key);
  if (found == written_.end()) return false;
  recall(found->second);
  return true;
}

void Writer::text(std::string_view value) {
  const std::string key = c10::str("X", value);
  if (repeat(key)) return;
  TESSERA_CHECK(is_utf8(value), "Text is not valid UTF-8, which a pickle needs: '", value, "'.");
  TESSERA_CHECK(value.size() <= std::numeric_limits<uint32_t>::max(), "Text of ", value.size(),
                " bytes is too long for a pickle.");
  put('X');
  put_raw(static_cast<uint32_t>(value.size()));
  out_ += value;
  written_.emplace(key, remember());
}

void Writer::bytes(std::string_view value) {
  name("_codecs", "encode");
  std::string utf8;
  for (const char c : value) {
    const auto byte = static_cast<uint8_t>(c);
    if (byte < 0x80) {
      utf8 += c;
    } else {
      utf8 += static_cast<char>(0xC0 | byte >> 6);
      utf8 += static_cast<char>(0x80 | (byte & 0x3F));
    }
  }
  TESSERA_CHECK(utf8.size() <= std::numeric_limits<uint32_t>::max(), value.size(),
                " bytes are too many for a pickle.");
  put('X');
  put_raw(static_cast<uint32_t>(utf8.size()));
  out_ += utf8;
  remember();
  text("latin1");
  put('\x86');  // TUPLE2
  remember();
  call();
  remember();
}

void Writer::value(const Value& value) {
  if (value.is_none()) {
    none();
  } else if (const auto* flag = std::get_if<bool>(&value.content())) {
    boolean(*flag);
  } else if (const auto* whole = std::get_if<int64_t>(&value.content())) {
    integer(*whole);
  } else if (const auto* number = std::get_if<double>(&value.content())) {
    real(*number);
  } else if (const auto* string = std::get_if<std::string>(&value.content())) {
    text(*string);
  } else if (const auto* data = std::get_if<Bytes>(&value.content())) {
    bytes(data->data);
  } else if (value.is_list()) {
    empty_list();
    remember();
    if (value.items().empty()) return;
    mark();
    for (const Value& item : value.items()) this->value(item);
    append();
  } else if (value.is_dict()) {
    empty_dict();
    remember();
    if (value.entries().empty()) return;
    mark();
    for (const auto& [key, item] : value.entries()) {
      text(key);
      this->value(item);
    }
    set_items();
  } else {
    TESSERA_CHECK(false, "A ", value.kind(), " cannot be an entry of a value without tensors.");
  }
}

void Writer::integers(c10::ArrayRef<int64_t> values) {
  if (values.empty()) {
    empty_tuple();
    return;
  }
  if (values.size() > 3) mark();
  for (const int64_t value : values) integer(value);
  if (values.size() > 3) {
    tuple();
  } else {
    put(static_cast<char>(0x84 + values.size()));  // TUPLE1, TUPLE2, TUPLE3
  }
  remember();
}

void Writer::name(std::string_view module, std::string_view name) {
  const std::string key = c10::str("c", module, "\n", name, "\n");
  if (repeat(key)) return;
  out_ += key;
  written_.emplace(key, remember());
}

uint32_t Writer::remember() {
  if (memo_ <= 0xFF) {
    put('q');
    put_raw(static_cast<uint8_t>(memo_));
  } else {
    put('r');
    put_raw(memo_);
  }
  return memo_++;
}

void Writer::recall(uint32_t memo) {
  if (memo <= 0xFF) {
    put('h');
    put_raw(static_cast<uint8_t>(memo));
  } else {
    put('j');
    put_raw(memo);
  }
}

std::string Writer::finish() && {
  put('.');
  return std::move(out_);
}

}  // namespace tessera::checkpoint::pickle
