#include <tessera/comm/world.h>
#include <tessera/debug/call_reader.h>
#include <tessera/debug/explain.h>
#include <tessera/debug/fake_mesh.h>
#include <tessera/dispatch/call_text.h>
#include <tessera/dispatch/op_plan.h>
#include <tessera/error.h>
#include <tessera/placement/text_reader.h>
#include <tessera/redistribute/plan.h>
#include <tessera/redistribute/plan_text.h>
#include <tessera/span.h>

#include <algorithm>
#include <ostream>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <c10/util/irange.h>

namespace tessera {

namespace {

std::string mesh_dim_name(const DeviceMesh& mesh, size_t dim) {
  return mesh.mesh_dim_names().empty() ? c10::str("mesh dim ", dim) : mesh.mesh_dim_names()[dim];
}

std::string joined(const Placements& placements) {
  std::string text;
  for (const Placement& each : placements) text.append(text.empty() ? "" : ", ").append(each.str());
  return text;
}

std::string strategy_text(const rules::ConsideredStrategy& each) {
  return joined(each.inputs) + " -> " + joined(each.outputs);
}

/// Bytes of the largest local tensor.
std::string local_bytes(const Spec& spec) {
  int64_t bytes = static_cast<int64_t>(c10::elementSize(spec.dtype()));
  const c10::DimVector first = spec.local_shape(c10::DimVector(spec.mesh().ndim(), 0));
  for (const int64_t size : first) bytes *= size;
  return bytes_text(bytes) + "/rank";
}

/// One call, or one redistribution that the program asked for.
class Explanation {
 public:
  void add(size_t indent, const std::string& line) { lines_ += std::string(2 * indent, ' ') + line + "\n"; }

  void add_call(const PlannedCall& planned) {
    title = call_text(planned.info.schema, planned.call.arguments);
    const rules::Rule* rule = planned.resolved.rule;
    add(1, c10::str("rule: ", rule ? rule->text() : "none"));
    const OpPlan& plan = planned.plan;
    if (plan.by_rule && plan.strategy.decompose) return add(1, "computed by other operators:");
    if (!plan.by_rule)
      add(1, rule ? "the rule does not apply to these arguments: the operator takes the replicated fallback"
                  : "no rule, so the operator takes the replicated fallback");
    if (plan.by_rule) add_strategies(planned);
    add_routes(planned);
    if (plan.by_rule && plan.strategy.local.communicates)
      add(1, "a distributed kernel moves data while it computes; how much depends on it");
    if (plan.refuses_together)
      add(1, "ranks agree by an all_reduce of 8 B whether one of them refuses the values it holds");
  }

  void add_results(const OpPlan& plan) {
    for (const Spec& spec : plan.outputs) {
      if (spec) add(1, c10::str("result: ", tensor_text(spec), "   ", local_bytes(spec)));
    }
  }

  void add_plan(size_t indent, const Plan& plan) {
    const std::string text = plan.str();
    for (size_t begin = 0; begin < text.size();) {
      const size_t end = std::min(text.find('\n', begin), text.size());
      add(indent, text.substr(begin, end - begin));
      begin = end + 1;
    }
  }

  std::string str(size_t count, size_t indent) const {
    const std::string all = title + (count > 1 ? c10::str("   (", count, " times)") : "") + "\n" + lines_;
    std::string text;
    for (size_t begin = 0; begin < all.size();) {
      const size_t end = all.find('\n', begin);
      text += std::string(2 * indent, ' ') + all.substr(begin, end - begin + 1);
      begin = end + 1;
    }
    return text;
  }

  std::string title;
  std::vector<Explanation> inner;  // of what it is composed of
  bool operator==(const Explanation& other) const {
    return title == other.title && lines_ == other.lines_ && inner == other.inner;
  }

 private:
  void add_strategies(const PlannedCall& planned) {
    const auto all = considered_strategies(planned.info, planned.resolved, planned.call);
    const DeviceMesh& mesh = planned.call.tensors[0].mesh();
    for (const size_t m : c10::irange(mesh.ndim())) {
      std::vector<rules::ConsideredStrategy> here;
      for (const auto& each : all) {
        const bool known = std::any_of(here.begin(), here.end(), [&](const auto& other) {
          return other.inputs == each.inputs && other.outputs == each.outputs;
        });
        if (each.mesh_dim == m && (!known || each.chosen)) here.push_back(each);
      }
      if (here.empty()) continue;
      Placements now;
      for (const Spec& spec : planned.call.tensors) now.push_back(spec.placement(m));
      std::stable_sort(here.begin(), here.end(), [](const auto& a, const auto& b) {
        return std::pair(a.seconds, !a.chosen) < std::pair(b.seconds, !b.chosen);
      });
      add(1,
          c10::str(mesh_dim_name(mesh, m), " (", mesh.shape()[m], " ranks), inputs are ", joined(now), ":"));
      size_t width = 0;
      for (const auto& each : here) width = std::max(width, strategy_text(each).size());
      for (const auto& each : here) {
        const std::string text = strategy_text(each);
        add(2, c10::str(each.chosen ? "* " : "  ", text, std::string(width - text.size() + 2, ' '),
                        each.seconds == 0 ? "free" : seconds_text(each.seconds),
                        each.chosen ? c10::str("   chosen: ", why(here, now)) : ""));
      }
      add_remedies(planned, here, now);
    }
  }

  /// `all` are sorted by their price, the chosen one first.
  static std::string why(const std::vector<rules::ConsideredStrategy>& all, const Placements& now) {
    if (all.size() == 1) return "there is no other";
    if (all[0].inputs == now) return "nothing has to change";
    return all[1].seconds == all[0].seconds ? "the first of those that are cheapest" : "the cheapest";
  }

