"""Models of the transformers package, as it has them: made parallel by the names of their submodules, they train as on one device."""

import functools

import pytest
import torch
from models import filled, train
from ranks import on_ranks
from tessera.experimental import implicit_replication
from tessera.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module, replicate

import tessera
from tessera import Replicate, Shard, distribute_module, distribute_tensor, init_device_mesh

transformers = pytest.importorskip("transformers")

VOCABULARY = 64
TOKENS = torch.randint(0, VOCABULARY, (4, 9), generator=torch.Generator().manual_seed(1))
STEPS = 10


def llama(attention: str, tied: bool = False) -> torch.nn.Module:
    return filled(
        transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=8,
                num_key_value_heads=4,
                max_position_embeddings=32,
                tie_word_embeddings=tied,
                attn_implementation=attention,
                use_cache=False,
            )
        )
    )


def gpt2(attention: str) -> torch.nn.Module:
    return filled(
        transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=VOCABULARY,
                n_embd=32,
                n_layer=2,
                n_head=4,
                n_positions=32,
                attn_implementation=attention,
                use_cache=False,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                bos_token_id=0,
                eos_token_id=0,
                loss_type="ForCausalLM",
            )
        )
    )


def llama_plan(local: bool) -> dict[str, tessera.parallel.ParallelStyle]:
    columns = functools.partial(ColwiseParallel, use_local_output=local)
    rows = functools.partial(RowwiseParallel, use_local_output=local)
    layer = "model.layers.*"
    plan = {
        f"{layer}.self_attn.[qkv]_proj": columns(),
        f"{layer}.self_attn.o_proj": rows(),
        f"{layer}.mlp.gate_proj": columns(),
        f"{layer}.mlp.up_proj": columns(),
        f"{layer}.mlp.down_proj": rows(),
    }
    if not local:  # what is plain between layers has whole features, so these would have to be gathered
        plan |= {"model.embed_tokens": rows(input_layouts=Replicate()), "lm_head": columns()}
    return plan


def gpt2_plan() -> dict[str, tessera.parallel.ParallelStyle]:
    columns = functools.partial(ColwiseParallel, use_local_output=False)
    rows = functools.partial(RowwiseParallel, use_local_output=False)
    block = "transformer.h.*"
    return {
        "transformer.wte": rows(input_layouts=Replicate()),
        f"{block}.attn.c_attn": columns(blocks=3),
        f"{block}.attn.c_proj": rows(),
        f"{block}.mlp.c_fc": columns(),
        f"{block}.mlp.c_proj": rows(),
        "lm_head": columns(),
    }


def loss_on(tokens: torch.Tensor, model: torch.nn.Module) -> torch.Tensor:
    return model(input_ids=tokens, labels=tokens).loss


@functools.cache
def on_one_device(make, *args) -> tuple[list[float], list[torch.Tensor]]:
    model = make(*args).double()
    torch.set_num_threads(1)  # as on a rank
    losses = train(model, functools.partial(loss_on, TOKENS), STEPS)
    assert losses[-1] < 0.9 * losses[0]
    return losses, [parameter.detach() for parameter in model.parameters()]


