#pragma once

#include <tessera/comm/rpc.h>
#include <tessera/export.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

/// Tensors that other ranks may read without their owner's doing: by RPC from other processes, directly from
/// other threads of this one.
namespace tessera::sharded {

/// While alive, makes tensors of this rank readable to others that know its id; and then to those that it was lent
/// to, until all of them have given it back.
class TESSERA_API Published {
 public:
  /// `over_rpc`: others are processes, so that nobody can read it any more when this one's RPC has ended.
  Published(std::vector<at::Tensor> tensors, bool over_rpc);
  ~Published();
  Published(const Published&) = delete;
  Published& operator=(const Published&) = delete;

  /// No other of this process has or had it.
  int64_t id() const { return id_; }
  /// To so many ranks, each of which makes a Borrowed of it.
  void lend(int64_t borrowers) const;

 private:
  int64_t id_;
};

/// While alive, keeps what another rank has lent to this one.
class TESSERA_API Borrowed {
 public:
  Borrowed(int64_t owner, bool is_here, int64_t id) : owner_(owner), is_here_(is_here), id_(id) {}
  ~Borrowed();
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;

 private:
  int64_t owner_;
  bool is_here_;
  int64_t id_;
};

/// One of the tensors that a rank has published.
struct TESSERA_API PublishedTensor {
  /// The rank in its world, and whether it is a thread of this process.
  int64_t owner = 0;
  bool is_here = false;
  int64_t id = 0;
  int64_t index = 0;

  /// A copy of what it holds now, in CPU memory, without autograd's history. Throws if its owner does not
  /// publish it any more, has died, or does not answer in time (by default within the timeout of `init_rpc`).
  at::Tensor fetch(std::optional<std::chrono::milliseconds> timeout = {}) const;

  /// A reference to the tensor itself, which its owner then keeps even if it does not publish it any more.
  /// Between processes only.
  rpc::RRef rref() const;
};

}  // namespace tessera::sharded
