"""``python -m tessera plan``: what a step of training a model of transformers would cost, before any rank runs."""

import argparse
import sys

import torch

from tessera.debug import StepCost, plan_model
from tessera.debug._plan_model import PARALLEL


def _by_dim(text: str) -> dict[str, float]:
    """ "dp=25e9,tp=300e9" """
    result = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            result[name] = float(value)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{part!r} is no value of a mesh dim; expected as in dp=25e9"
            ) from None
    return result


def _dtype(text: str) -> torch.dtype:
    dtype = getattr(torch, text, None)
    if not isinstance(dtype, torch.dtype):
        raise argparse.ArgumentTypeError(f"there is no dtype {text!r}; say float32 or bfloat16")
    return dtype


def _factors(ranks: int) -> list[tuple[int, int]]:
    return [(ranks // tp, tp) for tp in range(1, ranks + 1) if ranks % tp == 0]


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _sweep(arguments: argparse.Namespace, options: dict[str, object], ranks: int) -> None:
    rows: list[tuple[float, str, str, StepCost]] = []
    for dp, tp in _factors(ranks):
        for parallel in PARALLEL:
            if ("tp" in parallel) != (tp > 1) or (parallel == "tp") != (dp == 1 and tp > 1):
                continue
            mesh = f"dp={dp},tp={tp}"
            try:
                cost = plan_model(arguments.config, mesh, parallel=parallel, **options)  # type: ignore[arg-type]
            except (ValueError, RuntimeError) as error:
                print(f"  {mesh:16}{parallel:10}left out: {str(error).splitlines()[0]}")
                continue
            rows.append((cost.communication_seconds + cost.flops / arguments.flops, mesh, parallel, cost))
    rows.sort(key=lambda row: row[0])
    if not rows:
        return
    print(f"  {'mesh':16}{'parallel':10}{'memory':>12}{'moved':>12}{'communication':>16}{'step':>12}")
    for seconds, mesh, parallel, cost in rows:
        compute = cost.flops / arguments.flops
        bar = "█" * round(30 * compute / rows[-1][0]) + "░" * round(30 * (seconds - compute) / rows[-1][0])
        print(
            f"  {mesh:16}{parallel:10}{_bytes(cost.memory.peak):>12}{_bytes(cost.bytes):>12}"
            f"{cost.communication_seconds:14.4f} s{seconds:10.4f} s  {bar}"
        )
    print("\n  █ compute, ░ communication, not overlapped")


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tessera", description=__doc__)
    commands = parser.add_subparsers(required=True)
    plan = commands.add_parser("plan", help="what a step of training costs each rank, by a dry run")
    plan.add_argument(
        "--config", required=True, help="config.json of a model of transformers, or its directory"
    )
    plan.add_argument("--mesh", default="dp=8", help="as dp=64,tp=8")
    plan.add_argument("--parallel", default="", choices=("", *PARALLEL))
    plan.add_argument(
        "--sweep", action="store_true", help="all meshes of that many ranks and all ways, by time"
    )
    plan.add_argument("--batch", type=int, default=0, help="rows in a step, on all ranks together")
    plan.add_argument("--sequence", type=int, default=1024, help="tokens in each")
    plan.add_argument("--dtype", type=_dtype, default=torch.float32, help="float32, bfloat16, ...")
    plan.add_argument("--rank", type=int, default=0, help="whose costs are shown")
    plan.add_argument("--bandwidth", type=_by_dim, default={}, help="bytes in a second: dp=25e9,tp=300e9")
    plan.add_argument("--latency", type=_by_dim, default={}, help="seconds: dp=2e-5,tp=5e-6")
    plan.add_argument("--flops", type=float, default=1e14, help="operations that a rank computes in a second")
    arguments = parser.parse_args()
    options = {
        name: getattr(arguments, name)
        for name in ("batch", "sequence", "dtype", "rank", "bandwidth", "latency")
    }
    try:
        if arguments.sweep:
            ranks = 1
            for part in arguments.mesh.split(","):
                ranks *= int(part.rpartition("=")[2])
            options["batch"] = options["batch"] or ranks
            _sweep(arguments, options, ranks)
        else:
            cost = plan_model(arguments.config, arguments.mesh, parallel=arguments.parallel, **options)
            print(
                f"{cost}  compute in a step: {cost.flops / 1e12:.3g} Tflop, {cost.flops / arguments.flops:.4f} s"
            )
    except ValueError as error:
        print(f"tessera: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
