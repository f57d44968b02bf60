#pragma once

#include <tessera/placement/text.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

/// How texts of placements, specs and calls are read.
namespace tessera {

namespace text_parts {

inline bool is_space(char c) { return std::isspace(static_cast<unsigned char>(c)) != 0; }

template <typename Values, typename Print>
void print_list(std::ostream& out, const Values& values, const char* brackets, Print print) {
  out << brackets[0];
  for (size_t i = 0; i < values.size(); ++i) {
    out << (i == 0 ? "" : ", ");
    print(i);
  }
  out << brackets[1];
}

inline std::string mesh_text(c10::IntArrayRef shape, const std::vector<std::string>& names) {
  std::ostringstream out;
  out << "mesh";
  print_list(out, shape, "()", [&](size_t i) {
    if (!names.empty()) out << names[i] << '=';
    out << shape[i];
  });
  return out.str();
}

}  // namespace text_parts

/// Reads one text from left to right. A word is a run of characters that are neither space nor signs. What cannot be
/// read is an error that shows the text, marks the position and says what was expected there.
class TextReader {
 public:
  struct Word {
    std::string_view text;
    size_t begin;
  };

  TextReader(std::string_view text, const char* what) : text_(text), what_(what) {}

  Placement placement() {
    const Word kind = word();
    if (kind.text == "R") return Replicate();
    if (kind.text == "S") {
      expect('(');
      const auto dim = number<int32_t>("a tensor dim");
      expect(')');
      return Shard(dim);
    }
    if (kind.text == "SS") {
      expect('(');
      const auto dim = number<int32_t>("a tensor dim");
      expect(',');
      const auto split = number_from<int64_t>(1, "a split of at least 1");
      expect(')');
      return StridedShard(dim, split);
    }
    if (kind.text == "P") {
      expect('(');
      const Placement placement = partial();
      expect(')');
      return placement;
    }
    fail(kind.begin, "a placement: R, S(dim), SS(dim, split), P(op) or P(norm p)");
  }

  Placements placements() {
    Placements out;
    list("[]", [&] { out.push_back(placement()); });
    return out;
  }

  Layout layout(bool with_shape) {
    Layout out;
    const size_t begin = position();
    out.placements = placements();

    const Order order = read_order();
    expect("on");
    mesh(out);
    const size_t mesh_ndim = out.mesh_shape.size();
    if (out.placements.size() != mesh_ndim) {
      fail(begin,
           c10::str("one placement for each of the ", mesh_ndim, " mesh dims, not ", out.placements.size()));
    }
    set_order(out, order);

    if (with_shape || peek() == ':') tensor(out);
    return out;
  }

  /// "order (tp, dp)", before the mesh is known.
  struct Order {
    std::vector<Word> dims;
    size_t begin;
    bool given;
  };
  Order read_order() {
    Order order{{}, position(), accept("order")};
    if (order.given) list("()", [&] { order.dims.push_back(word()); });
    return order;
  }

  void set_order(Layout& out, const Order& order) {
    for (const Word& dim : order.dims) out.order.push_back(mesh_dim(dim, out));
    if (!order.given) return;
    const size_t mesh_ndim = out.mesh_shape.size();
    ShardOrder sorted = out.order;
    std::sort(sorted.begin(), sorted.end());
    bool complete = sorted.size() == mesh_ndim;
    for (size_t i = 0; complete && i < mesh_ndim; ++i) complete = sorted[i] == static_cast<int64_t>(i);
    if (!complete) fail(order.begin, "an order that names each mesh dim exactly once");
  }

  void end() {
    if (position() != text_.size()) fail(position(), "the end");
  }

  // Where the next word or sign begins.
  size_t position() {
    while (position_ < text_.size() && text_parts::is_space(text_[position_])) ++position_;
    return position_;
  }

  /// Reads on from a position that was read before.
  void seek(size_t position) { position_ = position; }

  char peek() { return position() < text_.size() ? text_[position_] : '\0'; }

  bool accept(char sign) {
    if (peek() != sign) return false;
    ++position_;
    return true;
  }

  void expect(char sign) {
    if (!accept(sign)) fail(position(), c10::str("'", sign, "'"));
  }

  Word word() {
    const size_t begin = position();
    while (position_ < text_.size() && !text_parts::is_space(text_[position_]) &&
           std::string_view("=,:()[]").find(text_[position_]) == std::string_view::npos) {
      ++position_;
    }
    return {text_.substr(begin, position_ - begin), begin};
  }

  bool accept(std::string_view wanted) {
    const Word found = word();
    if (found.text == wanted) return true;
    position_ = found.begin;
    return false;
  }

  void expect(std::string_view wanted) {
    if (!accept(wanted)) fail(position(), c10::str("'", wanted, "'"));
  }

