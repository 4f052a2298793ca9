"""Random targets, drafters, prompts and options: greedy text with the drafter against plain generate().

Not part of the test run. A case is a function of its number alone; every finished one is a line of the log, so a
broken-off run goes on where it stopped:

    python tests/fuzz.py --cases 2000 --log runs/fuzz.jsonl

A difference is explained before it counts: where the target's two best (processed) logits lie closer together than
float32 passes of another shape move them, it is a near-tie and is logged as one.
"""

import argparse
import json
import os
import random
import sys
import traceback
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import WatermarkingConfig

from drafters import HITS, make_drafter, oracle
from targets import FIRST_TEXT_ID, MASK, NUM_LAYERS, PAD, TEXT_FAMILIES, VOCAB, make_target, prompt_ids

NEAR_TIE = 1e-4  # logits of the tiny targets are of the order of 10; passes of another shape move them by 1e-5


def random_drafter(rng: random.Random, text: list[int] | None):
    """An oracle over a random configuration, or a random drafter, which it always is without a text to know."""
    layers = rng.randint(1, 3)
    changes: dict = {
        "seed": rng.randrange(1000),
        "num_hidden_layers": layers,
        "block_size": rng.choice([1, 2, 3, 4, 5, 8, 16]),
        "target_layer_ids": sorted(rng.sample(range(NUM_LAYERS), rng.randint(1, NUM_LAYERS))),
        "attention_bias": rng.random() < 0.3,
        "is_neox_style": rng.random() < 0.7,
    }
    options = {"mask_token_id": MASK}
    if rng.random() < 0.3:
        changes["layer_types"] = [rng.choice(["full_attention", "sliding_attention"]) for _ in range(layers)]
        changes["sliding_window"] = rng.choice([1, 3, 7, 64])
    elif rng.random() < 0.2:
        options |= {"use_swa": True, "swa_window_size": rng.choice([2, 5, 30])}
    if rng.random() < 0.2:
        options["causal"] = rng.random() < 0.5
    if rng.random() < 0.2:
        options["attention_sink_bias"] = True
    if rng.random() < 0.2:
        options |= {"input_embedding_scale": 2.0, "output_multiplier": 0.5, "final_logit_softcapping": 4.0}
    if rng.random() < 0.2:
        options["sample_from_anchor"] = True
    own = {}
    if rng.random() < 0.2:
        own["embed_tokens.weight"] = [VOCAB, 32]
    if rng.random() < 0.2:
        own |= {"lm_head.weight": [40, 32], "d2t": [40]}
    changes |= {"dflash_config": options, "own_tensors": own or None}
    hit = rng.choice([*HITS, None]) if text is not None else None
    drafter = make_drafter(**changes) if hit is None else oracle(text, hit, **changes)
    if rng.random() < 0.2:
        drafter.generation_config.num_assistant_tokens = rng.randint(1, 10)
    if rng.random() < 0.2:
        drafter.generation_config.assistant_confidence_threshold = rng.choice([0.05, 0.3, 0.9])
    if rng.random() < 0.2:
        drafter.to(torch.bfloat16)
    if rng.random() < 0.3:
        drafter.generation_config.num_assistant_tokens_schedule = "adaptive"
    return drafter


def random_options(rng: random.Random) -> dict:
    words = range(FIRST_TEXT_ID, VOCAB)
    pool = [
        {"repetition_penalty": rng.choice([0.8, 1.2, 1.6])},
        {"no_repeat_ngram_size": rng.randint(1, 4)},
        {"bad_words_ids": [[rng.choice(words)] for _ in range(3)] + [rng.sample(words, 2)]},
        {"min_new_tokens": rng.randint(1, 30)},
        {"eos_token_id": rng.sample(words, rng.randint(1, 4)), "pad_token_id": PAD},
        {"suppress_tokens": rng.sample(words, 8)},
        {"sequence_bias": [[[rng.choice(words)], rng.uniform(-6, 6)]]},
        {"exponential_decay_length_penalty": (rng.randint(1, 10), 1.2), "eos_token_id": 20, "pad_token_id": PAD},
        {"forced_eos_token_id": PAD},
        {"watermarking_config": WatermarkingConfig(bias=2.0)},
        {"prefill_chunk_size": rng.randint(1, 9)},
        {"prefix_allowed_tokens_fn": lambda _, ids: [w for w in words if (w + len(ids)) % 3]},
        {"renormalize_logits": True},
        {"encoder_repetition_penalty": 1.3},
    ]
    options: dict = {}
    for extra in rng.sample(pool, rng.choice([0, 0, 1, 1, 2, 3])):
        options |= extra
    return options


