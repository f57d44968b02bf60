#include <tessera/bytes.h>
#include <tessera/error.h>
#include <tessera/placement/text.h>
#include <tessera/sharded/metadata.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <ostream>
#include <sstream>

#include <ATen/core/Tensor.h>
#include <c10/util/hash.h>

namespace tessera::sharded {

namespace {

void print(std::ostream& out, const std::vector<int64_t>& numbers) {
  out << '[';
  for (size_t i = 0; i < numbers.size(); ++i) out << (i == 0 ? "" : ", ") << numbers[i];
  out << ']';
}

template <class T>
std::string printed(const T& value) {
  std::ostringstream out;
  out << value;
  return out.str();
}

struct LayoutName {
  c10::Layout layout;
  std::string_view name;
};
constexpr LayoutName kLayoutNames[] = {
    {c10::kSparse, "sparse"},        {c10::kSparseCsr, "sparse_csr"}, {c10::kSparseCsc, "sparse_csc"},
    {c10::kSparseBsr, "sparse_bsr"}, {c10::kSparseBsc, "sparse_bsc"}, {c10::kMkldnn, "mkldnn"},
    {c10::kJagged, "jagged"},
};

struct FormatName {
  c10::MemoryFormat format;
  std::string_view name;
};
constexpr FormatName kFormatNames[] = {
    {c10::MemoryFormat::ChannelsLast, "channels_last"},
    {c10::MemoryFormat::ChannelsLast3d, "channels_last_3d"},
    {c10::MemoryFormat::Preserve, "preserve"},
};

/// Reads text from left to right; throws where it is not as expected.
class Scanner {
 public:
  Scanner(std::string_view text, const char* what) : text_(text), what_(what) {}

  bool eat(char sign) {
    skip_space();
    if (position_ == text_.size() || text_[position_] != sign) return false;
    ++position_;
    return true;
  }
  void expect(char sign) { check(eat(sign), std::string("'") + sign + "'"); }
  std::vector<int64_t> numbers() {
    std::vector<int64_t> result;
    expect('[');
    if (eat(']')) return result;
    do {
      skip_space();
      int64_t number = 0;
      const auto [end, error] =
          std::from_chars(text_.data() + position_, text_.data() + text_.size(), number);
      check(error == std::errc(), "an integer");
      position_ = end - text_.data();
      result.push_back(number);
    } while (eat(','));
    expect(']');
    return result;
  }
  /// Up to a space, a comma, or a colon that a space or the end follows. Empty if there is none.
  std::string_view word() {
    skip_space();
    size_t end = position_;
    auto ends = [&](size_t at) {
      return text_[at] == ' ' || text_[at] == ',' ||
             (text_[at] == ':' && (at + 1 == text_.size() || text_[at + 1] == ' '));
    };
    while (end < text_.size() && !ends(end)) ++end;
    const std::string_view result = text_.substr(position_, end - position_);
    position_ = end;
    return result;
  }
  bool at_end() {
    skip_space();
    return position_ == text_.size();
  }
  void expect_end() { check(at_end(), "the end"); }
  void check(bool good, const std::string& expected) const {
    TESSERA_CHECK_VALUE(good, "\"", text_, "\" is no text of a ", what_, ": expected ", expected,
                        " at position ", position_, ".");
  }

 private:
  void skip_space() {
    while (position_ < text_.size() && text_[position_] == ' ') ++position_;
  }