  template <typename T>
  static std::optional<T> as_number(const Word& word) {
    T value{};
    const char* end = word.text.data() + word.text.size();
    const auto [stop, error] = std::from_chars(word.text.data(), end, value);
    if (error != std::errc() || stop != end) return std::nullopt;
    return value;
  }

  template <typename T>
  T number(const char* expected) {
    const Word found = word();
    const auto value = as_number<T>(found);
    if (!value) fail(found.begin, expected);
    return *value;
  }

  template <typename T>
  T number_from(T least, const char* expected) {
    const size_t begin = position();
    const T value = number<T>(expected);
    if (value < least) fail(begin, expected);
    return value;
  }

  template <typename ReadItem>
  void list(const char* brackets, ReadItem read_item) {
    expect(brackets[0]);
    if (accept(brackets[1])) return;
    do {
      read_item();
    } while (accept(','));
    if (!accept(brackets[1])) fail(position(), c10::str("',' or '", brackets[1], "'"));
  }

  Placement partial() {
    const Word found = word();
    const auto op = reduce_op(found.text);
    if (!op) {
      std::string expected = "a reduce op:";
      for (const ReduceOp known : kReduceOps) expected += c10::str(" ", known);
      fail(found.begin, expected);
    }
    if (*op != ReduceOp::norm) return Partial(*op);
    const char* expected = "the p of a norm, finite and not 0";
    const size_t begin = position();
    const auto p = number<double>(expected);
    if (!std::isfinite(p) || p == 0) fail(begin, expected);
    return NormPartial(p);
  }

  void mesh(Layout& out) {
    expect("mesh");
    list("()", [&] {
      const Word first = word();
      const bool named = accept('=');
      if (named && first.text.empty()) fail(first.begin, "a mesh dim name");
      if (!out.mesh_shape.empty() && named == out.mesh_dim_names.empty()) {
        fail(first.begin, "names for all mesh dims or for none");
      }
      if (named) {
        const auto& names = out.mesh_dim_names;
        if (std::find(names.begin(), names.end(), first.text) != names.end())
          fail(first.begin, "another name for each mesh dim");
        out.mesh_dim_names.emplace_back(first.text);
      }
      const Word size = named ? word() : first;
      const auto value = as_number<int64_t>(size);
      if (!value || *value < 1) fail(size.begin, "the size of a mesh dim, at least 1");
      out.mesh_shape.push_back(*value);
    });
  }

  int64_t mesh_dim(const Word& dim, const Layout& layout) {
    const auto& names = layout.mesh_dim_names;
    const auto found = std::find(names.begin(), names.end(), dim.text);
    if (found != names.end()) return found - names.begin();
    const auto position = as_number<int64_t>(dim);
    if (!position || *position < 0 || *position >= static_cast<int64_t>(layout.mesh_shape.size())) {
      fail(dim.begin,
           c10::str("a dim of ", text_parts::mesh_text(layout.mesh_shape, names), ", by name or position"));
    }
    return *position;
  }

  void tensor(Layout& out) {
    expect(':');
    dtype_and_shape(out);
    strides(out);
  }

  void dtype_and_shape(Layout& out) {
    const Word dtype = word();
    out.dtype = parse_dtype(dtype.text);
    if (!out.dtype) fail(dtype.begin, "a dtype such as f32, bf16 or i64");
    out.shape = sizes("a size, at least 0");
  }

  void strides(Layout& out) {
    const size_t begin = position();
    if (!accept("strides")) return;
    out.strides = sizes("a stride, at least 0");
    if (out.strides->size() != out.shape->size())
      fail(begin, c10::str(out.shape->size(), " strides, as many as sizes"));
  }

  c10::DimVector sizes(const char* expected) {
    c10::DimVector out;
    list("[]", [&] { out.push_back(number_from<int64_t>(0, expected)); });
    return out;
  }

  // Shows the text on one line with a mark below the place, counting characters, not bytes.
  [[noreturn]] void fail(size_t place, const std::string& expected) const {
    std::string shown(text_);
    std::replace_if(shown.begin(), shown.end(), text_parts::is_space, ' ');
    const auto column = std::count_if(text_.begin(), text_.begin() + static_cast<std::ptrdiff_t>(place),
                                      [](unsigned char byte) { return (byte & 0xC0) != 0x80; });
    throw c10::ValueError(c10::str("cannot read ", what_, ": expected ", expected, "\n  ", shown, "\n  ",
                                   std::string(static_cast<size_t>(column), ' '), "^"),
                          /*backtrace=*/nullptr);
  }

 private:
  std::string_view text_;
  const char* what_;
  size_t position_ = 0;
};

}  // namespace tessera
