#include <tessera/debug/panels.h>

#include <algorithm>
#include <array>
#include <string_view>

#include <c10/util/StringUtil.h>
#include <c10/util/irange.h>

namespace tessera {

namespace {

/// Background colours of the 256 of a terminal that white letters can be read on.
constexpr std::array<int, 12> kBackgrounds{24, 22, 53, 94, 60, 23, 88, 28, 90, 130, 31, 58};

/// A grid of characters, some with a background, and lines that join where they meet.
class Canvas {
 public:
  Canvas(size_t rows, size_t columns) : columns_(columns), points_(rows * columns) {}

  void horizontal(size_t row, size_t from, size_t to) {
    for (size_t c = from; c < to; ++c) {
      at(row, c).lines |= kRight;
      at(row, c + 1).lines |= kLeft;
    }
  }
  void vertical(size_t column, size_t from, size_t to) {
    for (size_t r = from; r < to; ++r) {
      at(r, column).lines |= kDown;
      at(r + 1, column).lines |= kUp;
    }
  }
  void fill(size_t top, size_t bottom, size_t left, size_t right, int background) {
    for (size_t r = top; r < bottom; ++r) {
      for (size_t c = left; c < right; ++c) at(r, c).background = background;
    }
  }
  void write(size_t row, size_t column, std::string_view text) {
    for (const size_t i : c10::irange(text.size())) {
      if (column + i < columns_) at(row, column + i).letter = text[i];
    }
  }

  std::string str(bool coloured) const {
    constexpr std::array<const char*, 16> kSigns{" ", "╵", "╷", "│", "╴", "┘", "┐", "┤",
                                                 "╶", "└", "┌", "├", "─", "┴", "┬", "┼"};
    std::string out;
    for (size_t begin = 0; begin < points_.size(); begin += columns_) {
      std::string line;
      size_t written = 0;  // up to the last sign that is not a space
      int background = 0;
      for (size_t c = 0; c < columns_; ++c) {
        const Point& point = points_[begin + c];
        if (coloured && point.background != background) {
          background = point.background;
          line += background ? c10::str("\033[48;5;", background, ";97m") : "\033[0m";
        }
        line += point.letter ? std::string(1, point.letter) : std::string(kSigns[point.lines]);
        if (point.letter || point.lines || point.background) written = line.size();
      }
      if (background) {
        line += "\033[0m";
        written = line.size();
      }
      line.resize(written);
      out += line + "\n";
    }
    return out;
  }

 private:
  static constexpr uint8_t kUp = 1, kDown = 2, kLeft = 4, kRight = 8;
  struct Point {
    uint8_t lines = 0;
    char letter = 0;
    int background = 0;
  };
  Point& at(size_t row, size_t column) { return points_[row * columns_ + column]; }

  size_t columns_;
  std::vector<Point> points_;
};

std::string short_ranks(const std::vector<int64_t>& ranks) {
  const std::string all = ranks_text(ranks);
  return all.size() <= 15 ? all : c10::str(ranks.size(), " ranks");
}

std::string interval(const std::vector<int64_t>& breaks, size_t i) {
  return c10::str(breaks[i], ":", breaks[i + 1]);
}

std::string draw_panel(const Tiling& tiling, const Panel& panel, bool coloured) {
  const bool has_rows = tiling.shape.size() > 1, has_columns = !tiling.shape.empty();
  const size_t rows = panel.row_breaks.size() - 1, columns = panel.column_breaks.size() - 1;
  // Of each column of blocks, with a space on either side; a line stands between them.
  std::vector<size_t> widths(columns, 3);
  for (const size_t c : c10::irange(columns)) {
    if (has_columns) widths[c] = std::max(widths[c], interval(panel.column_breaks, c).size() + 2);
  }
  for (const Panel::Cell& cell : panel.cells) {
    const size_t needed = short_ranks(tiling.blocks[cell.block].ranks).size() + 2;
    size_t there = cell.right - cell.left - 1;
    for (size_t c = cell.left; c < cell.right; ++c) there += widths[c];
    if (there < needed) widths[cell.right - 1] += needed - there;
  }
  size_t margin = 0;
  for (size_t r = 0; has_rows && r < rows; ++r)
    margin = std::max(margin, interval(panel.row_breaks, r).size() + 1);
  std::vector<size_t> lefts{margin};
  for (const size_t width : widths) lefts.push_back(lefts.back() + width + 1);

  Canvas canvas(2 * rows + 2, lefts.back() + 1);
  for (size_t c = 0; has_columns && c < columns; ++c) {
    const std::string text = interval(panel.column_breaks, c);
    canvas.write(0, lefts[c] + 1 + (widths[c] - text.size()) / 2, text);
  }
  for (size_t r = 0; has_rows && r < rows; ++r) canvas.write(2 * r + 2, 0, interval(panel.row_breaks, r));
  for (const Panel::Cell& cell : panel.cells) {
    const auto& ranks = tiling.blocks[cell.block].ranks;
    const size_t top = 2 * cell.top + 1, bottom = 2 * cell.bottom + 1;
    const size_t left = lefts[cell.left], right = lefts[cell.right];
    canvas.horizontal(top, left, right);
    canvas.horizontal(bottom, left, right);
    canvas.vertical(left, top, bottom);
    canvas.vertical(right, top, bottom);
    canvas.fill(top + 1, bottom, left + 1, right,
                kBackgrounds[static_cast<size_t>(ranks[0]) % kBackgrounds.size()]);
    const std::string label = short_ranks(ranks);
    canvas.write((top + bottom) / 2, left + 1 + (right - left - 1 - label.size()) / 2, label);
  }
  return canvas.str(coloured);
}

}  // namespace

std::string draw_text(const Tiling& tiling, bool coloured) {
  std::string out = tiling.title + "\n";
  if (!tiling.note.empty()) out += tiling.note + "\n";
  const Panels panels = panels_of(tiling);
  for (const Panel& panel : panels.panels) {
    if (!panel.title.empty()) out += panel.title + "\n";
    out += draw_panel(tiling, panel, coloured);
  }
  if (tiling.blocks.empty()) out += "has no elements\n";
  if (!panels.left_out.empty()) out += panels.left_out + "\n";
  if (!tiling.without.empty() && !tiling.blocks.empty())
    out += c10::str("nothing on ", tiling.without.size() == 1 ? "rank " : "ranks ",
                    ranks_text(tiling.without), "\n");
  return out;
}

}  // namespace tessera
