#pragma once

#include <tessera/export.h>
#include <tessera/placement/text.h>

#include <iosfwd>
#include <memory>
#include <string>
#include <string_view>

namespace tessera {

/// While alive, writes down how the calling thread carries out operators on distributed tensors, and what it
/// redistributes: the strategies that were valid and the price of each, the one chosen and why, the steps of every
/// redistribution with bytes and time, and what would avoid it. Communicates nothing itself. The innermost one alone
/// sees what happens.
///
///   Explain explain;
///   model->forward(x);
///   std::cout << explain;
class TESSERA_API Explain {
 public:
  Explain();
  ~Explain();
  Explain(const Explain&) = delete;
  Explain& operator=(const Explain&) = delete;

  /// Operators in the order of their calls, those that an operator is composed of below it. Equal calls are one, with
  /// their number.
  std::string str() const;
  friend TESSERA_API std::ostream& operator<<(std::ostream& out, const Explain& explain);

 private:
  class Recorder;
  std::unique_ptr<Recorder> recorder_;
};

/// Explains one call of an operator that is given as text, without any rank: as rank 0 of the mesh sees it, on
/// tensors without values.
///
///   explain("mm(f32[4096,4096] [S(0),R], f32[4096,4096] [R,S(1)])", parse_mesh("dp=8,tp=8"))
///   explain("aten::sum.dim_IntList(f32[8,4] [S(0)], [0], keepdim=True) on mesh(4)")
///
/// Tensors are dtype[sizes] [placements], perhaps with order and strides as in placement/text.h; without placements
/// they are replicated. Other values are written as in Python. The mesh stands at the end of the text or is given.
/// Without an overload name, the first overload is taken that takes these arguments. Text that cannot be read is an
/// error that points at the character; a call that fails, as on one device or as its answer depends on values, is
/// explained as far as it came.
TESSERA_API std::string explain(std::string_view call);
TESSERA_API std::string explain(std::string_view call, const Layout& mesh);

/// "dp=8,tp=8" or "8,8": a layout with nothing but a mesh.
TESSERA_API Layout parse_mesh(std::string_view text);

}  // namespace tessera