  /// Which one input, placed otherwise from the start, would make it free.
  void add_remedies(const PlannedCall& planned, const std::vector<rules::ConsideredStrategy>& all,
                    const Placements& now) {
    const DeviceMesh& mesh = planned.call.tensors[0].mesh();
    const bool is_free =
        std::any_of(all.begin(), all.end(), [&](const auto& each) { return each.inputs == now; });
    if (is_free || mesh.shape()[all[0].mesh_dim] == 1) return;
    for (const auto& each : all) {
      size_t different = 0, count = 0;
      for (const size_t i : c10::irange(now.size())) {
        if (each.inputs[i] != now[i]) different = i, ++count;
      }
      if (count == 1)
        add(2, c10::str("free if '", planned.call.name_of(different), "' were ", each.inputs[different],
                        " on ", mesh_dim_name(mesh, each.mesh_dim), " from the start; the result is then ",
                        joined(each.outputs)));
    }
  }

  void add_routes(const PlannedCall& planned) {
    bool moves = false;
    for (const size_t i : c10::irange(planned.plan.routes.size())) {
      const InputRoute& route = planned.plan.routes[i];
      const std::string& name = planned.call.name_of(i);
      if (!route.plan.steps.empty()) {
        moves |= route.plan.communicates();
        add(1, c10::str("'", name, "' is redistributed, ",
                        route.plan.communicates() ? bytes_text(route.plan.bytes()) + "/rank, " +
                                                        seconds_text(route.plan.seconds()) + ":"
                        : route.slice ? "as a view, which moves nothing:"
                                      : "which moves nothing:"));
        add_plan(2, route.plan);
        if (route.plan.communicates())
          add(2, c10::str("said explicitly: ", redistribute_code(name, route.plan.to.placements())));
      }
      if (route.back && !route.back->steps.empty()) {
        moves |= route.back->communicates();
        add(1, c10::str("'", name, "' is written, and redistributed back:"));
        add_plan(2, *route.back);
      }
    }
    if (!moves && !(planned.plan.by_rule && planned.plan.strategy.local.communicates))
      add(1, "nothing moves between ranks");
  }

  std::string lines_;
};

void print(const std::vector<Explanation>& all, size_t indent, std::string& text) {
  for (size_t i = 0; i < all.size();) {
    size_t count = 1;
    while (i + count < all.size() && all[i + count] == all[i]) ++count;
    text += all[i].str(count, indent);
    print(all[i].inner, indent + 2, text);
    i += count;
  }
}

}  // namespace

class Explain::Recorder final : public SpanObserver {
 public:
  void began(SpanKind kind, const char* name, const void* detail) override {
    const bool is_outer = open_.empty();
    open_.push_back({kind, {}, nullptr});
    Open& self = open_.back();
    if (kind == SpanKind::op) {
      self.explanation.title = name;
    } else if (kind == SpanKind::planned) {
      const auto& planned = *static_cast<const PlannedCall*>(detail);
      Open& op = open_[open_.size() - 2];
      op.explanation.add_call(planned);
      op.plan = &planned.plan;
    } else if (kind == SpanKind::redistribute && is_outer) {
      const Plan& plan = *static_cast<const Plan*>(detail);
      self.explanation.title = "redistribute, asked for";
      self.explanation.add_plan(1, plan);
    }
  }

  void ended() override {
    Open ended = std::move(open_.back());
    open_.pop_back();
    const bool is_op = ended.kind == SpanKind::op;
    const bool is_own = ended.kind == SpanKind::redistribute && open_.empty();
    if (!is_op && !is_own) return;
    if (ended.plan) ended.explanation.add_results(*ended.plan);
    const auto around = std::find_if(open_.rbegin(), open_.rend(),
                                     [](const Open& each) { return each.kind == SpanKind::op; });
    (around == open_.rend() ? done_ : around->explanation.inner).push_back(std::move(ended.explanation));
  }

  std::string str() const {
    std::string text;
    print(done_, 0, text);
    return text;
  }

 private:
  struct Open {
    SpanKind kind;
    Explanation explanation;
    const OpPlan* plan;  // of the operator, once it is known
  };
  std::vector<Open> open_;
  std::vector<Explanation> done_;
};

Explain::Explain() : recorder_(std::make_unique<Recorder>()) {}
Explain::~Explain() = default;
std::string Explain::str() const { return recorder_->str(); }
std::ostream& operator<<(std::ostream& out, const Explain& explain) { return out << explain.str(); }

Layout parse_mesh(std::string_view text) {
  const std::string all = c10::str("mesh(", text, ")");
  TextReader reader(all, "a mesh");
  Layout layout;
  reader.mesh(layout);
  reader.end();
  TESSERA_CHECK_VALUE(!layout.mesh_shape.empty(),
                      "cannot read a mesh: it has no dims. Say it as dp=8,tp=8 or 8,8.");
  return layout;
}

std::string explain(std::string_view call, const Layout& mesh) {
  const FakeRank rank(mesh);
  ReadCall read = read_call(call, rank.mesh());
  const at::NoGradGuard no_grad;
  const Explain explanation;
  std::string failure;
  try {
    read.op.callBoxed(read.stack);
  } catch (const c10::Error& error) {
    failure = c10::str("  it fails: ", error.what_without_backtrace(), "\n");
  } catch (const std::exception& error) {
    failure = c10::str("  it fails: ", error.what(), "\n");
  }
  return explanation.str() + failure;
}

std::string explain(std::string_view call) { return explain(call, mesh_of_call(call)); }

}  // namespace tessera
