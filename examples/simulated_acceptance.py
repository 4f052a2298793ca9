"""Speed-up against simulated tau: what the loop is worth, without a trained drafter.

    python examples/simulated_acceptance.py smollm2 --prompts gsm8k.jsonl   # CPU: SmolLM2 and the drafter here
    python examples/simulated_acceptance.py qwen3-8b                        # one GPU: random weights of that shape

The passes of target, drafter and head are real; only which drafts are right is drawn (see docs/benchmark.md).
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from dflash_hf import DFlashConfig, DFlashDraftModel
from dflash_hf.benchmark import Prompt, Report, bench, read_prompts

ROOT = Path(__file__).resolve().parents[1]
QWEN3_8B = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
}


@torch.no_grad()
def random_target(num_layers: int, device: str, dtype: torch.dtype, **sizes) -> Qwen3ForCausalLM:
    """A random target whose greedy text no rounding can flip.

    Purely random weights have near-ties everywhere, and a flipped tie would end the known text that simulated drafts
    follow. Here the embeddings are so large that the layers hardly turn them, and the head's row of token t + 1 is
    the embedding of token t: the next token is always the last one plus one, by a wide margin. What a pass costs does
    not depend on the weights.
    """
    config = Qwen3Config(**sizes, num_hidden_layers=num_layers, tie_word_embeddings=False, eos_token_id=None)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            target = Qwen3ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    table = target.get_input_embeddings().weight.normal_()
    target.get_output_embeddings().weight.copy_(table.roll(1, 0) / config.hidden_size**0.5)
    table.mul_(100.0)
    target.generation_config.eos_token_id = None
    return target


def random_drafter(num_target_layers: int, block_size: int, device: str, dtype: torch.dtype, **sizes):
    """Five random layers of the target's shape, as the published drafters have them."""
    config = DFlashConfig(
        **sizes,
        num_hidden_layers=5,
        num_target_layers=num_target_layers,
        block_size=block_size,
        mask_token_id=sizes["vocab_size"] - 1,
    )
    return DFlashDraftModel(config).to(device, dtype).eval()


def load(name: str):
    """`(target, drafter, tokenizer)`; the random target has no tokenizer."""
    if name == "smollm2":
        from smollm2 import load_smollm2

        target, tokenizer = load_smollm2()
        drafter = DFlashDraftModel.from_pretrained(ROOT / "model_cards" / "SmolLM2-135M-Instruct-DFlash")
        return target, drafter.float().eval(), tokenizer
    torch.manual_seed(0)
    where = "cuda", torch.bfloat16
    return random_target(36, *where, **QWEN3_8B), random_drafter(36, 16, *where, **QWEN3_8B), None


def random_prompts(count: int, vocab_size: int) -> list[Prompt]:
    """128 random tokens each."""
    ids = torch.randint(0, vocab_size, (count, 128), generator=torch.Generator().manual_seed(0))
    return [Prompt(f"random-{i}", ids=row) for i, row in enumerate(ids.tolist())]


def markdown(reports: dict[int, Report], taus: list[float]) -> str:
    """One row for each batch size and method: measured speed-up (and measured tau) at each tau asked for."""
    lines = ["| batch | method | " + " | ".join(f"tau {tau:g}" for tau in taus) + " |", "|---" * (len(taus) + 2) + "|"]
    for batch_size, report in reports.items():
        summary = report.summary()
        methods = dict.fromkeys(name.rsplit(" tau=", 1)[0] for name in report.settings["methods"] if " tau=" in name)
        for method in methods:
            rows = [summary.get(f"{method} tau={tau:g}") for tau in taus]
            cells = [f"{r['ratio']['value']:.2f}x ({r['tau']:.2f})" if r and r["ratio"] else "refused" for r in rows]
            lines.append(f"| {batch_size} | {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pair", choices=("smollm2", "qwen3-8b"))
    parser.add_argument("--taus", type=float, nargs="+", default=[2, 3, 4, 6, 8])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--block-lengths", type=int, nargs="+", help="drafts a cycle of constant; unset: all")
    parser.add_argument("--prompts", type=Path, help="JSONL with `turns` or `messages`; unset: random tokens")
    parser.add_argument("--limit", type=int, default=16, help="prompts")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--out", type=Path, help="JSON file: the full report of each batch size")
    args = parser.parse_args()
    target, drafter, tokenizer = load(args.pair)
    if args.prompts is None:
        prompts = random_prompts(args.limit, target.config.vocab_size)
    elif tokenizer is None:
        parser.error("the random target has no tokenizer: leave out --prompts")
    else:
        prompts, _ = read_prompts(args.prompts, limit=args.limit)
    reports = {}
    for batch_size in args.batch_sizes:
        reports[batch_size] = bench(
            target,
            drafter,
            prompts,
            tokenizer=tokenizer,
            batch_size=batch_size,
            max_new_tokens=args.max_new_tokens,
            repeats=args.repeats,
            block_lengths=args.block_lengths,
            simulated_taus=args.taus,
            progress=True,
        )
        reports[batch_size].print()
        if args.out is not None:
            temporary = args.out.with_name(args.out.name + ".part")  # an older file is replaced whole or not at all
            temporary.write_text(json.dumps({str(b): report.to_dict() for b, report in reports.items()}, indent=1))
            temporary.replace(args.out)
        if reports[batch_size].interrupted:
            break
    print(markdown(reports, args.taus))


if __name__ == "__main__":
    main()
