"""A small language model recites a poem, token by token, on 1, 2 and 4 ranks: the same words, from shards of its weights.

    python examples/python/generate.py                                # ranks are threads
    torchrun --nproc-per-node 2 examples/python/generate.py           # ranks are processes

Its weights are made here, in seconds, and written as any model of Hugging Face is. Each rank then reads only its part of them.
"""

import argparse
import os
import pathlib
import tempfile
import time

import torch
from tessera.parallel import from_pretrained
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

import tessera

POEM = """'Twas brillig, and the slithy toves
Did gyre and gimble in the wabe;
All mimsy were the borogoves,
And the mome raths outgrabe.
"""
LETTERS = sorted(set(POEM))  # a token is a letter


def encode(text: str) -> torch.Tensor:
    return torch.tensor([[LETTERS.index(letter) for letter in text]])


def learn(folder: pathlib.Path) -> None:
    """Teach a new model the poem, on one device, and save it."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # it is too small for more
    config = LlamaConfig(
        vocab_size=len(LETTERS), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=512, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens, loss = encode(POEM), torch.inf
    while loss > 0.05:
        optimizer.zero_grad()
        output = model(input_ids=tokens, labels=tokens)
        output.loss.backward()
        optimizer.step()
        loss = output.loss.item()
    model.save_pretrained(folder)


class Speaker(BaseStreamer):
    """Prints tokens as they come."""

    def put(self, value: torch.Tensor) -> None:
        print("".join(LETTERS[token] for token in value.flatten().tolist()), end="", flush=True)

    def end(self) -> None:
        print()


def speak(folder: pathlib.Path, count: int) -> str:
    """On each rank: read its part of the model, and generate; the first one prints."""
    mesh = tessera.init_device_mesh("cpu", (tessera.get_world_size(),))
    model = from_pretrained(AutoModelForCausalLM, folder, mesh)
    is_first = mesh.get_rank() == 0
    if is_first:
        shard = model.model.layers[0].mlp.up_proj.weight
        print(
            f"--- world of {mesh.size()}: each rank has {tuple(shard.to_local().shape)} of {tuple(shard.shape)}, say"
        )
    begin = time.perf_counter()
    tokens = model.generate(
        encode(POEM[:4]), max_new_tokens=count, do_sample=False, streamer=Speaker() if is_first else None
    )
    if is_first:
        print(f"--- {count / (time.perf_counter() - begin):.0f} tokens/s")
    return "".join(LETTERS[token] for token in tokens.flatten().tolist())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[1, 2, 4], help="how many threads (default: 1 2 4)"
    )
    parser.add_argument("--tokens", type=int, default=len(POEM) - 4, help="how many to generate")
    arguments = parser.parse_args()
    if "RANK" in os.environ:  # started by torchrun
        rank = tessera.get_rank()  # the processes meet
        with tempfile.TemporaryDirectory() as folder:  # the first one's is used
            if rank == 0:
                learn(pathlib.Path(folder))
            shared = [folder]
            torch.distributed.broadcast_object_list(shared)
            speak(pathlib.Path(shared[0]), arguments.tokens)
            torch.distributed.barrier()
        return
    with tempfile.TemporaryDirectory() as folder:
        learn(pathlib.Path(folder))
        spoken = [
            tessera.run(ranks, speak, pathlib.Path(folder), arguments.tokens) for ranks in arguments.ranks
        ]
    assert len({text for each in spoken for text in each}) == 1
    print("All ranks, of all runs, said the same.")


if __name__ == "__main__":
    main()
