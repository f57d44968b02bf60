"""Models of the transformers package, parallel by the plans that they ship: as on one device, their gradients and what they generate too."""

import functools
import pathlib
import subprocess
import sys

import pytest
import torch
from models import filled, train
from tessera.parallel import from_pretrained, parallelize_module, replicate, save_pretrained
from test_processes import free_port

import tessera
from tessera import init_device_mesh

transformers = pytest.importorskip("transformers")

VOCABULARY = 65  # shards are uneven
TOKENS = torch.randint(0, VOCABULARY, (4, 9), generator=torch.Generator().manual_seed(1))
EXPERTS = {"num_experts_per_tok": 2, "experts_implementation": "eager"}  # the default one cannot do float64
LATENT = {
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "num_key_value_heads": 8,
}
#: What else there is in the config. Dense ones, mixtures of experts, and what is special about them.
FAMILIES = {
    "Llama": {},
    "Qwen3": {"head_dim": 8},  # norms of heads
    "Gemma2": {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8, "final_logit_softcapping": 300.0},  # tied embeddings
    "Phi3": {},  # fused projections
    "GPTNeoX": {},  # biases
    "Glm4": {"head_dim": 8},
    "Lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},  # convolutions beside attention
    "Mixtral": {"num_local_experts": 4, **EXPERTS},
    "Qwen3Moe": {"head_dim": 8, "num_experts": 4, "moe_intermediate_size": 32, **EXPERTS},
    "Olmoe": {"num_experts": 4, **EXPERTS},
    "GptOss": {"num_local_experts": 4, "head_dim": 8, "sliding_window": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, **EXPERTS},
    "DeepseekV2": {  # latent attention, shared experts
        "n_routed_experts": 4, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "n_shared_experts": 1,
        "head_dim": 4, **LATENT, **EXPERTS,
    },
}  # fmt: skip
MIXTURES = ("Mixtral", "Qwen3Moe", "Olmoe", "GptOss", "DeepseekV2")


def make(family: str, dtype: torch.dtype = torch.float64, **options) -> torch.nn.Module:
    kind = getattr(transformers, f"{family}ForCausalLM")
    config = kind.config_class(
        **{
            "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8,
            "num_key_value_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
            **FAMILIES[family], **options,
        }
    )  # fmt: skip
    return filled(kind(config)).to(dtype).eval()


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, tessera.DTensor) else tensor


def loss_on(tokens: torch.Tensor, model: torch.nn.Module) -> torch.Tensor:
    return model(input_ids=tokens, labels=tokens).loss


@functools.cache
def on_one_device(family: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model = make(family)
    output = model(input_ids=TOKENS, labels=TOKENS)
    output.loss.backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    assert sum(each.abs().max() > 1e-6 for each in gradients.values()) > 0.8 * len(gradients)
    return output.logits.detach(), gradients


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "family, plan", [*((each, "auto") for each in FAMILIES), *((each, "experts") for each in MIXTURES)]
)
def test_families(family, plan, ranks):
    logits, gradients = on_one_device(family)
    models = [make(family) for _ in range(ranks)]

    def main():
        mesh = init_device_mesh("cpu", (ranks,))
        model = parallelize_module(models[tessera.get_rank()], mesh, plan=plan)
        output = model(input_ids=TOKENS, labels=TOKENS)
        torch.testing.assert_close(output.logits.detach(), logits, rtol=1e-4, atol=1e-5)
        output.loss.backward()
        for name, parameter in model.named_parameters():
            expected = gradients.get(name)
            assert (parameter.grad is None) == (expected is None), name
            if expected is not None:
                torch.testing.assert_close(
                    full(parameter.grad),
                    expected,
                    rtol=1e-4,
                    atol=1e-5 * expected.abs().max().item(),
                    msg=name,
                )
        sharded = {name for name, each in model.named_parameters() if isinstance(each, tessera.DTensor)}
        assert {"lm_head.weight", "embed_out.weight", "model.embed_tokens.weight"} & sharded
        assert all(
            model.get_parameter(name).placements != (tessera.Replicate(),)
            for name in sharded
            if "weight" in name
        )

    tessera.run(ranks, main, timeout=60)


