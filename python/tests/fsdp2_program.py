"""A program that is written for FSDP2 of PyTorch: a transformer, trained on all ranks. Prints what it learnt.

test_fully_shard.py runs it as it is, and with the import of fully_shard changed.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

VOCABULARY, CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 32, 12, 16, 4, 3, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        query, key, value = (
            part.view(batch, length, HEADS, -1).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).split(WIDTH, 2)
        )
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(seen.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(CONTEXT, WIDTH) * 0.02)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, text):
        x = self.tokens(text) + self.positions
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(self.norm(x))


def train(mesh, reshard_after_forward, policy) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Transformer()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=policy)
    assert isinstance(model, FSDPModule)
    # A large eps: the gradient of a bias of keys is noise.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    generator = torch.Generator().manual_seed(1)
    for _ in range(6):
        total = torch.zeros(())
        for micro in range(2):
            text = torch.randint(0, VOCABULARY, (ranks * BATCH, CONTEXT + 1), generator=generator)
            text = text.chunk(ranks)[rank]
            model.set_requires_gradient_sync(micro == 1)
            logits = model(text[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), text[:, 1:].flatten()) / 2
            loss.backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        if rank == 0:
            print(f"{total.item() / ranks:.6f} {norm.full_tensor().item():.6f}")
        else:
            norm.full_tensor()
    for name, value in model.state_dict().items():
        norm = value.full_tensor().norm().item()
        if rank == 0:
            print(f"{name} {norm:.6f}")


def main() -> None:
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    flat = init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",))
    train(flat, None, MixedPrecisionPolicy())
    train(flat, False, MixedPrecisionPolicy())
    if ranks == 4:
        train(flat, 2, MixedPrecisionPolicy())
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        train(both, True, MixedPrecisionPolicy())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