def run_case(number: int) -> dict:
    rng = random.Random(number)
    family = rng.choice(TEXT_FAMILIES)
    # Sinks and soft caps need eager.
    attention = "eager" if family in ("gpt_oss", "gemma2") else rng.choice(["sdpa", "eager"])
    target = make_target(family, seed=rng.randrange(50), attn_implementation=attention)
    new = rng.choice([1, 2, 3, 4, 5, 7, 16, 33])
    lengths = [rng.choice([1, 2, 5, 8, 9, 17, 40]) for _ in range(rng.choice([1, 1, 1, 1, 2, 3]))]
    width = max(lengths) + rng.choice([0, 0, 0, 3])
    ids, mask = torch.full((len(lengths), width), PAD), torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, width - length :] = prompt_ids(length=length, seed=rng.randrange(1000))[0]
        mask[row, width - length :] = 1
    inputs = {"input_ids": ids, "attention_mask": mask}
    settings = {"do_sample": False, "max_new_tokens": new, "pad_token_id": PAD} | random_options(rng)
    expected = target.generate(**inputs, **settings, return_dict_in_generate=True, output_scores=True)
    texts = expected.sequences.tolist()
    drafter = random_drafter(rng, texts[0][width - lengths[0] :] if len(lengths) == 1 else None)
    out = target.generate(**inputs, **settings, assistant_model=drafter).tolist()
    run = drafter.last_run  # None where an option keeps a batch from being drafted for
    case = {"case": number, "family": family, "attention": attention, "rows": len(lengths), "new": len(out[0]) - width}
    case["tau"] = None if run is None or run.cycles == 0 else round(run.tau, 3)
    if out == texts:
        return case | {"result": "equal"}
    # The first difference of each row that differs; from there on another text is fine, if that was a near-tie.
    gaps = []
    for row, (a, b) in enumerate(zip(texts, out, strict=True)):
        if a != b:
            first = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            # Behind its end a row is padding, and shorter only where another row has changed.
            if first < len(a) and (first < len(b) or len(lengths) == 1):
                best = expected.scores[first - width][row].topk(2).values
                gaps.append(float(best[0] - best[1]))
            elif len(lengths) == 1:
                gaps.append(float("inf"))
    tied = bool(gaps) and max(gaps) < NEAR_TIE
    return case | {"result": "near-tie" if tied else "DIFFERENT", "gaps": gaps}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--log", type=Path, default=Path("runs/fuzz.jsonl"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.log.parent.mkdir(parents=True, exist_ok=True)
    done = []
    if arguments.log.exists():
        for line in arguments.log.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                done.append(json.loads(line))
        arguments.log.write_text("".join(json.dumps(case) + "\n" for case in done))
    seen = {case["case"] for case in done}
    with arguments.log.open("a") as log:
        for number in range(arguments.cases):
            if number in seen:
                continue
            try:
                case = run_case(number)
            except Exception:
                case = {"case": number, "result": "ERROR", "error": traceback.format_exc()}
            log.write(json.dumps(case) + "\n")
            log.flush()
            done.append(case)
    counts: dict[str, int] = {}
    for case in done:
        counts[case["result"]] = counts.get(case["result"], 0) + 1
    drafted = [case for case in done if case.get("tau")]
    print(counts, f"{sum(case['tau'] > 1.5 for case in drafted)} of {len(drafted)} drafted for with tau above 1.5")
    return int(any(result in counts for result in ("DIFFERENT", "ERROR")))


if __name__ == "__main__":
    sys.exit(main())
