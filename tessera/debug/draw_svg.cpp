#include <tessera/debug/panels.h>
#include <tessera/redistribute/plan.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <utility>

#include <c10/util/StringUtil.h>
#include <c10/util/irange.h>

namespace tessera {

namespace {

constexpr double kLetter = 7.3;  // about the width of a letter of 12 px
constexpr double kPanelWidth = 380, kPanelHeight = 300, kStripHeight = 46, kGap = 26;
constexpr size_t kMaxArrows = 64;

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '&':
        out += "&amp;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

/// Whole pixels, but for what a rounding could move.
std::string px(double value) {
  const auto rounded = static_cast<int64_t>(std::lround(value * 10));
  return rounded % 10 == 0 ? std::to_string(rounded / 10)
                           : c10::str(rounded / 10, ".", std::abs(rounded % 10));
}

/// Neighbouring ranks get colours that are far apart.
std::string fill_of(const std::vector<int64_t>& ranks) {
  const double hue = std::fmod(static_cast<double>(ranks[0]) * 137.508 + 205, 360);
  return c10::str("hsl(", std::lround(hue), ",62%,80%)");
}

std::string svg_text(double x, double y, const std::string& text, const std::string& more = "") {
  return c10::str("<text x=\"", px(x), "\" y=\"", px(y), "\"", more.empty() ? "" : " " + more, ">",
                  escaped(text), "</text>\n");
}

/// In lines that are no wider than most panels.
std::vector<std::string> wrapped(const std::string& text) {
  constexpr size_t kWidth = 56;
  std::vector<std::string> lines;
  for (size_t begin = 0; begin < text.size();) {
    size_t end = text.size();
    if (end - begin > kWidth) {
      const size_t space = text.rfind(' ', begin + kWidth);
      if (space != std::string::npos && space > begin) end = space;
    }
    lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

/// Where the breaks of a dim are drawn: in proportion, but wide enough for what is in them.
std::vector<double> scaled(const std::vector<int64_t>& breaks, double length,
                           const std::vector<double>& least) {
  const auto size = static_cast<double>(breaks.back() - breaks.front());
  std::vector<double> positions{0};
  for (size_t i = 0; i + 1 < breaks.size(); ++i) {
    const double share = static_cast<double>(breaks[i + 1] - breaks[i]) / size * length;
    positions.push_back(positions.back() + std::max(share, least[i]));
  }
  return positions;
}

struct Point {
  double x, y;
};

/// Draws one tiling with its upper left corner at a point, and says where its blocks are.
class Drawing {
 public:
  Drawing(const Tiling& tiling, Point corner, const std::string& prefix)
      : tiling_(tiling), corner_(corner), prefix_(prefix) {
    draw();
  }

  const std::string& str() const { return out_; }
  double width() const { return width_; }
  double height() const { return height_; }
  /// Where the middle of a part of a block is drawn, the part that it has in common with `other`; nothing if it is not.
  std::optional<Point> middle_of(size_t block, const Tiling::Block& other) const {
    const auto found = drawn_.find(block);
    if (found == drawn_.end()) return std::nullopt;
    const auto& [from, to] = found->second;
    // As a share of the block, along one of the last two dims.
    const auto share = [&](size_t from_last) {
      const Tiling::Block& own = tiling_.blocks[block];
      if (own.offset.size() <= from_last) return 0.5;
      const size_t d = own.offset.size() - 1 - from_last;
      const int64_t begin = std::max(own.offset[d], other.offset[d]);
      const int64_t end = std::min(own.offset[d] + own.shape[d], other.offset[d] + other.shape[d]);
      return (static_cast<double>(begin + end) / 2 - static_cast<double>(own.offset[d])) /
             static_cast<double>(own.shape[d]);
    };
    return Point{from.x + share(0) * (to.x - from.x), from.y + share(1) * (to.y - from.y)};
  }

 private:
  void draw() {
    double y = corner_.y + 14;
    line(y, tiling_.title, "class=\"title\"");
    for (const std::string& part : wrapped(tiling_.note)) line(y, part, "class=\"note\"");
    const Panels panels = panels_of(tiling_);
    double x = corner_.x, row_height = 0;
    for (const Panel& panel : panels.panels) {
      const Point size = draw_panel(panel, {x, y});
      row_height = std::max(row_height, size.y);
      width_ = std::max(width_, x + size.x - corner_.x);
      x += size.x + kGap;
      if (x - corner_.x > 2 * kPanelWidth) {  // the next ones below
        x = corner_.x;
        y += row_height + 10;
        row_height = 0;
      }
    }
    y += row_height + 16;
    if (tiling_.blocks.empty()) line(y, "has no elements", "class=\"note\"");
    if (!panels.left_out.empty()) line(y, panels.left_out, "class=\"note\"");
    if (!tiling_.without.empty() && !tiling_.blocks.empty())
      line(y,
           c10::str("nothing on ", tiling_.without.size() == 1 ? "rank " : "ranks ",
                    ranks_text(tiling_.without)),
           "class=\"note\"");
    height_ = y - corner_.y;
  }

  void line(double& y, const std::string& text, const std::string& more) {
    out_ += svg_text(corner_.x, y, text, more);
    width_ = std::max(width_, static_cast<double>(text.size()) * kLetter);
    y += 18;
  }

  /// Returns its size.
  Point draw_panel(const Panel& panel, Point at) {
    const bool has_rows = tiling_.shape.size() > 1, has_columns = !tiling_.shape.empty();
    const size_t rows = panel.row_breaks.size() - 1, columns = panel.column_breaks.size() - 1;
    const auto extent = [](const std::vector<int64_t>& breaks) {
      return static_cast<double>(breaks.back() - breaks.front());
    };
    const double aspect = extent(panel.row_breaks) / extent(panel.column_breaks);
    const double height =
        has_rows ? std::clamp(kPanelWidth * aspect, 0.3 * kPanelHeight, kPanelHeight) : kStripHeight;
    const double width =
        has_rows ? std::clamp(kPanelHeight / aspect, 0.4 * kPanelWidth, kPanelWidth) : kPanelWidth;
    std::vector<double> least_rows(rows, 22), least_columns(columns, 26);
    for (const Panel::Cell& cell : panel.cells) {
      if (cell.right == cell.left + 1)
        least_columns[cell.left] = std::max(least_columns[cell.left], label_width(cell));
    }
    const auto xs = scaled(panel.column_breaks, width, least_columns);
    const auto ys = scaled(panel.row_breaks, height, least_rows);
    double margin = 6;
    for (size_t r = 0; has_rows && r <= rows; ++r)
      margin =
          std::max(margin, 10 + kLetter * static_cast<double>(std::to_string(panel.row_breaks[r]).size()));
    const double left = at.x + margin, top = at.y + (panel.title.empty() ? 18 : 38);
    if (!panel.title.empty()) out_ += svg_text(at.x, at.y + 10, panel.title, "class=\"slice\"");
    add_ticks(
        panel.column_breaks, xs, has_columns,
        [&](double x) {
          return Point{left + x, top - 6};
        },
        "text-anchor=\"middle\"");
    add_ticks(
        panel.row_breaks, ys, has_rows,
        [&](double y) {
          return Point{left - 6, top + y + 4};
        },
        "text-anchor=\"end\"");
    for (const Panel::Cell& cell : panel.cells)
      draw_cell(cell, {left + xs[cell.left], top + ys[cell.top]},
                {left + xs[cell.right], top + ys[cell.bottom]});
    const double last_tick =
        has_columns ? kLetter * static_cast<double>(std::to_string(panel.column_breaks.back()).size()) / 2
                    : 0;
    return {left + xs.back() - at.x + last_tick, top + ys.back() - at.y + 8};
  }

  double label_width(const Panel::Cell& cell) const {
    return std::min(kLetter * static_cast<double>(ranks_text(tiling_.blocks[cell.block].ranks).size()) + 12,
                    120.0);
  }

  /// Those that have room.
  template <class Where>
  void add_ticks(const std::vector<int64_t>& breaks, const std::vector<double>& positions, bool shown,
                 Where where, const std::string& anchor) {
    double last = -1e9;
    for (size_t i = 0; shown && i < breaks.size(); ++i) {
      const std::string text = std::to_string(breaks[i]);
      const double room = std::max(14.0, kLetter * static_cast<double>(text.size()) + 4);
      if (positions[i] - last < room && i + 1 < breaks.size()) continue;
      if (positions[i] - last < 0.7 * room) continue;
      last = positions[i];
      const Point point = where(positions[i]);
      out_ += svg_text(point.x, point.y, text, "class=\"tick\" " + anchor);
    }
  }

  void draw_cell(const Panel::Cell& cell, Point from, Point to) {
    const Tiling::Block& block = tiling_.blocks[cell.block];
    const double width = to.x - from.x, height = to.y - from.y;
    const Point middle{from.x + width / 2, from.y + height / 2};
    drawn_.try_emplace(cell.block, std::pair(from, to));
    std::string label = ranks_text(block.ranks);
    if (kLetter * static_cast<double>(label.size()) > width - 6) {
      label = c10::str(block.ranks.size(), " ranks");
      if (kLetter * static_cast<double>(label.size()) > width - 6) label = "";
    }
    std::string ranks;
    for (const int64_t rank : block.ranks)
      ranks.append(ranks.empty() ? "" : " ").append(std::to_string(rank));
    const std::string shape = c10::str(c10::Join(" x ", c10::IntArrayRef(block.shape)));
    const std::string info =
        c10::str(block.ranks.size() == 1 ? "rank " : "ranks ", ranks_text(block.ranks), "  |  ",
                 range_text(block), "  |  ", block.shape.empty() ? "scalar" : shape, "  |  ",
                 bytes_text(bytes_of(tiling_, block)), " on each");
    out_ += c10::str("<g class=\"block\" id=\"", prefix_, cell.block, "\" data-ranks=\"", ranks,
                     "\" data-info=\"", escaped(info), "\"><title>", escaped(info), "</title><rect x=\"",
                     px(from.x), "\" y=\"", px(from.y), "\" width=\"", px(width), "\" height=\"", px(height),
                     "\" fill=\"", fill_of(block.ranks), "\"/>");
    if (tiling_.partial)
      out_ += c10::str("<rect x=\"", px(from.x), "\" y=\"", px(from.y), "\" width=\"", px(width),
                       "\" height=\"", px(height), "\" fill=\"url(#partial)\"/>");
    if (!label.empty())
      out_ += svg_text(middle.x, middle.y + 4, label, "class=\"ranks\" text-anchor=\"middle\"");
    out_ += "</g>\n";
  }

  const Tiling& tiling_;
  const Point corner_;
  const std::string prefix_;
  std::string out_;
  double width_ = 0, height_ = 0;
  std::map<size_t, std::pair<Point, Point>> drawn_;  // opposite corners
};

std::string document(double width, double height, const std::string& content) {
  return c10::str(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"", px(std::ceil(width)), "\" height=\"",
      px(std::ceil(height)), "\" viewBox=\"0 0 ", px(std::ceil(width)), " ", px(std::ceil(height)),
      "\" font-family=\"ui-monospace, 'DejaVu Sans Mono', Menlo, monospace\" font-size=\"12\" "
      "style=\"background:#fff\">\n"
      "<style>text{fill:#222}.title{font-weight:bold}.note,.tick,.slice,.step{fill:#555}.tick{font-size:10px}"
      "rect{stroke:#444;stroke-width:1}.arrow{fill:none;stroke:#333;stroke-width:1.2;opacity:.55;marker-end:"
      "url(#head)}"
      ".block.dim{opacity:.22}.block.lit rect{stroke-width:2.5}.arrow.dim{opacity:.05}</style>\n"
      "<defs><pattern id=\"partial\" width=\"7\" height=\"7\" patternUnits=\"userSpaceOnUse\" "
      "patternTransform=\"rotate(45)\"><line x1=\"0\" y1=\"0\" x2=\"0\" y2=\"7\" stroke=\"#fff\" "
      "stroke-width=\"3\" "
      "opacity=\".7\"/></pattern><marker id=\"head\" viewBox=\"0 0 8 8\" refX=\"7\" refY=\"4\" "
      "markerWidth=\"7\" "
      "markerHeight=\"7\" orient=\"auto-start-reverse\"><path d=\"M0 0L8 4L0 8z\" "
      "fill=\"#333\"/></marker></defs>\n"
      "<rect width=\"100%\" height=\"100%\" fill=\"#fff\" style=\"stroke:none\"/>\n",
      content, "</svg>\n");
}

}  // namespace

std::string draw_svg(const Tiling& tiling) {
  const Drawing drawing(tiling, {16, 12}, "b");
  return document(drawing.width() + 32, drawing.height() + 20, drawing.str());
}

std::string draw_svg(const Tiling& before, const Tiling& after, const std::vector<BlockMove>& moves,
                     const std::vector<std::string>& lines) {
  const Drawing left(before, {16, 12}, "b");
  const double second = 16 + left.width() + 130;
  const Drawing right(after, {second, 12}, "a");
  double y = 12 + std::max(left.height(), right.height()) + 12, width = second + right.width();
  std::string content = left.str() + right.str();
  // Where there are many, those to the first blocks show how it goes.
  std::string shown;
  size_t count = 0;
  for (const auto& [from, to] : moves) {
    const auto source = left.middle_of(from, after.blocks[to]);
    const auto target = right.middle_of(to, before.blocks[from]);
    if (!source || !target) continue;
    if (++count > kMaxArrows) continue;
    const Point a{source->x + 6, source->y}, b{target->x - 6, target->y};
    const double bend = (b.x - a.x) / 2;
    shown += c10::str("<path class=\"arrow\" data-from=\"b", from, "\" data-to=\"a", to, "\" d=\"M", px(a.x),
                      " ", px(a.y), "C", px(a.x + bend), " ", px(a.y), " ", px(b.x - bend), " ", px(b.y), " ",
                      px(b.x), " ", px(b.y), "\"/>\n");
  }
  content += shown;
  const auto add = [&](const std::string& text, const std::string& style) {
    content += svg_text(16, y, text, style + " xml:space=\"preserve\"");
    width = std::max(width, 16 + kLetter * static_cast<double>(text.size()));
    y += 18;
  };
  for (const size_t i : c10::irange(lines.size()))
    add(lines[i], i == 0 ? "class=\"title\"" : "class=\"step\"");
  if (count > kMaxArrows) add(c10::str("the first ", kMaxArrows, " of ", count, " arrows"), "class=\"note\"");
  if (count == 0) add("nothing has to come from another rank", "class=\"note\"");
  return document(width + 16, y + 8, content);
}

std::string html_page(const std::string& title, const std::string& svg) {
  return c10::str(
      "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>", escaped(title),
      "</title>\n<style>\n"
      "body{font:14px/1.45 system-ui,sans-serif;margin:20px;color:#222;background:#fff}\n"
      "#info{position:sticky;top:0;min-height:1.5em;padding:8px 12px;background:#f2f4f7;border-radius:6px;"
      "font-family:ui-monospace,'DejaVu Sans Mono',monospace;white-space:pre-wrap;z-index:1}\n"
      "#ranks{margin:10px 0;line-height:2}#ranks button{font:12px ui-monospace,monospace;margin:0 3px 0 "
      "0;padding:2px 7px;"
      "border:1px solid #bbb;border-radius:4px;background:#fff;cursor:pointer}\n"
      "#ranks button:hover,#ranks button:focus{background:#e6ecf5}svg{max-width:none}\n"
      "</style></head><body>\n<div id=\"info\">Hover a block for its ranks, offsets and bytes, or a rank for "
      "its blocks."
      "</div>\n<div id=\"ranks\"></div>\n<div style=\"overflow-x:auto\">\n",
      svg,
      "</div>\n<script>\n"
      "const info = document.getElementById('info'), usual = info.textContent;\n"
      "const blocks = [...document.querySelectorAll('.block')], arrows = "
      "[...document.querySelectorAll('.arrow')];\n"
      "const ranksOf = block => block.dataset.ranks.split(' ');\n"
      "for (const each of document.querySelectorAll('.block > title')) each.remove();  // info says it\n"
      "function light(lit, text) {\n"
      "  const ids = new Set(blocks.filter(lit).map(block => block.id));\n"
      "  for (const block of blocks) {\n"
      "    block.classList.toggle('lit', ids.has(block.id));\n"
      "    block.classList.toggle('dim', !ids.has(block.id));\n"
      "  }\n"
      "  for (const arrow of arrows)\n"
      "    arrow.classList.toggle('dim', !ids.has(arrow.dataset.from) && !ids.has(arrow.dataset.to));\n"
      "  info.textContent = text;\n"
      "}\n"
      "function dark() {\n"
      "  for (const each of [...blocks, ...arrows]) each.classList.remove('lit', 'dim');\n"
      "  info.textContent = usual;\n"
      "}\n"
      "for (const block of blocks) {\n"
      "  const own = new Set(ranksOf(block));\n"
      "  block.addEventListener('mouseenter', () =>\n"
      "    light(other => other === block || ranksOf(other).some(rank => own.has(rank)), "
      "block.dataset.info));\n"
      "  block.addEventListener('mouseleave', dark);\n"
      "}\n"
      "const all = [...new Set(blocks.flatMap(ranksOf))].sort((a, b) => a - b);\n"
      "for (const rank of all.slice(0, 256)) {\n"
      "  const button = document.createElement('button');\n"
      "  button.textContent = rank;\n"
      "  const text = () => blocks.filter(block => ranksOf(block).includes(rank))\n"
      "    .map(block => (arrows.length ? (block.id[0] === 'b' ? 'before: ' : 'after:  ') : '') + "
      "block.dataset.info).join('\\n');\n"
      "  for (const enter of ['mouseenter', 'focus'])\n"
      "    button.addEventListener(enter, () => light(block => ranksOf(block).includes(rank), text()));\n"
      "  for (const leave of ['mouseleave', 'blur']) button.addEventListener(leave, dark);\n"
      "  document.getElementById('ranks').append(button);\n"
      "}\n"
      "document.getElementById('ranks').prepend(all.length ? 'ranks ' : '');\n"
      "</script></body></html>\n");
}

}  // namespace tessera
