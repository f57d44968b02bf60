#pragma once

#include <tessera/comm/asked.h>
#include <tessera/comm/collectives.h>
#include <tessera/comm/world.h>
#include <tessera/export.h>
#include <tessera/thread_scope.h>

#include <cstdint>
#include <exception>
#include <string>

/// Calls of the API that all ranks of a group make together: whether they ask for the same.
namespace tessera::comm {

/// What a call of the API that is collective keeps alive around its collectives. They compare what the ranks asked
/// for, and if it differs, or a rank refused its arguments, every rank throws an error that shows both sides. Nothing
/// was moved then, nothing is under way, and the group can be used again.
///
///   const comm::Agreement agreement("gather", group, [&] {
///     TESSERA_CHECK_INDEX(dst < size, ...);         // an error of this rank reaches the others
///     return c10::str(sizes, " to rank ", dst);     // what all ranks must say alike
///   });
///   comm::gather(...).wait();
///
/// It costs no round trip: ranks that are threads post the text with their call; on gloo, a head of a few words goes
/// beside the data of the first all_to_all, gather or scatter, which is then done when the call returns. Texts are
/// sent where they differ, and only then. Other transports compare before, by one small all-gather.
class TESSERA_API Agreement {
 public:
  /// `prepare` checks the arguments and returns the text that says what this rank asks for: `call` and the text make
  /// "gather([4, 6] to rank 0)". If it throws, this constructor lets the other ranks know, and throws it again.
  /// Without a group (this rank is outside of it), or where it is this rank alone, nothing is compared.
  template <class Prepare>
  Agreement(const char* call, Group group, const Prepare& prepare) : Agreement(call, std::move(group)) {
    try {
      say(prepare());
    } catch (...) {
      refuse(std::current_exception());
    }
  }
  ~Agreement();
  Agreement(const Agreement&) = delete;
  Agreement& operator=(const Agreement&) = delete;

  /// Compares now, unless a collective did: for calls that move nothing, or not always.
  void settle() const;
  /// The same, unless the collective that comes next does.
  void settle_before_data() const;

  /// The innermost one of the calling thread that has yet to be compared, if it is of this group; else null.
  static const Agreement* open(const Group& group);
  /// What the innermost one of the calling thread says; empty if there is none. `backend` is the one that compares it,
  /// with those of the other ranks: a CallBackend.
  static Asked asked(const c10d::Backend& backend);

  /// How many errors that other ranks know of too the calling thread has had: of collectives, and of agreements.
  static uint64_t shared_errors();
  static void count_shared_error();

  /// outputs[r] = rank r's inputs[this rank], on gloo: dense tensors on the CPU, taken as bytes.
  void exchange(const Tensors& outputs, const Tensors& inputs) const;
  /// Whether `exchange` works where `tensor` lies.
  bool can_exchange(const at::Tensor& tensor) const;

 private:
  Agreement(const char* call, Group group);
  void say(std::string text);
  [[noreturn]] void refuse(const std::exception_ptr& error);
  void mark_settled() const;
  void compare_by_all_gather() const;

  enum class Comparison : uint8_t {
    none,        // there is nobody to compare with
    posts,       // the backend compares calls, and this with them
    heads,       // beside the data
    all_gather,  // before it
  };

  const Group group_;
  c10::intrusive_ptr<c10d::Backend> backend_;
  Comparison comparison_ = Comparison::none;
  std::string asked_;
  std::string refusal_;
  ErrorKind kind_ = ErrorKind::none;
  mutable bool settled_ = false;
  const ThreadScope<const Agreement*, Agreement> scope_;
};

/// Compares what the ranks of the group ask for in a call that moves nothing. See Agreement.
template <class Prepare>
void agree(const char* call, Group group, const Prepare& prepare) {
  const Agreement agreement(call, std::move(group), prepare);
  agreement.settle();
}

/// Does `work`, a call of the API that makes several others. If it throws on one rank, in whatever part, it throws on
/// all of them: those that wait for this one in an Agreement of the group, or are done, get the reason.
template <class Prepare, class Work>
void together(const char* call, const Group& group, const Prepare& prepare, const Work& work) {
  agree(call, group, prepare);
  const uint64_t before = Agreement::shared_errors();
  std::exception_ptr error;
  try {
    work();
  } catch (...) {
    if (Agreement::shared_errors() != before) throw;
    error = std::current_exception();
  }
  agree(call, group, [&] {
    if (error) std::rethrow_exception(error);
    return "done";
  });
}

}  // namespace tessera::comm
