#pragma once

#include <tessera/comm/observer.h>
#include <tessera/export.h>

#include <cstdint>
#include <iosfwd>
#include <map>
#include <string>

namespace tessera {

/// While alive, counts the collectives that the calling thread, one rank, calls, whatever the cause:
/// operators, redistribution or gradients.
///
///   CommDebugMode counts;
///   model->forward(x).sum().backward();
///   std::cout << counts;                 // all_reduce 4 (2.0 MiB), all_gather 2 (512 KiB)
class TESSERA_API CommDebugMode final : public comm::Observer {
 public:
  struct Count {
    int64_t calls = 0;
    int64_t bytes = 0;  // what this rank gave or got, whichever was more
    bool operator==(const Count&) const = default;
  };

  /// By name of the collective; those that were not called are not there.
  const std::map<std::string, Count>& get_comm_counts() const { return counts_; }
  /// The same for each name of the mesh dim that its ranks are along: "tp", or "dp_tp" for several. "" for groups that are
  /// of no mesh, or of one without names.
  const std::map<std::string, std::map<std::string, Count>>& counts_by_mesh_dim() const {
    return by_mesh_dim_;
  }
  /// How many of one.
  int64_t calls(const std::string& name) const;
  /// How many of all.
  int64_t get_total_counts() const;
  int64_t total_bytes() const;
  /// From zero again.
  void reset();

  void called(const comm::Event& event) override;

 private:
  std::map<std::string, Count> counts_;
  std::map<std::string, std::map<std::string, Count>> by_mesh_dim_;
};

/// "all_gather 2 (512 KiB), all_reduce 4 (2.0 MiB)", or "none".
TESSERA_API std::ostream& operator<<(std::ostream& out, const CommDebugMode& mode);

}  // namespace tessera
