"""What a dry run says of a step of training, against the same step on ranks."""

import collections
import json
import subprocess
import sys

import pytest
import torch
from tessera.parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module, replicate

import tessera
from tessera.debug import CommDebugMode, plan_model

SEQUENCE = 8


class MLP(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16))
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.pow(2).mean()


def make(parallel: str, device: str):
    def on_mesh(mesh):
        with torch.device(device):
            model, x = MLP(), torch.ones(4, 16)
        if "tp" in parallel:
            plan = {"layers.*.0": ColwiseParallel(), "layers.*.2": RowwiseParallel()}
            parallelize_module(model, mesh["tp"], plan)
        if "fsdp" in parallel:
            for layer in model.layers:
                fully_shard(layer, mesh=mesh["dp"])
            fully_shard(model, mesh=mesh["dp"])
        elif "dp" in parallel:
            replicate(model, mesh["dp"])
        return model, lambda: model(x)

    return on_mesh


def measured(make_on_mesh, sizes):
    """What the second step communicates, and the bytes of parameters, on each rank."""

    def main():
        mesh = tessera.init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
        model, loss = make_on_mesh(mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            with CommDebugMode() as mode:
                loss().backward()
                optimizer.step()
        counts = collections.Counter()
        for each in mode.comm_records:
            counts[each["collective"], each["mesh_dim"], "calls"] += 1
            counts[each["collective"], each["mesh_dim"], "bytes"] += each["bytes"]
        local = [
            each.to_local() if isinstance(each, tessera.DTensor) else each for each in model.parameters()
        ]
        return dict(counts), sum(each.nbytes for each in local)

    return tessera.run(sizes[0] * sizes[1], main, timeout=120)


def planned(cost):
    counts = collections.Counter()
    for each in cost.collectives:
        if not each.is_agreement and each.name != "barrier":
            counts[each.name, each.mesh_dims, "calls"] += each.calls
            counts[each.name, each.mesh_dims, "bytes"] += each.bytes
    return dict(counts)


@pytest.mark.parametrize(
    ("parallel", "sizes"),
    [
        ("dp", (4, 1)),
        ("tp", (1, 4)),
        ("tp+dp", (2, 2)),
        ("fsdp", (4, 1)),
        ("fsdp", (3, 1)),
        ("fsdp+tp", (2, 2)),
    ],
)
def test_a_model_of_ones_own(parallel, sizes):
    mesh = f"dp={sizes[0]},tp={sizes[1]}"
    for rank, (counts, parameters) in enumerate(measured(make(parallel, "cpu"), sizes)):
        cost = plan_model(make(parallel, "meta"), mesh, rank=rank)
        assert planned(cost) == counts
        assert cost.memory.parameters == parameters and cost.memory.optimizer == 2 * parameters
        assert cost.memory.gradients >= parameters and cost.memory.peak >= 3 * parameters
        assert cost.rank == rank and cost.flops > 0


def test_the_thread_is_as_before():
    plan_model(make("tp", "meta"), "dp=1,tp=8")
    with pytest.raises(RuntimeError, match="no ranks here"):
        tessera.init_device_mesh("cpu", (1,))
    assert tessera.run(2, lambda: tessera.get_rank()) == [0, 1]


def test_what_is_wrong_is_said():
    def on_the_cpu(mesh):
        return make("tp", "cpu")(mesh)

    with pytest.raises(ValueError, match="meta"):
        plan_model(on_the_cpu, "dp=1,tp=2")
    with pytest.raises(ValueError, match="no such dims"):
        plan_model(make("tp", "meta"), "dp=1,tp=2", bandwidth={"pp": 1e9})
    with pytest.raises(ValueError, match="cannot read a mesh"):
        plan_model(make("tp", "meta"), "dp=")
    with pytest.raises(ValueError, match="Rank 7"):
        plan_model(make("tp", "meta"), "dp=1,tp=2", rank=7)


@pytest.fixture
def config(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64}
    transformers.LlamaConfig(**sizes, **heads).save_pretrained(tmp_path)
    return tmp_path / "config.json"


@pytest.mark.parametrize(
    ("parallel", "sizes"), [("dp", (2, 1)), ("tp", (1, 2)), ("fsdp", (2, 1)), ("fsdp+tp", (2, 2))]
)
def test_a_config_of_transformers(config, parallel, sizes):
    import transformers

    def on_mesh(mesh):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.from_pretrained(config.parent)
        )
        tokens = torch.ones(4 // sizes[0], SEQUENCE, dtype=torch.long)
        if "tp" in parallel:
            parallelize_module(model, mesh["tp"], plan="auto", src_data_rank=None)
        if "fsdp" in parallel:
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh["dp"])
            fully_shard(model, mesh=mesh["dp"])
        elif "dp" in parallel:
            replicate(model, mesh["dp"])
        return model, lambda: model(input_ids=tokens, labels=tokens, use_cache=False).loss

    counts, parameters = measured(on_mesh, sizes)[0]
    cost = plan_model(config, f"dp={sizes[0]},tp={sizes[1]}", parallel=parallel, batch=4, sequence=SEQUENCE)
    assert planned(cost) == counts
    assert cost.memory.optimizer == 2 * parameters


def test_the_command(config, tmp_path):
    def command(*options):
        line = [sys.executable, "-m", "tessera", "plan", "--config", str(config), "--sequence", "8", *options]
        return subprocess.run(line, capture_output=True, text=True, timeout=300, check=False)

    one = command("--mesh", "dp=2,tp=2", "--batch", "4")
    assert one.returncode == 0, one.stderr
    assert "rank 0 of mesh(dp=2, tp=2)" in one.stdout and "all_gather" in one.stdout
    sweep = command("--mesh", "dp=4", "--batch", "4", "--sweep")
    assert sweep.returncode == 0, sweep.stderr
    assert "dp=1,tp=4" in sweep.stdout and "fsdp+tp" in sweep.stdout and "█" in sweep.stdout + "█"
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"a": 1}))
    config = other
    wrong = command()
    assert wrong.returncode == 1 and "names no model_type" in wrong.stderr
