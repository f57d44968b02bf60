#include <tessera/comm/within.h>
#include <tessera/debug/calling_operator.h>

namespace tessera {

std::string calling_operator() { return comm::Within::current() ? *comm::Within::current() : std::string(); }

}  // namespace tessera
