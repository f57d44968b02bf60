#pragma once

#include <tessera/export.h>
#include <tessera/placement/spec.h>
#include <tessera/redistribute/plan.h>
#include <tessera/sharded/metadata.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

/// Pictures of which rank holds which block of a tensor. They need no ranks, and communicate nothing.
namespace tessera {

enum class PictureFormat {
  text,      ///< for a terminal or a file
  coloured,  ///< for a terminal that shows colours
  svg,
  html,  ///< one page that needs no other file: hover a block for its ranks, offsets and bytes
};
/// "text", "coloured", "svg" or "html"; throws on any other.
TESSERA_API PictureFormat parse_picture_format(std::string_view text);

/// The blocks of a tensor, whatever made them.
struct TESSERA_API Tiling {
  struct Block {
    std::vector<int64_t> ranks;  // all that hold these elements, in ascending order
    std::vector<int64_t> offset;
    std::vector<int64_t> shape;
    bool operator==(const Block&) const = default;
  };

  std::string title;
  std::string note = {};  // what is to be known besides, as of partial values; one line, or empty
  std::vector<int64_t> shape;
  int64_t element_size = 1;
  std::vector<Block> blocks = {};     // none is empty
  std::vector<int64_t> without = {};  // ranks that hold nothing
  bool partial = false;               // blocks are summands, not values

  static Tiling of(const Spec& spec);
  static Tiling of(const sharded::ShardedTensorMetadata& metadata);
  /// Of a DTensor or a ShardedTensor.
  static Tiling of(const at::Tensor& tensor);
};

/// Tensors of one dim are a row of blocks, of two a rectangle, of more one rectangle for each slice of the dims before
/// the last two. Of dims with many blocks only the first are drawn; a line below says so.
///
///   f32[8,4] [S(0),S(1)] on mesh(dp=2, tp=2)
///        0:2  2:4
///       ┌────┬────┐
///   0:4 │ 0  │ 1  │
///       ├────┼────┤
///   4:8 │ 2  │ 3  │
///       └────┴────┘
TESSERA_API std::string visualize(const Tiling& tiling, PictureFormat format = PictureFormat::text);
TESSERA_API std::string visualize(const Spec& spec, PictureFormat format = PictureFormat::text);
TESSERA_API std::string visualize(const at::Tensor& tensor, PictureFormat format = PictureFormat::text);
/// Before and after, the steps, and in svg and html arrows for what has to come from another rank.
TESSERA_API std::string visualize(const Plan& plan, PictureFormat format = PictureFormat::text);
/// The same of text, without any rank: of a spec, "[S(0), R] on mesh(dp=2, tp=4): f32[4096, 1024]", and, unless `to` is
/// empty, of the plan from there to these placements. Text that cannot be read is an error that points at the character.
TESSERA_API std::string visualize_text(std::string_view spec, std::string_view to = "",
                                       PictureFormat format = PictureFormat::text);

}  // namespace tessera
