#include <tessera/debug/fake_mesh.h>
#include <tessera/debug/panels.h>
#include <tessera/debug/visualize.h>
#include <tessera/dispatch/call_text.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/error.h>
#include <tessera/placement/text.h>
#include <tessera/sharded/sharded_tensor.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include <c10/util/irange.h>

namespace tessera {

namespace {

using Block = Tiling::Block;

constexpr size_t kMaxBreaks = 65, kMaxPanels = 24;

std::string shape_text(const std::vector<int64_t>& shape) {
  return c10::str("[", c10::Join(",", c10::IntArrayRef(shape)), "]");
}

/// Blocks with the same elements become one.
void add_block(std::vector<Block>& blocks, std::map<std::vector<int64_t>, size_t>& known, int64_t rank,
               std::vector<int64_t> offset, std::vector<int64_t> shape) {
  std::vector<int64_t> key = offset;
  key.insert(key.end(), shape.begin(), shape.end());
  const auto [found, is_new] = known.try_emplace(std::move(key), blocks.size());
  if (is_new) blocks.push_back({{}, std::move(offset), std::move(shape)});
  blocks[found->second].ranks.push_back(rank);
}

bool is_empty(const std::vector<int64_t>& shape) {
  return std::find(shape.begin(), shape.end(), 0) != shape.end();
}

std::string partial_note(const Spec& spec) {
  std::string note;
  for (const size_t m : c10::irange(spec.placements().size())) {
    if (!spec.placement(m).is_partial()) continue;
    const auto& names = spec.mesh().mesh_dim_names();
    note += c10::str(note.empty() ? "" : "; ", spec.placement(m), ": the ", spec.mesh().shape()[m],
                     " ranks along ", names.empty() ? c10::str("mesh dim ", m) : names[m],
                     " hold one partial value each, which are still to be reduced");
  }
  return note;
}

}  // namespace

PictureFormat parse_picture_format(std::string_view text) {
  if (text == "text") return PictureFormat::text;
  if (text == "coloured") return PictureFormat::coloured;
  if (text == "svg") return PictureFormat::svg;
  TESSERA_CHECK_VALUE(text == "html",
                      "visualize: the format is \"text\", \"coloured\", \"svg\" or \"html\", got \"", text,
                      "\".");
  return PictureFormat::html;
}

Tiling Tiling::of(const Spec& spec) {
  Tiling tiling{.title = c10::str(tensor_text(spec), " on ", spec.mesh()),
                .note = partial_note(spec),
                .shape = spec.shape().vec(),
                .element_size = static_cast<int64_t>(c10::elementSize(spec.dtype())),
                .partial = spec.has_partial()};
  std::map<std::vector<int64_t>, size_t> known;
  const auto ranks = spec.mesh().ranks();
  const auto coordinates = spec.mesh().coordinates();
  for (const size_t i : c10::irange(ranks.size())) {
    std::vector<Block> of_rank{{{}, {}, {}}};
    for (const Pieces& pieces : spec.local_pieces(coordinates[i])) {
      std::vector<Block> longer;
      for (const Block& block : of_rank) {
        for (const Range& range : pieces) {
          if (range.size == 0) continue;
          longer.push_back(block);
          longer.back().offset.push_back(range.offset);
          longer.back().shape.push_back(range.size);
        }
      }
      of_rank = std::move(longer);
    }
    if (of_rank.empty()) tiling.without.push_back(ranks[i]);
    for (Block& block : of_rank)
      add_block(tiling.blocks, known, ranks[i], std::move(block.offset), std::move(block.shape));
  }
  for (Block& block : tiling.blocks) std::sort(block.ranks.begin(), block.ranks.end());
  return tiling;
}

Tiling Tiling::of(const sharded::ShardedTensorMetadata& metadata) {
  const at::ScalarType dtype = metadata.tensor_properties.dtype;
  Tiling tiling{.title = c10::str("ShardedTensor ", to_text(dtype), shape_text(metadata.size), ", ",
                                  metadata.shards_metadata.size(), " shards"),
                .shape = metadata.size,
                .element_size = static_cast<int64_t>(c10::elementSize(dtype))};
  std::map<std::vector<int64_t>, size_t> known;
  for (const auto& shard : metadata.shards_metadata) {
    const int64_t rank = shard.placement && shard.placement->rank() ? *shard.placement->rank() : 0;
    if (is_empty(shard.shard_sizes)) {
      tiling.without.push_back(rank);
    } else {
      add_block(tiling.blocks, known, rank, shard.shard_offsets, shard.shard_sizes);
    }
  }
  for (Block& block : tiling.blocks) std::sort(block.ranks.begin(), block.ranks.end());
  return tiling;
}

Tiling Tiling::of(const at::Tensor& tensor) {
  TESSERA_CHECK_VALUE(tensor.defined(), "visualize: the tensor is not defined.");
  if (DTensor::is_dtensor(tensor)) return of(DTensor(tensor).spec());
  TESSERA_CHECK_VALUE(ShardedTensor::is_sharded_tensor(tensor),
                      "visualize: draws DTensors and ShardedTensors; this is a plain tensor of shape ",
                      tensor.sizes(), ", all of which is on this rank.");
  return of(ShardedTensor(tensor).metadata());
}

std::string ranks_text(const std::vector<int64_t>& ranks) {
  std::string text;
  for (size_t i = 0; i < ranks.size();) {
    size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    text.append(text.empty() ? "" : ",").append(std::to_string(ranks[i]));
    if (last > i) text.append(last > i + 1 ? "-" : ",").append(std::to_string(ranks[last]));
    i = last + 1;
  }
  return text;
}

std::string range_text(const Block& block) {
  std::string text = "[";
  for (const size_t d : c10::irange(block.offset.size()))
    text += c10::str(d == 0 ? "" : ", ", block.offset[d], ":", block.offset[d] + block.shape[d]);
  return text + "]";
}

int64_t bytes_of(const Tiling& tiling, const Block& block) {
  int64_t bytes = tiling.element_size;
  for (const int64_t size : block.shape) bytes *= size;
  return bytes;
}

Panels panels_of(const Tiling& tiling) {
  const size_t ndim = tiling.shape.size();
  const size_t leading = ndim > 2 ? ndim - 2 : 0;
  Panels result;
  std::vector<std::vector<int64_t>> breaks(ndim);
  for (const size_t d : c10::irange(ndim)) {
    std::set<int64_t> all;
    for (const Block& block : tiling.blocks) {
      all.insert(block.offset[d]);
      all.insert(block.offset[d] + block.shape[d]);
    }
    breaks[d].assign(all.begin(), all.end());
    if (breaks[d].size() <= kMaxBreaks) continue;
    result.left_out += c10::str(result.left_out.empty() ? "drawn: " : ", ", "the first ", kMaxBreaks - 1,
                                " of ", breaks[d].size() - 1, " pieces of dim ", d);
    breaks[d].resize(kMaxBreaks);
  }
  if (tiling.blocks.empty()) return result;

  // Which of the breaks of a dim a block begins and ends at; nothing if it is not drawn.
  const auto span = [&](const Block& block, size_t d) -> std::optional<std::pair<size_t, size_t>> {
    const auto& all = breaks[d];
    const auto begin = std::lower_bound(all.begin(), all.end(), block.offset[d]);
    const auto end = std::lower_bound(all.begin(), all.end(), block.offset[d] + block.shape[d]);
    if (begin + 1 >= all.end()) return std::nullopt;
    return std::pair(begin - all.begin(),
                     std::min<std::ptrdiff_t>(end - all.begin(), all.end() - all.begin() - 1));
  };

  std::vector<size_t> slice(leading, 0);  // index of the interval of each leading dim
  size_t count = 0;
  for (bool more = true; more;) {
    if (++count <= kMaxPanels) {
      Panel panel;
      for (const size_t d : c10::irange(leading))
        panel.title += c10::str(d == 0 ? "[" : ", ", breaks[d][slice[d]], ":", breaks[d][slice[d] + 1]);
      if (leading > 0) panel.title += ", :, :]";
      panel.row_breaks = ndim > 1 ? breaks[ndim - 2] : std::vector<int64_t>{0, 1};
      panel.column_breaks = ndim > 0 ? breaks[ndim - 1] : std::vector<int64_t>{0, 1};
      for (const size_t b : c10::irange(tiling.blocks.size())) {
        const Block& block = tiling.blocks[b];
        bool is_here = true;
        for (const size_t d : c10::irange(leading)) {
          const auto range = span(block, d);
          is_here &= range && range->first <= slice[d] && slice[d] < range->second;
        }
        const auto rows = ndim > 1 ? span(block, ndim - 2) : std::pair<size_t, size_t>(0, 1);
        const auto columns = ndim > 0 ? span(block, ndim - 1) : std::pair<size_t, size_t>(0, 1);
        if (is_here && rows && columns)
          panel.cells.push_back({b, rows->first, rows->second, columns->first, columns->second});
      }
      result.panels.push_back(std::move(panel));
    }
    more = false;
    for (size_t d = leading; d-- > 0;) {
      if (++slice[d] + 1 < breaks[d].size()) {
        more = true;
        break;
      }
      slice[d] = 0;
    }
  }
  if (count > kMaxPanels)
    result.left_out += c10::str(result.left_out.empty() ? "drawn: " : ", ", "the first ", kMaxPanels, " of ",
                                count, " slices");
  return result;
}

namespace {

/// Between which blocks elements have to go: to one from another rank, unless that rank holds them already.
std::vector<BlockMove> moves_of(const Tiling& before, const Tiling& after) {
  const auto overlap = [](const Block& a, const Block& b) {
    for (const size_t d : c10::irange(a.offset.size())) {
      if (a.offset[d] >= b.offset[d] + b.shape[d] || b.offset[d] >= a.offset[d] + a.shape[d]) return false;
    }
    return true;
  };
  const auto holds = [](const Block& block, int64_t rank) {
    return std::binary_search(block.ranks.begin(), block.ranks.end(), rank);
  };
  std::vector<BlockMove> moves;
  for (const size_t to : c10::irange(after.blocks.size())) {
    for (const size_t from : c10::irange(before.blocks.size())) {
      const Block &source = before.blocks[from], &target = after.blocks[to];
      if (!overlap(source, target)) continue;
      const bool has_all = std::all_of(target.ranks.begin(), target.ranks.end(),
                                       [&](int64_t rank) { return holds(source, rank); });
      if (!has_all || (before.partial && !after.partial)) moves.push_back({from, to});
    }
  }
  return moves;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

}  // namespace

std::string visualize(const Tiling& tiling, PictureFormat format) {
  switch (format) {
    case PictureFormat::svg:
      return draw_svg(tiling);
    case PictureFormat::html:
      return html_page(tiling.title, draw_svg(tiling));
    default:
      return draw_text(tiling, format == PictureFormat::coloured);
  }
}

std::string visualize(const Spec& spec, PictureFormat format) { return visualize(Tiling::of(spec), format); }
std::string visualize(const at::Tensor& tensor, PictureFormat format) {
  return visualize(Tiling::of(tensor), format);
}

std::string visualize(const Plan& plan, PictureFormat format) {
  const Tiling before = Tiling::of(plan.from), after = Tiling::of(plan.to);
  if (format == PictureFormat::text || format == PictureFormat::coloured) {
    const bool coloured = format == PictureFormat::coloured;
    return c10::str("before: ", draw_text(before, coloured), "\n", plan.str(),
                    "\n\nafter: ", draw_text(after, coloured));
  }
  const std::string svg = draw_svg(before, after, moves_of(before, after), lines_of(plan.str()));
  return format == PictureFormat::svg ? svg : html_page(lines_of(plan.str())[0], svg);
}

std::string visualize_text(std::string_view spec, std::string_view to, PictureFormat format) {
  const FakeRank rank(parse_layout(spec));
  const Spec from = parse_spec(spec, rank.mesh());
  if (to.empty()) return visualize(from, format);
  const Placements placements = parse_placements(to);
  TESSERA_CHECK_VALUE(placements.size() == from.placements().size(), "visualize: ", to_text(placements),
                      " has ", placements.size(), " placements; expected one for each of the ",
                      from.placements().size(), " dims of ", rank.mesh(), ".");
  return visualize(plan(from, from.with_placements(placements)), format);
}

}  // namespace tessera