  std::string_view text_;
  const char* what_;
  size_t position_ = 0;
};

ShardMetadata scan_shard(Scanner& scanner) {
  auto offsets = scanner.numbers();
  scanner.expect('+');
  auto sizes = scanner.numbers();
  const std::string_view placement = scanner.word();
  return {std::move(offsets), std::move(sizes),
          placement.empty() ? std::nullopt : std::optional<RemoteDevice>(placement)};
}

TensorProperties scan_properties(Scanner& scanner) {
  TensorProperties result;
  const auto dtype = parse_dtype(scanner.word());
  scanner.check(dtype.has_value(), "a dtype such as f32");
  result.dtype = *dtype;
  for (auto word = scanner.word(); !word.empty(); word = scanner.word()) {
    bool known = true;
    if (word == "requires_grad") {
      result.requires_grad = true;
    } else if (word == "pinned") {
      result.pin_memory = true;
    } else {
      known = false;
      for (const auto& [layout, name] : kLayoutNames) {
        if (name == word) result.layout = layout, known = true;
      }
      for (const auto& [format, name] : kFormatNames) {
        if (name == word) result.memory_format = format, known = true;
      }
    }
    scanner.check(known, "requires_grad, pinned, a layout or a memory format");
  }
  return result;
}

void write(ByteWriter& out, const ShardMetadata& shard) {
  out.put_list(shard.shard_offsets);
  out.put_list(shard.shard_sizes);
  out.put(shard.placement ? shard.placement->str() : std::string());
}

ShardMetadata read_shard(ByteReader& in) {
  auto offsets = in.get_list();
  auto sizes = in.get_list();
  const std::string_view placement = in.get_text();
  return {std::move(offsets), std::move(sizes),
          placement.empty() ? std::nullopt : std::optional<RemoteDevice>(placement)};
}

void write(ByteWriter& out, const TensorProperties& properties) {
  out.put(static_cast<int8_t>(properties.dtype));
  out.put(static_cast<int8_t>(properties.layout));
  out.put(static_cast<int8_t>(properties.memory_format));
  out.put(static_cast<int8_t>(properties.requires_grad));
  out.put(static_cast<int8_t>(properties.pin_memory));
}

TensorProperties read_properties(ByteReader& in) {
  auto get = [&](int64_t count) {
    const auto value = in.get<int8_t>();
    in.check(value >= 0 && value < count);
    return value;
  };
  TensorProperties result;
  result.dtype = static_cast<c10::ScalarType>(get(static_cast<int64_t>(c10::ScalarType::Undefined)));
  result.layout = static_cast<c10::Layout>(get(static_cast<int64_t>(c10::Layout::NumOptions)));
  result.memory_format =
      static_cast<c10::MemoryFormat>(get(static_cast<int64_t>(c10::MemoryFormat::NumOptions)));
  result.requires_grad = get(2) != 0;
  result.pin_memory = get(2) != 0;
  return result;
}

template <class T, class Read>
T read_whole(std::string_view bytes, const char* what, Read read) {
  ByteReader in(bytes, what);
  T result = read(in);
  in.check(in.done());
  return result;
}

template <class T>
std::string written(const T& value) {
  ByteWriter out;
  write(out, value);
  return out.take();
}

int64_t count_of(const std::vector<int64_t>& sizes) {
  TESSERA_CHECK_VALUE(std::none_of(sizes.begin(), sizes.end(), [](int64_t size) { return size < 0; }),
                      "A tensor cannot have size ", c10::IntArrayRef(sizes), ": sizes are 0 or more.");
  if (std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) return 0;
  int64_t count = 1;
  for (const int64_t size : sizes) {
    TESSERA_CHECK_VALUE(!__builtin_mul_overflow(count, size, &count), "A tensor of size ",
                        c10::IntArrayRef(sizes), " has more elements than 64 bits can count.");
  }
  return count;
}

}  // namespace

// --- ShardMetadata

ShardMetadata::ShardMetadata(std::vector<int64_t> offsets, std::vector<int64_t> sizes,
                             std::optional<RemoteDevice> where)
    : shard_offsets(std::move(offsets)), shard_sizes(std::move(sizes)), placement(std::move(where)) {
  TESSERA_CHECK_VALUE(shard_offsets.size() == shard_sizes.size(),
                      "A shard has as many offsets as sizes, not ", shard_offsets.size(), " offsets ",
                      c10::IntArrayRef(shard_offsets), " and ", shard_sizes.size(), " sizes ",
                      c10::IntArrayRef(shard_sizes), ".");
  for (size_t i = 0; i < shard_offsets.size(); ++i) {
    TESSERA_CHECK_VALUE(shard_offsets[i] >= 0 && shard_sizes[i] >= 0,
                        "A shard's offsets and sizes are 0 or more, "
                        "not ",
                        shard_offsets[i], " and ", shard_sizes[i], " in dim ", i, " of ", *this, ".");
    TESSERA_CHECK_VALUE(shard_offsets[i] <= std::numeric_limits<int64_t>::max() - shard_sizes[i],
                        "A shard ends beyond the largest int64, in dim ", i, " of ", *this, ".");
  }
}

int64_t ShardMetadata::numel() const { return count_of(shard_sizes); }

size_t ShardMetadata::hash() const {
  return c10::get_hash(shard_offsets, shard_sizes, placement ? placement->hash() : 0);
}

std::string ShardMetadata::str() const { return printed(*this); }

ShardMetadata ShardMetadata::parse(std::string_view text) {
  Scanner scanner(text, "shard");
  ShardMetadata result = scan_shard(scanner);
  scanner.expect_end();
  return result;
}

std::string ShardMetadata::to_bytes() const { return written(*this); }

ShardMetadata ShardMetadata::from_bytes(std::string_view bytes) {
  return read_whole<ShardMetadata>(bytes, "ShardMetadata", read_shard);
}

std::ostream& operator<<(std::ostream& out, const ShardMetadata& shard) {
  print(out, shard.shard_offsets);
  out << '+';
  print(out, shard.shard_sizes);
  if (shard.placement) out << ' ' << *shard.placement;
  return out;
}

// --- TensorProperties

TensorProperties TensorProperties::of(const at::Tensor& tensor) {
  return {tensor.scalar_type(), tensor.layout(), tensor.requires_grad(), c10::MemoryFormat::Contiguous,
          tensor.is_pinned()};
}

size_t TensorProperties::hash() const {
  return c10::get_hash(static_cast<int>(dtype), static_cast<int>(layout), requires_grad,
                       static_cast<int>(memory_format), pin_memory);
}

std::string TensorProperties::str() const { return printed(*this); }

TensorProperties TensorProperties::parse(std::string_view text) {
  Scanner scanner(text, "tensor's properties");
  const TensorProperties result = scan_properties(scanner);
  scanner.expect_end();
  return result;
}

std::string TensorProperties::to_bytes() const { return written(*this); }

TensorProperties TensorProperties::from_bytes(std::string_view bytes) {
  return read_whole<TensorProperties>(bytes, "TensorProperties", read_properties);
}

std::ostream& operator<<(std::ostream& out, const TensorProperties& properties) {
  out << to_text(properties.dtype);
  for (const auto& [layout, name] : kLayoutNames) {
    if (layout == properties.layout) out << ' ' << name;
  }
  for (const auto& [format, name] : kFormatNames) {
    if (format == properties.memory_format) out << ' ' << name;
  }
  if (properties.requires_grad) out << " requires_grad";
  if (properties.pin_memory) out << " pinned";
  return out;
}

// --- ShardedTensorMetadata

int64_t ShardedTensorMetadata::numel() const { return count_of(size); }

size_t ShardedTensorMetadata::hash() const {
  size_t result = c10::get_hash(size, tensor_properties.hash());
  for (const ShardMetadata& shard : shards_metadata) result = c10::hash_combine(result, shard.hash());
  return result;
}

std::string ShardedTensorMetadata::str() const { return printed(*this); }

ShardedTensorMetadata ShardedTensorMetadata::parse(std::string_view text) {
  Scanner scanner(text, "sharded tensor");
  ShardedTensorMetadata result;
  result.size = scanner.numbers();
  result.tensor_properties = scan_properties(scanner);
  scanner.expect(':');
  if (!scanner.at_end()) {
    do {
      result.shards_metadata.push_back(scan_shard(scanner));
    } while (scanner.eat(','));
  }
  scanner.expect_end();
  return result;
}

std::string ShardedTensorMetadata::to_bytes() const {
  ByteWriter out;
  out.put_list(size);
  write(out, tensor_properties);
  out.put(static_cast<int64_t>(shards_metadata.size()));
  for (const ShardMetadata& shard : shards_metadata) write(out, shard);
  return out.take();
}

ShardedTensorMetadata ShardedTensorMetadata::from_bytes(std::string_view bytes) {
  return read_whole<ShardedTensorMetadata>(bytes, "ShardedTensorMetadata", [](ByteReader& in) {
    ShardedTensorMetadata result;
    result.size = in.get_list();
    result.tensor_properties = read_properties(in);
    const int64_t count = in.get_count(3 * sizeof(int64_t));
    for (int64_t i = 0; i < count; ++i) result.shards_metadata.push_back(read_shard(in));
    return result;
  });
}

std::ostream& operator<<(std::ostream& out, const ShardedTensorMetadata& metadata) {
  print(out, metadata.size);
  out << ' ' << metadata.tensor_properties << ':';
  for (size_t i = 0; i < metadata.shards_metadata.size(); ++i) {
    out << (i == 0 ? " " : ", ") << metadata.shards_metadata[i];
  }
  return out;
}

}  // namespace tessera::sharded
