"""Trainer of transformers, and loops with accelerate, on a model that is parallel by its own plan: as on one device."""

import json
import pathlib
import subprocess
import sys

import pytest
import torch
from tessera.parallel import parallelize_module
from test_auto_plan import TOKENS, make
from test_processes import free_port

import tessera

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

DATA = [{"input_ids": each, "labels": each} for each in torch.cat([TOKENS, TOKENS.flip(1)])]


def trainer(model: torch.nn.Module, folder: pathlib.Path) -> list[float]:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=4, num_train_epochs=2, learning_rate=1e-2, logging_steps=1, save_strategy="no",
        report_to=[], use_cpu=True, seed=1, disable_tqdm=True, gradient_accumulation_steps=1,
    )  # fmt: skip
    job = transformers.Trainer(model=model, args=arguments, train_dataset=DATA)
    job.train()
    numbers = [each[key] for each in job.state.log_history for key in ("loss", "grad_norm") if key in each]
    return [*numbers, job.evaluate(DATA[:4])["eval_loss"]]


def loop(model: torch.nn.Module, folder: pathlib.Path) -> list[float]:
    tp_size = model.tp_size or 1
    together = accelerate.ParallelismConfig(tp_size=tp_size) if tp_size > 1 else None
    accelerator = accelerate.Accelerator(cpu=True, parallelism_config=together)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(DATA, batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    numbers = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        numbers += [loss.item(), float(accelerator.clip_grad_norm_(model.parameters(), 1.0))]
        optimizer.step()
        optimizer.zero_grad()
    return numbers


@pytest.mark.parametrize("fit", [trainer, loop])
def test_as_on_one_device(fit, tmp_path):
    expected = fit(make("Llama", torch.float32), tmp_path)
    models = [make("Llama", torch.float32) for _ in range(2)]

    def main():
        mesh = tessera.init_device_mesh("cpu", (2,))
        return fit(parallelize_module(models[tessera.get_rank()], mesh, "auto"), tmp_path)

    for numbers in tessera.run(2, main, timeout=60):
        assert numbers == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("fit", [trainer, loop])
def test_by_torchrun(fit, tmp_path):
    """Processes share one model: they get the same batches, and nothing is wrapped for data parallelism."""
    expected = fit(make("Llama", torch.float32), tmp_path)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-addr",
        "127.0.0.1",
    ]
    command += ["--master-port", free_port(), __file__, fit.__name__, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert result.returncode == 0, result.stdout + result.stderr
    for rank in range(2):
        numbers = json.loads((tmp_path / f"{rank}.json").read_text())
        assert numbers == pytest.approx(expected, rel=1e-3)


def of_torchrun(fit: str, folder: pathlib.Path) -> None:
    mesh = tessera.init_device_mesh("cpu", (tessera.get_world_size(),))
    model = parallelize_module(make("Llama", torch.float32), mesh, "auto")
    numbers = {"trainer": trainer, "loop": loop}[fit](model, folder)
    (folder / f"{tessera.get_rank()}.json").write_text(json.dumps(numbers))


if __name__ == "__main__":
    of_torchrun(sys.argv[1], pathlib.Path(sys.argv[2]))