def test_heads_that_cannot_be_shared_are_computed_on_every_rank():
    logits, gradients = on_one_device("Qwen3")

    def main():
        model = parallelize_module(make("Qwen3"), init_device_mesh("cpu", (3,)), "auto")
        output = model(input_ids=TOKENS, labels=TOKENS)
        torch.testing.assert_close(output.logits.detach(), logits, rtol=1e-4, atol=1e-5)
        output.loss.backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(full(parameter.grad), gradients[name], rtol=1e-4, atol=1e-6)

    tessera.run(3, main, timeout=60)


def test_a_plan_that_lacks_a_rule_is_noticed():
    """Apertus has a parameter in the activation, which is used on each rank's own features, and does not name it."""
    options = {"hidden_act": "xielu"}
    FAMILIES.setdefault("Apertus", {"head_dim": 8})
    reference = make("Apertus", **options)
    loss_on(TOKENS, reference).backward()

    def main():
        mesh = init_device_mesh("cpu", (2,))
        model = parallelize_module(make("Apertus", **options), mesh, "auto")
        with torch.no_grad():
            model(TOKENS)
        with pytest.raises(RuntimeError, match=r'act_fn"\] = "replicated_with_grad_allreduce"'):
            loss_on(TOKENS, model).backward()
        mended = make("Apertus", **options)
        mended.tp_plan["model.layers.*.mlp.act_fn"] = "replicated_with_grad_allreduce"
        parallelize_module(mended, mesh, "auto")
        for _ in range(2):
            mended.zero_grad()
            loss_on(TOKENS, mended).backward()
        for each, expected in zip(mended.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(full(each.grad), expected.grad, rtol=1e-4, atol=1e-6)

    tessera.run(2, main, timeout=60)


def test_an_embedding_that_the_plan_leaves_out_is_sharded_as_the_head_it_is_tied_to():
    def main():
        model = make("Llama", tie_word_embeddings=True)
        del model.tp_plan["model.embed_tokens"]
        parallelize_module(model, init_device_mesh("cpu", (2,)), "auto")
        assert model.lm_head.weight is model.model.embed_tokens.weight
        torch.testing.assert_close(
            model(TOKENS).logits, make("Llama", tie_word_embeddings=True)(TOKENS).logits
        )

    tessera.run(2, main, timeout=60)


GREEDY, SAMPLED = {"do_sample": False}, {"do_sample": True, "temperature": 2.0, "top_k": 20}


def generated(model: torch.nn.Module, cache: str, how: dict) -> torch.Tensor:
    torch.manual_seed(3)
    return model.generate(TOKENS[:2, :4], max_new_tokens=5, cache_implementation=cache, pad_token_id=0, **how)


@pytest.mark.parametrize("how", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", ["Llama", "Gemma2", "Qwen3Moe"])
def test_generation(family, cache, how):
    expected = generated(make(family), cache, how)
    for ranks in (2, 4):
        models = [make(family) for _ in range(ranks)]

        def main():
            model = parallelize_module(models[tessera.get_rank()], init_device_mesh("cpu", (ranks,)), "auto")
            return generated(model, cache, how)

        assert all(torch.equal(each, expected) for each in tessera.run(ranks, main, timeout=60))


def test_samples_go_on_from_where_the_generator_stood():
    probabilities = torch.full((2, 50), 0.02)
    torch.manual_seed(5)
    expected = [torch.multinomial(probabilities, 3), probabilities.multinomial(3)]
    torch.manual_seed(5)
    for drawn in tessera.run(3, lambda: [torch.multinomial(probabilities, 3), probabilities.multinomial(3)]):
        assert all(map(torch.equal, drawn, expected))


def test_generation_by_torchrun(tmp_path):
    model = make("Llama")
    model.save_pretrained(tmp_path / "model")
    torch.save(
        [generated(model, "dynamic", GREEDY), generated(model, "static", SAMPLED)], tmp_path / "expected.pt"
    )
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-addr",
        "127.0.0.1",
    ]
    command += ["--master-port", free_port(), str(pathlib.Path(__file__)), str(tmp_path)]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
    assert result.returncode == 0 and result.stdout.count("done") == 2, result.stdout


def of_torchrun(folder: pathlib.Path) -> None:
    expected = torch.load(folder / "expected.pt")
    mesh = init_device_mesh("cpu", (tessera.get_world_size(),))
    model = from_pretrained(transformers.AutoModelForCausalLM, folder / "model", mesh)
    for tokens, *how in zip(expected, ("dynamic", "static"), (GREEDY, SAMPLED)):
        assert torch.equal(generated(model, *how), tokens)


def test_training_with_data_parallel_beside():
    model = make("Qwen3")
    losses = train(model, functools.partial(loss_on, TOKENS), 5)

    def main():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        ours = replicate(parallelize_module(make("Qwen3"), mesh["tp"], plan="auto"), mesh["dp"])
        mine = train(ours, functools.partial(loss_on, TOKENS.chunk(2)[mesh.get_local_rank("dp")]), 5)
        total = tessera.DTensor.from_local(
            torch.tensor(mine), mesh["dp"], [tessera.Partial("avg")]
        ).full_tensor()
        assert total.tolist() == pytest.approx(losses, rel=1e-4)
        for each, expected in zip(ours.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(full(each).detach(), expected.detach(), rtol=1e-3, atol=1e-4)

    tessera.run(4, main, timeout=60)


@pytest.mark.parametrize(
    "family, plan, options",
    [
        ("Llama", "auto", {"tie_word_embeddings": True}),
        ("Phi3", "auto", {}),
        ("Mixtral", "auto", {"experts_implementation": "grouped_mm"}),
        ("Mixtral", "experts", {}),
        ("GptOss", "experts", {}),
    ],
)
def test_each_rank_reads_and_writes_its_part(family, plan, options, tmp_path):
    plain = make(family, torch.float32, **options)
    plain.save_pretrained(tmp_path / "plain")
    plain = type(plain).from_pretrained(tmp_path / "plain")
    bytes_of_all = sum(each.nbytes for each in plain.parameters())

    def main():
        mesh = init_device_mesh("cpu", (4,))
        model = from_pretrained(transformers.AutoModelForCausalLM, tmp_path / "plain", mesh, plan)
        for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert ours.dtype == theirs.dtype and torch.equal(full(ours), theirs), name
        for (name, ours), theirs in zip(model.named_buffers(), plain.buffers(), strict=True):
            assert torch.equal(ours, theirs), name
        mine = sum(
            (each._local_tensor if isinstance(each, tessera.DTensor) else each).nbytes
            for each in model.parameters()
        )
        assert mine < 0.75 * bytes_of_all
        with torch.no_grad():
            torch.testing.assert_close(model(TOKENS).logits, plain(TOKENS).logits, rtol=1e-3, atol=1e-4)
            half = from_pretrained(type(plain), tmp_path / "plain", mesh, plan, dtype=torch.bfloat16)
        for ours, theirs in zip(half.parameters(), plain.parameters(), strict=True):
            assert torch.equal(full(ours), theirs.bfloat16())
        save_pretrained(model, tmp_path / "ours")

    tessera.run(4, main, timeout=60)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(again) is type(plain)
    for ours, theirs in zip(again.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_errors(tmp_path):
    def main():
        mesh = init_device_mesh("cpu", (2,))
        with pytest.raises(ValueError, match="Linear ships no plan"):
            parallelize_module(torch.nn.Linear(2, 2), mesh, "auto")
        with pytest.raises(ValueError, match='are "auto" and "experts", got \'best\''):
            parallelize_module(make("Llama"), mesh, plan="best")
        with pytest.raises(TypeError, match="a short name"):
            parallelize_module(make("Llama"), mesh, "auto", plan="auto")
        with pytest.raises(ValueError, match="no plan for experts"):
            parallelize_module(make("Llama"), mesh, plan="experts")
        with pytest.raises(ValueError, match="3 experts of MixtralExperts cannot be shared evenly among 2"):
            parallelize_module(make("Mixtral", num_local_experts=3), mesh, plan="experts")
        with pytest.raises(ValueError, match="a mesh of one dim"):
            parallelize_module(make("Llama"), init_device_mesh("cpu", (1, 2)), "auto")
        unknown = make("Llama")
        unknown._tp_plan["model.norm"] = "striped"
        with pytest.raises(ValueError, match="'striped' for model.norm, which means nothing here"):
            parallelize_module(unknown, mesh, "auto")
        with pytest.raises(ValueError, match="snapshot_download"):
            from_pretrained(transformers.LlamaForCausalLM, "meta-llama/none", mesh)

    tessera.run(2, main)


if __name__ == "__main__":
    of_torchrun(pathlib.Path(sys.argv[1]))
    sys.stdout.write("done\n")
