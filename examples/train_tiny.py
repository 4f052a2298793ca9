"""Train a drafter from nothing in under a minute on a CPU: a tiny random target, its answers, and what they bring.

    python examples/train_tiny.py [FOLDER]

A random target says things that only memory can tell, so the drafter is tried on the answers that it was trained on.
With a real target the steps are the same; see docs/training.md for the commands.
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dflash_hf import DFlashDraftModel
from dflash_hf.training.answers import Sample
from dflash_hf.training.trainer import DFlashTrainer, DFlashTrainingArguments, SampleDataset


def main(folder: str) -> float:
    torch.manual_seed(0)
    target = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=200,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=6,
            num_attention_heads=4,
            initializer_range=0.2,
            bos_token_id=0,
            eos_token_id=None,
        )
    ).eval()

    # The target's own greedy answers. With a tokenizer and real prompts: dflash_hf.training.answers.answer().
    prompts = torch.randint(1, 199, (4, 10))
    answers = target.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=40)
    samples = [Sample(str(n), ids.tolist(), [(10, 50)]) for n, ids in enumerate(answers)]

    drafter = DFlashDraftModel.for_target(target, num_layers=2, block_size=8, initializer_range=0.05)
    arguments = DFlashTrainingArguments(
        output_dir=folder,
        max_steps=100,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=1,
        learning_rate=5e-3,
        num_anchors=32,
        save_strategy="no",
        report_to="none",
        logging_steps=25,
        disable_tqdm=True,
        use_cpu=True,
    )
    data = SampleDataset(samples)
    trainer = DFlashTrainer(drafter, target, arguments, train_dataset=data, eval_dataset=data)
    trainer.train()
    print(f"held in memory: tau {trainer.evaluate()['eval_tau']:.2f} of at most 8")
    trainer.save_model()

    drafter = DFlashDraftModel.from_pretrained(folder)
    target.generate(prompts[:1], assistant_model=drafter, do_sample=False, max_new_tokens=40)
    print(drafter.last_run)
    return drafter.last_run.tau


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/tiny")
