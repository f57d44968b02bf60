#pragma once

#include <tessera/comm/call.h>

#include <cstddef>
#include <span>
#include <vector>

/// Calls of collectives as ranks send them to one another, without the data.
namespace tessera::comm {

/// Appends the call to `bytes`. Ranks that call alike write the same bytes.
void append_call(const CollectiveCall& call, std::vector<std::byte>& bytes);

/// The call that is written there: its buffers have no data. `with_text`: with the description that errors show.
/// The bytes come from a rank of the same group, which is trusted.
CollectiveCall call_from_bytes(std::span<const std::byte> bytes, bool with_text);

/// make_plan of such calls.
void make_plan_of(std::span<const std::span<const std::byte>> calls, std::span<const int64_t> members,
                  CollectivePlan& result);

}  // namespace tessera::comm
