"""Speed-up against simulated tau: what the loop is worth, without a trained drafter.

    python examples/simulated_acceptance.py smollm2                    # CPU: the real SmolLM2 and the drafter here
    python examples/simulated_acceptance.py qwen3-8b                   # one GPU: random weights of Qwen3-8B's shape

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
QUESTIONS = ROOT.parent / "shared" / "data" / "gsm8k_dev.jsonl"
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


def load(name: str, limit: int):
    """`(target, drafter, prompts, tokenizer)`."""
    if name == "smollm2":
        from smollm2 import load_smollm2

        target, tokenizer = load_smollm2()
        drafter = DFlashDraftModel.from_pretrained(ROOT / "model_cards" / "SmolLM2-135M-Instruct-DFlash")
        prompts, _ = read_prompts(QUESTIONS, limit=limit)
        return target, drafter.float().eval(), prompts, tokenizer
    device, dtype = "cuda", torch.bfloat16
    torch.manual_seed(0)
    target = random_target(36, device, dtype, **QWEN3_8B)
    drafter = random_drafter(36, 16, device, dtype, **QWEN3_8B)
    generator = torch.Generator().manual_seed(0)
    prompts = [
        Prompt(f"random-{i}", ids=torch.randint(0, QWEN3_8B["vocab_size"], (128,), generator=generator).tolist())
        for i in range(limit)
    ]
    return target, drafter, prompts, None


def markdown(reports: dict[int, Report], taus: list[float]) -> str:
    """One row for each batch size and method: measured speed-up (and measured tau) at each tau asked for."""
    lines = ["| batch | method | " + " | ".join(f"tau {tau:g}" for tau in taus) + " |", "|---" * (len(taus) + 2) + "|"]
    for batch_size, report in reports.items():
        summary = report.summary()
        for method in ("constant", "adaptive"):
            rows = [summary.get(f"{method} tau={tau:g}") for tau in taus]
            cells = [f"{r['ratio']['value']:.2f}x ({r['tau']:.2f})" if r and r["ratio"] else "refused" for r in rows]
            lines.append(f"| {batch_size} | {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pair", choices=("smollm2", "qwen3-8b"))
    parser.add_argument("--taus", type=float, nargs="+", default=[2, 3, 4, 6, 8])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--limit", type=int, default=16, help="prompts")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--out", type=Path, help="JSON file: the full report of each batch size")
    args = parser.parse_args()
    target, drafter, prompts, tokenizer = load(args.pair, args.limit)
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
            simulated_taus=args.taus,
            progress=True,
        )
        reports[batch_size].print()
        if args.out is not None:
            args.out.write_text(json.dumps({str(b): report.to_dict() for b, report in reports.items()}, indent=1))
        if reports[batch_size].interrupted:
            break
    print(markdown(reports, args.taus))


if __name__ == "__main__":
    main()
