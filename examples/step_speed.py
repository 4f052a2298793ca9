"""How fast a training step is against this machine's float32 matrix product, and the memory that it takes.

    python examples/step_speed.py [DRAFTER] [--threads 1] [--steps 6] [--whole-vocabulary]

Counts the operations that the method needs (`DFlashTrainer.floating_point_ops`) over the wall clock of whole steps:
drawing anchors, forward and backward pass, clipping, AdamW. The data are random: 4 answers of 130 tokens to prompts
of 100, 64 anchors each, features and final states as from disk, distillation, loss over some 800 token ids as
`--answer_vocabulary` takes it. No target is loaded: what training needs of one is its table and head. Run it on a
machine with nothing else to do.
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

from dflash_hf import DFlashDraftModel
from dflash_hf.training.trainer import DFlashTrainer, DFlashTrainingArguments

SHIPPED = Path(__file__).parents[1] / "model_cards/SmolLM2-135M-Instruct-DFlash"
PROMPT, ANSWER, SEQUENCES, ANCHORS, IDS_IN_USE = 100, 130, 4, 64, 1000


class RandomSamples(torch.utils.data.Dataset):
    """As many sequences as the steps need, all of one length."""

    def __init__(self, count: int, hidden_size: int, num_layers: int):
        self.ids = torch.randint(10, 10 + IDS_IN_USE, (count, PROMPT + ANSWER))
        self.features = torch.randn(PROMPT + ANSWER, num_layers * hidden_size).bfloat16()
        self.final = torch.randn(PROMPT + ANSWER, hidden_size).bfloat16()

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict:
        item = {"sample_id": str(i), "ids": self.ids[i], "spans": [(PROMPT, PROMPT + ANSWER)]}
        return item | {"features": self.features, "final": self.final}


class Clock(TrainerCallback):
    def __init__(self):
        self.ends = []

    def on_step_end(self, args, state, control, **kwargs):
        self.ends.append(time.perf_counter())


def stand_in(drafter) -> LlamaForCausalLM:
    """A random model with the table, the head and the layer count of the drafter's target, and nothing between."""
    config = drafter.config
    hidden_size = drafter.fc.in_features // len(config.target_layer_ids)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=hidden_size,
            intermediate_size=1,
            num_hidden_layers=config.num_target_layers,
            num_attention_heads=1,
            head_dim=2,
        )
    ).eval()


def matmul_rate(size: int = 2048) -> float:
    """Operations a second of a float32 matrix product, the median of five."""
    a, b = torch.randn(2, size, size).unbind()
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - started)
    return 2 * size**3 / sorted(seconds)[2]


def memory(field: str) -> int:
    """VmRSS (now) or VmHWM (peak) of this process in bytes; Linux only."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("drafter", nargs="?", default=str(SHIPPED))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--whole-vocabulary", action="store_true", help="loss over every token of the vocabulary")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    drafter = DFlashDraftModel.from_pretrained(options.drafter, dtype="float32")
    target, clock = stand_in(drafter), Clock()
    layers = len(drafter.config.target_layer_ids)
    data = RandomSamples(SEQUENCES * (options.steps + 1), drafter.fc.in_features // layers, layers)
    with tempfile.TemporaryDirectory() as folder:
        arguments = DFlashTrainingArguments(
            output_dir=folder,
            max_steps=options.steps + 1,  # the first one allocates
            per_device_train_batch_size=SEQUENCES,
            gradient_accumulation_steps=1,
            num_anchors=ANCHORS,
            distillation_weight=0.5,
            answer_vocabulary=not options.whole_vocabulary,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = DFlashTrainer(drafter, target, arguments, data, callbacks=[clock])
        before = matmul_rate()
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        held = memory("VmRSS")
        trainer.train()
        taken = memory("VmHWM") - held
    rate = (before + matmul_rate()) / 2
    step = (clock.ends[-1] - clock.ends[0]) / options.steps
    needed = trainer.state.total_flos / (options.steps + 1)
    parameters = sum(parameter.numel() for parameter in drafter.parameters())
    print(f"threads {options.threads}, {trainer.head.vocab_size} tokens in the loss")
    print(f"matrix product: {rate / 1e9:.1f} GFLOP/s")
    print(f"a step: {needed / 1e9:.1f} GFLOP in {step:.2f} s, {needed / step / 1e9:.1f} GFLOP/s")
    print(f"share: {needed / step / rate:.0%}")
    print(
        f"memory of training: {taken / 1e6:.0f} MB more than before the first step, "
        f"{12 * parameters / 1e6:.0f} MB of it gradients and AdamW's moments of {parameters / 1e6:.1f} M parameters"
    )


if __name__ == "__main__":
    main()
