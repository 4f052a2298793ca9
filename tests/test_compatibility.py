"""Families x features: each cell of the table in docs/compatibility.md is a comparison with plain generate().

`python tests/test_compatibility.py` runs them all and writes the table; the tests hold the written one against a new
run. Depth is elsewhere (every slot of a block, drafters that are always and never right): this is breadth.
"""

import copy
import functools
import re
import sys
import warnings
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from drafters import make_drafter, oracle
from targets import FAMILIES, PAD, VLM_FAMILIES, make_target, prompt_ids, vlm_inputs
from test_batch import alone, batch_oracle, left_padded, without_padding
from test_hybrid import HYBRIDS, hybrid

PAGE = Path(__file__).resolve().parents[1] / "docs" / "compatibility.md"
MARKS = "<!-- written by tests/test_compatibility.py -->\n", "<!-- up to here -->\n"
NEW = 8
GREEDY = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": PAD}


class CannotPlainly(Exception):
    """Plain generate() refuses, so there is nothing to compare with."""


def plainly(target, **inputs):
    try:
        return target.generate(**GREEDY | inputs)
    except Exception as error:
        raise CannotPlainly from error


def same_text(target, inputs, before=0, **options):
    """One row, a drafter that is right two times in three; `before`: positions that `generate()` returns no ids of."""
    expected = plainly(target, **inputs, **options)
    drafter = oracle([0] * before + expected[0].tolist(), "sometimes")
    assert target.generate(**GREEDY | inputs | options, assistant_model=drafter).tolist() == expected.tolist()
    assert drafter.last_run.tokens > 1


def greedy(target, inputs):
    same_text(target, inputs)


def sampling(target, inputs):
    """Coupled: the same text with one draft a cycle and with full blocks, which is the target's own draw."""
    texts = []
    for most in (1, None):
        drafter = make_drafter(initializer_range=0.6)
        drafter.generation_config.assistant_sampling = "coupled"
        drafter.generation_config.num_assistant_tokens = most
        torch.manual_seed(3)
        texts.append(target.generate(**GREEDY | inputs | {"do_sample": True}, assistant_model=drafter).tolist())
    assert texts[0] == texts[1]


def several_rows(target, inputs):
    if "pixel_values" in inputs:
        rows = vlm_inputs(target, batch=3)
        rows["input_ids"][:, -1] = torch.tensor([20, 30, 40])
        expected = plainly(target, **rows)
        drafter = batch_oracle(expected.tolist(), "sometimes")
        assert target.generate(**GREEDY | rows, assistant_model=drafter).tolist() == expected.tolist()
        return
    padded = left_padded((9, 3, 14))
    rows = alone(target, padded, **GREEDY)
    ids = target.generate(**padded, **GREEDY, assistant_model=batch_oracle(rows, "sometimes"))
    assert without_padding(ids, padded, rows) == rows


def later_turn(target, inputs):
    texts = []
    for drafted in (False, True):
        cache, text = DynamicCache(config=target.config), inputs
        drafter = oracle(texts[0], "sometimes") if drafted else None
        for turn in (0, 1):
            with warnings.catch_warnings():
                warnings.simplefilter("error", UserWarning)  # such as that the drafter does not know the first turn
                ids = target.generate(**GREEDY | text, cache=cache, assistant_model=drafter)
            if turn == 0:
                ids = torch.cat([ids, prompt_ids(length=4, seed=3)], dim=1)
                text = {"input_ids": ids}
        texts.append(ids[0].tolist())
    assert texts[0] == texts[1]


def embedded_prompt(target, inputs):
    embeds = target.get_input_embeddings()(inputs["input_ids"]).detach()
    same_text(target, {"inputs_embeds": embeds}, before=embeds.shape[1])


def prompt_in_chunks(target, inputs):
    same_text(target, inputs, prefill_chunk_size=5)


def processors(target, inputs):
    same_text(target, inputs, repetition_penalty=1.4, no_repeat_ngram_size=2, min_new_tokens=6, eos_token_id=[13, 21])


def scores(target, inputs):
    wants = {"return_dict_in_generate": True, "output_scores": True}
    target = copy.deepcopy(target).double()
    target.set_experts_implementation("eager")  # grouped_mm takes no float64
    expected = plainly(target, **inputs, **wants)
    drafter = oracle(expected.sequences[0].tolist(), "sometimes")
    out = target.generate(**GREEDY | inputs | wants, assistant_model=drafter)
    # Recurrent layers go through float32 all the same, and sum in another order over a block.
    within = 1e-3 if target._is_stateful else 1e-5
    torch.testing.assert_close(torch.stack(out.scores), torch.stack(expected.scores), atol=within, rtol=within)


def static_cache(target, inputs):
    same_text(target, inputs, cache_implementation="static")


FEATURES = {
    "greedy": greedy,
    "sampling": sampling,
    "several rows": several_rows,
    "later turn": later_turn,
    "embedded prompt": embedded_prompt,
    "prompt in chunks": prompt_in_chunks,
    "processors": processors,
    "scores": scores,
    "static cache": static_cache,
}


@functools.cache
def target_of(family):
    return hybrid(family) if family in HYBRIDS else make_target(family)


def cell(family: str, feature: str) -> str:
    """yes: as without a drafter; no: refused with a message; -: plain generate() refuses. Another text is an error."""
    target = target_of(family)
    inputs = vlm_inputs(target) if family in VLM_FAMILIES else {"input_ids": prompt_ids(length=9)}
    try:
        FEATURES[feature](target, inputs)
    except CannotPlainly:
        return "-"
    except ValueError as error:
        assert re.search("DFlash drafter|rejected drafts", str(error)), error  # ours
        return "no"
    return "yes"


def table(cells: dict[str, list[str]]) -> str:
    lines = [["family", *FEATURES], ["---"] * (1 + len(FEATURES))]
    lines += [[f"`{family}`", *row] for family, row in cells.items()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def written() -> dict[str, list[str]]:
    text = PAGE.read_text()
    assert all(text.count(mark) == 1 for mark in MARKS)
    lines = text.split(MARKS[0])[1].split(MARKS[1])[0].strip().splitlines()
    rows = [[entry.strip() for entry in line.strip("|").split("|")] for line in lines]
    assert rows[0][1:] == list(FEATURES), "run python tests/test_compatibility.py"
    return {re.fullmatch("`(.*)`", name)[1]: cells for name, *cells in rows[2:]}


def test_the_table_has_the_families_of_the_tests():
    assert list(written()) == [*FAMILIES, *HYBRIDS], "run python tests/test_compatibility.py"


@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS])
def test_what_the_table_says_of(family):
    found = [cell(family, feature) for feature in FEATURES]
    assert found == written()[family], "run python tests/test_compatibility.py"
    assert found[0] == "yes"


if __name__ == "__main__":
    torch.set_num_threads(1)
    new = table({family: [cell(family, feature) for feature in FEATURES] for family in [*FAMILIES, *HYBRIDS]})
    before, _, rest = PAGE.read_text().partition(MARKS[0])
    new_page = PAGE.with_suffix(".md.new")
    new_page.write_text(before + MARKS[0] + new + MARKS[1] + rest.partition(MARKS[1])[2])
    new_page.replace(PAGE)
    sys.stdout.write(new)
