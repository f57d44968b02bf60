#include <tessera/comm/parcel.h>
#include <tessera/error.h>

namespace tessera::comm {

Parcel::Parcel(int64_t from, int64_t to, int tag, at::Tensor tensor)
    : from(from), to(to), tag(tag), tensor(std::move(tensor)) {}

std::string Parcel::str(const std::vector<int64_t>& members, bool sending) const {
  const std::string what = c10::str(c10::toString(tensor.scalar_type()), tensor.sizes(), ", tag ", tag);
  if (sending) return c10::str("send(", what, ") to rank ", members[to]);
  return c10::str("recv(", what, ") from ",
                  from == kAnySource ? "any rank" : c10::str("rank ", members[from]));
}

std::string misfit_of_messages(int64_t from, const std::string& sent, int64_t to, const std::string& wanted) {
  return c10::str("A message was sent that does not fit what was expected.\n  rank ", from, " called ", sent,
                  "\n  rank ", to, " called ", wanted,
                  "\nBoth sides need the same dtype and number of elements.");
}

}  // namespace tessera::comm