def assert_as_on_one_device(losses, parameters, make, *args):
    expected, expected_parameters = on_one_device(make, *args)
    assert losses == pytest.approx(expected, rel=1e-4)  # softmaxes and losses of the models are in float32
    for ours, theirs in zip(parameters, expected_parameters, strict=True):
        full = ours.full_tensor() if isinstance(ours, tessera.DTensor) else ours
        torch.testing.assert_close(full.detach(), theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("shape", [(2,), (4,), (2, 2)], ids=str)
@pytest.mark.parametrize(
    "make, args, plan",
    [
        (llama, ("sdpa",), llama_plan(False)),
        (llama, ("eager", True), llama_plan(False)),
        (gpt2, ("sdpa",), gpt2_plan()),
        (gpt2, ("eager",), gpt2_plan()),
    ],
    ids=["llama-sdpa", "llama-eager-tied", "gpt2-sdpa", "gpt2-eager"],
)
def test_training_by_placement(make, args, plan, shape):
    """All tensors are distributed; along the first of two mesh dims the batch is sharded."""
    on_one_device(make, *args)

    @on_ranks(torch.Size(shape).numel())
    def test():
        mesh = init_device_mesh("cpu", shape)
        model = parallelize_module(make(*args).double(), mesh, plan)
        replicate(distribute_module(model, mesh), mesh)
        tokens = distribute_tensor(TOKENS, mesh, [Shard(0), Replicate()] if mesh.ndim == 2 else [Replicate()])
        with implicit_replication(), loss_parallel():  # for the masks and positions that the model makes
            with torch.no_grad(), tessera.implicit_communication("forbidden"):
                logits = model(input_ids=tokens).logits
            assert logits.placements[-1] == Shard(2)
            losses = train(model, functools.partial(loss_on, tokens), STEPS)
        assert_as_on_one_device(losses, model.parameters(), make, *args)

    test()


@pytest.mark.parametrize("shape", [(1, 2), (1, 4), (2, 2)], ids=str)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_training_with_local_tensors(attention, shape):
    """As with torch.distributed.tensor.parallel: between the layers each rank has plain tensors of some heads; data are parallel beside it."""
    on_one_device(llama, attention)

    @on_ranks(torch.Size(shape).numel())
    def test():
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        model = parallelize_module(llama(attention).double(), mesh["tp"], llama_plan(True))
        replicate(model, mesh["dp"])
        tokens = TOKENS.chunk(shape[0])[mesh.get_local_rank("dp")]
        with tessera.implicit_communication("forbidden"):
            losses = train(model, functools.partial(loss_on, tokens), STEPS)
        of_all = (
            tessera.DTensor.from_local(torch.tensor(losses), mesh["dp"], [tessera.Partial("avg")])
            .full_tensor()
            .tolist()
        )
        assert_as_on_one_device(of_all, model.parameters(), llama, attention)

    test()


@pytest.mark.parametrize("cache", ["static", "dynamic"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_generation(attention, cache):
    """Caches are plain tensors that the model makes, or distributed ones."""
    prompt, settings = (
        TOKENS[:, :4],
        {
            "max_new_tokens": 5,
            "do_sample": False,
            "use_cache": True,
            "cache_implementation": cache,
            "pad_token_id": 0,
        },
    )
    expected = llama(attention).double().generate(prompt, **settings)

    @on_ranks(4)
    def test():
        mesh = init_device_mesh("cpu", (4,))
        model = distribute_module(
            parallelize_module(llama(attention).double(), mesh, llama_plan(False)), mesh
        )
        with implicit_replication():
            got = model.generate(distribute_tensor(prompt, mesh, [Replicate()]), **settings)
        assert torch.equal(got.full_tensor() if isinstance(got, tessera.DTensor) else got, expected)

    test()


#: Models that write into caches of their own which are plain: of convolutions, of states, of attention.
CACHING = {
    "JambaForCausalLM": {
        "mamba_d_state": 4, "mamba_dt_rank": 4, "num_experts": 2, "num_experts_per_tok": 1, "experts_implementation": "eager",
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1, "use_mamba_kernels": False,
    },
    "BambaForCausalLM": {
        "attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 4, "mamba_n_groups": 1, "mamba_chunk_size": 4,
        "attn_rotary_emb": 2,
    },
    "Zamba2ForCausalLM": {
        "mamba_d_state": 4, "n_mamba_heads": 4, "mamba_headdim": 16, "mamba_ngroups": 1, "chunk_size": 4, "hybrid_layer_ids": [1],
        "layers_block_type": ["mamba", "hybrid"], "num_mem_blocks": 1, "attention_head_dim": 8, "use_shared_attention_adapter": False,
    },
    "Qwen3NextForCausalLM": {
        "head_dim": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 4, "linear_value_head_dim": 4,
        "num_experts": 2, "num_experts_per_tok": 1, "experts_implementation": "eager", "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8, "layer_types": ["linear_attention", "full_attention"],
    },
    "Lfm2ForCausalLM": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "Gemma2ForCausalLM": {"head_dim": 4, "sliding_window": 4},
}  # fmt: skip


@pytest.mark.parametrize("name", CACHING)
def test_generation_with_plain_caches(name):
    family = getattr(transformers, name)
    config = family.config_class(
        **{
            "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8,
            "num_key_value_heads": 4, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
        }
        | CACHING[name]
    )  # fmt: skip
    settings = {
        "max_new_tokens": 4,
        "do_sample": False,
        "use_cache": True,
        "cache_implementation": "static",
        "pad_token_id": 0,
    }
    models = [filled(family(config)).double().eval() for _ in range(5)]
    expected = models.pop().generate(TOKENS[:, :5], **settings)

    def shard(_, module, mesh):
        for key, parameter in module.named_parameters(recurse=False):
            rows = [Shard(0)] if parameter.dim() > 1 else [Replicate()]
            module.register_parameter(
                key, torch.nn.Parameter(distribute_tensor(parameter.detach(), mesh, rows))
            )

    @on_ranks(4)
    def test():
        mesh = init_device_mesh("cpu", (4,))
        model = distribute_module(models[tessera.get_rank()], mesh, shard)
        with implicit_replication():
            got = model.generate(distribute_tensor(TOKENS[:, :5], mesh, [Replicate()]), **settings)
        assert torch.equal(got.full_tensor() if isinstance(got, tessera.DTensor) else got, expected)

    test()
