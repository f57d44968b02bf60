#pragma once

#include <tessera/comm/backends.h>

namespace tessera::hierarchical {

inline constexpr const char* kBackendName = "hierarchical";

/// For a group over several hosts, some of which have several of its ranks. All-reduce, all-gather, reduce-scatter and
/// broadcast go through shared memory within a host, and over gloo between one rank of each, its leader: so what crosses
/// the network does not grow with the ranks of a host. Everything else goes over gloo, as it is.
///
/// `request.hosts` says who is where. All ranks get the same bits; a reduction takes first the ranks of a host, in their
/// order, then the hosts.
c10::intrusive_ptr<c10d::Backend> make_hierarchical_backend(const BackendRequest& request);

}  // namespace tessera::hierarchical
