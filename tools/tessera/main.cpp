// Shows what Tessera would do, without any rank, and whether it can run here: `tessera --help`.

#include <tessera/debug/explain.h>
#include <tessera/debug/visualize.h>

#include <fstream>
#include <iostream>
#include <string>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <c10/util/Exception.h>

#include "tools/tessera/doctor.h"
#include "tools/tessera/plan.h"

namespace {

using namespace tessera;

void explain_command(const std::string& call, const std::string& mesh) {
  std::cout << (mesh.empty() ? explain(call) : explain(call, parse_mesh(mesh)));
}

struct VisualizeOptions {
  std::string spec, to, format, output;
};

/// By the name of the file, unless it is said.
PictureFormat format_of(const VisualizeOptions& options) {
  if (!options.format.empty()) return parse_picture_format(options.format);
  if (options.output.ends_with(".svg")) return PictureFormat::svg;
  if (options.output.ends_with(".html")) return PictureFormat::html;
  return options.output.empty() && isatty(STDOUT_FILENO) ? PictureFormat::coloured : PictureFormat::text;
}

void visualize_command(const VisualizeOptions& options) {
  const std::string picture = visualize_text(options.spec, options.to, format_of(options));
  if (options.output.empty()) {
    std::cout << picture;
    return;
  }
  std::ofstream file(options.output);
  file << picture;
  file.close();
  TORCH_CHECK_VALUE(file, "cannot write ", options.output, ".");
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Shows what Tessera would do, without any rank, and whether it can run here.");
  app.require_subcommand(1);

  std::string call, mesh;
  CLI::App* explain_app = app.add_subcommand(
      "explain",
      "How an operator is carried out: valid strategies, their prices, what moves, what would avoid it.");
  explain_app
      ->add_option("CALL", call,
                   "As \"mm(f32[4096,4096] [S(0),R], f32[4096,4096] [R,S(1)]) on mesh(dp=8, tp=8)\"")
      ->required();
  explain_app->add_option("--mesh", mesh, "The mesh, unless the call says it: dp=8,tp=8");

  VisualizeOptions picture;
  CLI::App* visualize_app =
      app.add_subcommand("visualize", "A picture of which rank holds which block of a tensor.");
  visualize_app->add_option("SPEC", picture.spec, "As \"[S(0), R] on mesh(dp=2, tp=4): f32[4096, 1024]\"")
      ->required();
  visualize_app->add_option("--to", picture.to, "Placements: draw how the tensor is redistributed there");
  visualize_app->add_option("--format", picture.format,
                            "text, coloured, svg or html; by default what fits the output");
  visualize_app->add_option("-o,--output", picture.output, "The file; by default the terminal");

  CLI::App* plan_app = app.add_subcommand(
      "plan",
      "What a step of training a GPT, or a table of parameters, costs each rank of a mesh of up to 100,000.");
  const PlanCommand plan(*plan_app);

  DoctorOptions doctor_options;
  CLI::App* doctor_app = app.add_subcommand(
      "doctor",
      "What is installed here, what the environment says, how fast collectives are, and what is wrong.");
  doctor_app->add_option("--ranks", doctor_options.ranks, "How many ranks try the collectives; 0 for none")
      ->check(CLI::Range(0, 64))
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);

  try {
    if (*explain_app) {
      explain_command(call, mesh);
    } else if (*visualize_app) {
      visualize_command(picture);
    } else if (*plan_app) {
      plan.run(std::cout);
    } else {
      return doctor(doctor_options, std::cout) == 0 ? 0 : 1;
    }
  } catch (const c10::Error& error) {
    std::cerr << "tessera: " << error.what_without_backtrace() << "\n";
    return 1;
  } catch (const std::exception& error) {
    std::cerr << "tessera: " << error.what() << "\n";
    return 1;
  }
  return 0;
}
