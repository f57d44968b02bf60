#pragma once

#include <tessera/debug/visualize.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

/// How a tiling is laid out in two dims, whatever draws it.
namespace tessera {

/// One rectangle of blocks: all of a tensor of up to two dims, or a slice of one with more.
struct Panel {
  std::string title;                               // "[0:2, :, :]"; empty if there is but one
  std::vector<int64_t> row_breaks, column_breaks;  // ascending, where blocks begin and end
  struct Cell {
    size_t block;                     // in Tiling::blocks
    size_t top, bottom, left, right;  // among the breaks
  };
  std::vector<Cell> cells;
};

struct Panels {
  std::vector<Panel> panels;
  std::string left_out;  // a line that says what is not drawn; or empty
};
Panels panels_of(const Tiling& tiling);

/// "0-3, 8"
std::string ranks_text(const std::vector<int64_t>& ranks);
/// "[0:4, 2:4]"
std::string range_text(const Tiling::Block& block);
int64_t bytes_of(const Tiling& tiling, const Tiling::Block& block);

/// The pictures.
std::string draw_text(const Tiling& tiling, bool coloured);
std::string draw_svg(const Tiling& tiling);
/// `moves`: pairs of a block before and one after, between which elements go.
struct BlockMove {
  size_t from, to;
};
std::string draw_svg(const Tiling& before, const Tiling& after, const std::vector<BlockMove>& moves,
                     const std::vector<std::string>& lines);
std::string html_page(const std::string& title, const std::string& svg);

}  // namespace tessera
