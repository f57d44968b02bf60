#include <tessera/ops/family.h>

/// New tensors made after another one.
namespace tessera::ops {

Table factory_rules() {
  constexpr auto kAny = LikeInput::Size::any;
  return {
      {{"zeros_like", "ones_like", "full_like"}, LikeInput{}},
      {{"empty_like"}, LikeInput{.keeps_partial = true}},
      {{"new_zeros", "new_ones", "new_full"}, LikeInput{.size = kAny}},
      {{"new_empty", "new_empty_strided"}, LikeInput{.keeps_partial = true, .size = kAny}},
  };
}

}  // namespace tessera::ops
