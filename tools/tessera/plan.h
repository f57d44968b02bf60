#pragma once

#include <iosfwd>

namespace CLI {
class App;
}

/// Adds the options of `tessera plan`; what runs it is called after they are parsed.
class PlanCommand {
 public:
  struct Options;

  explicit PlanCommand(CLI::App& app);
  ~PlanCommand();
  PlanCommand(const PlanCommand&) = delete;
  PlanCommand& operator=(const PlanCommand&) = delete;

  void run(std::ostream& out) const;

 private:
  Options* const options_;
};
