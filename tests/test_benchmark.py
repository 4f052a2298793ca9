"""The benchmark's figures against counts made without it."""

import copy
import gzip
import hashlib
import itertools
import json
import lzma
import math
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from scipy.stats import binom
from transformers.generation.streamers import BaseStreamer

import simulated_acceptance
from dflash_hf.benchmark import Prompt, Sampling, bench, read_prompts, runner
from dflash_hf.benchmark.efficiency import _kernels, cycle_efficiency, with_kernels
from dflash_hf.benchmark.probe import peak_memory
from dflash_hf.benchmark.prompts import encode, fill_contexts, make_batches
from dflash_hf.benchmark.runner import top2_gap
from dflash_hf.benchmark.simulation import _rows_in_batch, simulated_drafter
from dflash_hf.benchmark.statistics import acceptance_for_tau, expected_tau, ratio_of_medians
from dflash_hf.checkpoints import convert
from dflash_hf.training.answers import read_prompts as read_conversations
from drafters import BLOCK, make_drafter, oracle
from targets import PAD, VOCAB, make_target, prompt_ids

NEW, LENGTH = 24, 9


def prompts(count=3, length=LENGTH):
    return [
        Prompt(f"p{i}", ids=prompt_ids(length=length + i, seed=i)[0].tolist(), category="ab"[i % 2])
        for i in range(count)
    ]


def greedy(target, ids, **kwargs):
    return target.generate(torch.tensor([ids]), do_sample=False, **kwargs)[0].tolist()


def counting_target(vocab=32):
    """Its greedy text counts up, modulo the vocabulary."""
    sizes = {"vocab_size": vocab, "hidden_size": 32, "intermediate_size": 48, "head_dim": 16}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return simulated_acceptance.random_target(5, "cpu", torch.float32, **sizes)


# -- cycles --


@pytest.mark.parametrize(
    ("method", "hit"),
    [("constant", "always"), ("constant", "sometimes"), ("constant", "never"), ("transformers", "sometimes")],
)
def test_tau_and_acceptance_by_hand(method, hit):
    target, prompt = make_target("llama"), prompts(1)[0]
    drafter = oracle(greedy(target, prompt.ids, max_new_tokens=NEW), hit)
    report = bench(target, drafter, [prompt], methods=[method], max_new_tokens=NEW, repeats=2)
    # A cycle takes drafts up to the first miss, and one token more.
    position, cycles = LENGTH + 1, 0
    accepted, offered = [0] * (BLOCK - 1), [0] * (BLOCK - 1)
    while position < LENGTH + NEW:
        room, hits = min(BLOCK - 1, LENGTH + NEW - position - 1), 0
        while hits < room and drafter.hit(position + hits):
            hits += 1
        for slot in range(room):
            offered[slot] += 1
            accepted[slot] += slot < hits
        position, cycles = position + hits + 1, cycles + 1
    figures = report.summary()[method]
    assert figures["runs"] == 2
    assert figures["tau"] == pytest.approx((NEW - 1) / cycles)
    assert figures["offered_by_position"] == [2 * o for o in offered]
    assert figures["acceptance_by_position"] == pytest.approx([a / o for a, o in zip(accepted, offered, strict=True)])
    assert figures["texts"] == {"compared": 2, "equal": 2, "near_ties": 0, "real": 0}


class Chunks(BaseStreamer):
    """How many tokens each put brought, the prompt's own left out."""

    def __init__(self):
        self.sizes = []

    def put(self, value):
        self.sizes.append(value.numel())

    def end(self):
        pass


@pytest.mark.parametrize("name", ["native", "prompt-lookup"])
def test_cycles_seen_from_outside_are_what_transformers_streams(name):
    # In a text that repeats itself, prompt lookup drafts before the first pass already.
    target = counting_target() if name == "prompt-lookup" else make_target("llama")
    ids = [*range(32), 0, 1, 2] if name == "prompt-lookup" else prompts(1)[0].ids
    drafter = make_drafter(vocab_size=target.config.vocab_size)
    by = {"assistant_model": drafter, "speculation_type": "dflash"} if name == "native" else {}
    by = by or {"prompt_lookup_num_tokens": 10}
    chunks = Chunks()
    greedy(target, ids, max_new_tokens=NEW, streamer=chunks, **by)
    _, first, *committed = chunks.sizes
    report = bench(target, drafter, [Prompt("p", ids=ids)], methods=[name], max_new_tokens=NEW)
    figures, run = report.summary()[name], report.runs[-1]
    assert run["cycles"] == len(committed) and run["committed"] == sum(committed) == NEW - first
    assert figures["tau"] == pytest.approx(sum(committed) / len(committed))
    counts = Counter(itertools.chain.from_iterable(range(c - 1) for c in committed))
    assert run["accepted"] == [counts[slot] for slot in range(len(run["accepted"]))]
    if name == "prompt-lookup":
        assert first > 1 and figures["tau"] > 5


def test_cycles_of_pypi_dflash_are_its_own_statistics(monkeypatch):
    model = pytest.importorskip("dflash.model", reason="needs PyPI dflash 0.1.0 (pip install --no-deps)")
    from transformers import Qwen3Config

    monkeypatch.setattr(model, "_cuda_time", lambda: 0.0)  # it would synchronise with a GPU
    target, drafter, prompt = make_target("qwen3"), make_drafter(), prompts(1)[0]
    raw = {key: value for key, value in drafter.config.to_dict().items() if key != "auto_map"}
    peer = model.DFlashDraftModel(Qwen3Config.from_dict(raw)).eval()
    peer.load_state_dict(drafter.state_dict())
    stats = model.dflash_generate(peer, target, torch.tensor([prompt.ids]), NEW, None, return_stats=True)
    weights = copy.deepcopy(drafter.state_dict())
    report = bench(target, drafter, [prompt], methods=["pypi"], max_new_tokens=NEW)
    run = report.runs[-1]
    assert (run["cycles"], run["committed"]) == (len(stats.acceptance_lengths), sum(stats.acceptance_lengths))
    assert run["accepted"][0] == sum(length > 1 for length in stats.acceptance_lengths)
    assert run["ids_equal"] == [True] and run["drafting_s"] > 0
    assert all(torch.equal(weights[name], tensor) for name, tensor in drafter.state_dict().items())


def test_every_method_runs_and_its_figures_are_whole():
    target, drafter = make_target("qwen3"), make_drafter()
    drafter.generation_config.num_assistant_tokens = 2
    before = drafter.generation_config.to_dict()
    assistant = make_target("qwen3", seed=1, num_hidden_layers=2)
    report = bench(target, drafter, prompts(2), assistant=assistant, max_new_tokens=8, repeats=2, block_lengths=[1, 3])
    assert drafter.generation_config.to_dict() == before and not report.refused
    names = {"plain", "prompt-lookup", "assistant", "native", "transformers", "constant k=1", "constant k=3"}
    assert names | {"adaptive"} <= set(report.settings["methods"])
    counts = Counter((run["method"], run["batch"], run["repeat"]) for run in report.runs)
    assert set(counts.values()) == {1} and len(counts) == 4 * len(report.settings["methods"])
    for name, figures in report.summary().items():
        shares = figures["shares"]
        assert sum(shares.values()) == pytest.approx(1) and min(shares.values()) > -1e-6
        assert (shares["drafting"] > 0) == (name not in ("plain", "prompt-lookup"))
        assert figures["memory"]["peak_mib"] > 0
        if name != "plain":
            assert figures["texts"]["equal"] == figures["texts"]["compared"] == 4
    assert {len(figures["acceptance_by_position"]) for name, figures in report.summary().items() if "k=" in name} == {
        1,
        3,
    }
    order = [run["method"] for run in report.runs if run["batch"] == 0 and run["repeat"] == 0]
    later = [run["method"] for run in report.runs if run["batch"] == 1 and run["repeat"] == 0]
    assert order != later and order[0] == later[0] == "plain"


def test_our_own_loop_runs_without_hooks_on_the_head_and_brings_its_own_times():
    target, drafter, seen = make_target("llama"), make_drafter(), []

    class Looking(type(drafter)):
        def decode(self, target, *args, **kwargs):
            head = target.get_output_embeddings()
            seen.append(bool(head._forward_hooks or head._forward_pre_hooks))
            return super().decode(target, *args, **kwargs)

    drafter.__class__ = Looking
    run = bench(target, drafter, prompts(1), methods=["native", "constant"], max_new_tokens=8).runs[-1]
    assert run["method"] == "constant" and seen == [False] * 3
    last = drafter.last_run
    assert (run["drafting_s"], run["verifying_s"]) == (last.drafting_s, last.verifying_s)


def test_sampling_is_the_same_draw_run_after_run_and_is_not_compared():
    target, drafter = make_target("llama"), make_drafter()
    sampling = Sampling(do_sample=True, temperature=0.8, top_k=20, top_p=0.95)
    methods = ["native", "constant", "coupled", "adaptive"]
    settings = {"methods": methods, "max_new_tokens": 16, "sampling": sampling, "seed": 3}
    runs = [bench(target, drafter, prompts(1), **settings).runs for _ in range(2)]
    # Adaptive lengths differ from run to run, what is sampled does not.
    drawn = [[run["new_tokens" if run["method"] == "adaptive" else "accepted"] for run in each] for each in runs]
    assert drawn[0] == drawn[1] and len(drawn[0]) == 1 + len(methods)
    assert not any("ids_equal" in run for run in runs[0])


def test_every_method_is_warmed_up_and_measured_for_memory_before_it_counts(monkeypatch):
    calls, right = [], runner._call

    def counting(target, method, *args):
        calls.append((method.name, args[3]))
        return right(target, method, *args)

    monkeypatch.setattr(runner, "_call", counting)
    bench(make_target("llama"), make_drafter(), prompts(1), methods=["constant"], max_new_tokens=NEW)
    each = [runner.WARM_UP_TOKENS, NEW]
    assert calls == [(name, new) for name in ("plain", "constant") for new in each] + [
        ("plain", NEW),
        ("constant", NEW),
    ]


def test_shares_that_were_not_measured_are_left_out(tmp_path, capsys):
    """As of our own loop on an accelerator, whose clock is the host's."""
    report = bench(make_target("llama"), make_drafter(), prompts(1), methods=["native", "constant"], max_new_tokens=8)
    for run in report.runs:
        if run["method"] == "constant":
            run |= {"drafting_s": None, "verifying_s": None}
    shares = {name: row["shares"] for name, row in report.summary().items()}
    assert shares["constant"].pop("prefill") > 0 and set(shares["constant"].values()) == {None}
    assert sum(shares["native"].values()) == pytest.approx(1)
    report.print()
    (row,) = (line for line in capsys.readouterr().out.splitlines() if "│ constant" in line)
    assert len(re.findall(r"\d+/\d+", row)) == 1  # same ids
    report.save(tmp_path / "bench.json")
    pytest.importorskip("matplotlib")
    from dflash_hf.benchmark.plots import draw

    assert {path.name for path in draw(report, tmp_path)} >= {"bench-time.png"}


# -- same ids --


def test_a_loop_that_changes_the_text_is_reported_as_real():
    target, drafter = make_target("llama"), make_drafter()

    class Lossy(type(drafter)):
        def decode(self, *args, **kwargs):
            ids = super().decode(*args, **kwargs)
            ids[:, -3] = (ids[:, -3] + 1) % VOCAB
            return ids

    drafter.__class__ = Lossy
    report = bench(target, drafter, prompts(2), methods=["constant"], max_new_tokens=NEW)
    assert report.summary()["constant"]["texts"] == {"compared": 2, "equal": 0, "near_ties": 0, "real": 2}
    difference = report.runs[-1]["differences"][0]
    assert difference["position"] == difference["prompt_tokens"] + NEW - 3


def test_top2_gap_tells_ties_from_differences():
    target, prompt = make_target("llama"), prompts(1)[0]
    plain = greedy(target, prompt.ids, max_new_tokens=6)
    at, token = LENGTH + 3, plain[LENGTH + 3]
    other = [*plain[:at], (token + 1) % VOCAB, *plain[at + 1 :]]
    with torch.no_grad():
        logits = target(torch.tensor([plain[:at]])).logits[0, -1]
    best = logits.topk(2)
    found = top2_gap(target, plain, other, BLOCK)
    assert (found["position"], found["plain"], found["other"]) == (at, token, (token + 1) % VOCAB)
    assert found["top2_gap"] == pytest.approx(float(best.values[0] - best.values[1]), abs=1e-4)
    assert found["rounding"] < 1e-3 and not found["near_tie"]
    with torch.no_grad():  # the runner-up's row of the head becomes the winner's
        head, second = target.get_output_embeddings().weight, int(best.indices[1])
        head[second] = head[token]
    assert top2_gap(target, plain, [*plain[:at], second], BLOCK)["near_tie"]
    assert not top2_gap(target, plain, [*plain[:at], (second + 1) % VOCAB], BLOCK)["near_tie"]
    assert top2_gap(target, plain, plain[:at], BLOCK)["other"] is None


# -- statistics --


def test_bootstrap_interval_against_the_exact_distribution_of_a_resampled_median():
    # Of n = 2m + 1 values, the median of a resample is at most the k-th with the probability that more than m of n
    # draws are among the first k: binomial (Efron 1979).
    n = 21
    values = [float(v) ** 1.5 for v in range(1, n + 1)]
    cumulative = [float(binom.sf(n // 2, n, k / n)) for k in range(n + 1)]
    ratio, low, high = ratio_of_medians([[v] for v in values], [[2.0]] * n, resamples=20_000)
    assert ratio == values[n // 2] / 2
    for bound, level in ((low, 0.025), (high, 0.975)):
        k = next(k for k in range(n + 1) if cumulative[k] >= level)
        assert bound == values[k - 1] / 2


def test_the_interval_is_paired_and_counts_repeats_of_a_prompt_together():
    slow_and_fast = [[1.0, 1.0], [100.0, 100.0], [10.0, 10.0]]
    assert ratio_of_medians([[2 * v for v in row] for row in slow_and_fast], slow_and_fast) == (2.0, 2.0, 2.0)
    # Thirty repeats of two prompts are two prompts, not sixty values.
    wide = ratio_of_medians([[1.0] * 30, [3.0] * 30], [[1.0] * 30] * 2)
    assert wide == (2.0, 1.0, 3.0)
    assert ratio_of_medians([[1.0, 2.0], [1.5]], [[1.0, 1.0], [1.0]])[0] == 1.5
    assert ratio_of_medians([], []) is None


def test_expected_tau_by_enumeration():
    for acceptance, drafts in itertools.product((0.0, 0.3, 0.9, 1.0), (1, 3, 7)):
        mean = 0.0
        for slots in itertools.product((True, False), repeat=drafts):
            hits = next((i for i, slot in enumerate(slots) if not slot), drafts)
            mean += (hits + 1) * math.prod(acceptance if slot else 1 - acceptance for slot in slots)
        assert expected_tau(acceptance, drafts) == pytest.approx(mean)
        assert acceptance_for_tau(mean, drafts) == pytest.approx(acceptance, abs=1e-9)


# -- simulated acceptance --


def test_simulated_taus_are_reached():
    target, drafter, count, new, taus = make_target("llama"), make_drafter(), 2, 40, [1.5, 4]
    methods = ["constant", "transformers"]
    report = bench(target, drafter, prompts(count), methods=methods, max_new_tokens=new, simulated_taus=taus)
    assert report.settings["methods"][0] == "plain" and len(report.settings["methods"]) == 5
    for tau in taus:
        figures, other = (report.summary()[f"{name} tau={tau:g}"] for name in methods)
        assert figures["texts"]["equal"] == count
        # The last cycle of a text is cut, so a text has up to one cycle more than its tokens would give.
        acceptance, cycles = acceptance_for_tau(tau, BLOCK - 1), count * (new - 1) / tau
        second_moment = sum((2 * k + 1) * acceptance**k for k in range(BLOCK))  # of 1 + hits
        bound = 4 * math.sqrt(max(second_moment - tau**2, 0) / cycles) + tau * count / cycles
        assert abs(figures["tau"] - tau) <= bound
        assert figures["acceptance_by_position"] == other["acceptance_by_position"]  # the same luck


def test_simulated_luck_is_the_same_in_a_batch():
    target, drafter = make_target("llama"), make_drafter()
    settings = {"methods": ["constant"], "max_new_tokens": 16, "simulated_taus": [2.5]}
    chosen = [Prompt(prompt.id, ids=prompt.ids) for prompt in prompts(4)]  # of one category: batches of 3 and 1
    alone, together = (
        bench(target, drafter, chosen, batch_size=size, **settings).summary()["constant tau=2.5"] for size in (1, 3)
    )
    for figure in ("tau", "offered_by_position", "acceptance_by_position", "texts"):
        assert alone[figure] == together[figure]


def test_the_example_gives_a_row_for_each_batch_size_and_method(monkeypatch, capsys, tmp_path):
    out = tmp_path / "out.json"
    monkeypatch.setattr(simulated_acceptance, "load", lambda name: (make_target("llama"), make_drafter(), None))
    options = ["--taus", "1", "4", "--batch-sizes", "1", "2", "--limit", "2", "--max-new-tokens", "8"]
    options += ["--block-lengths", "1", str(BLOCK - 1)]
    monkeypatch.setattr(sys, "argv", ["simulated_acceptance.py", "smollm2", *options, "--out", str(out)])
    simulated_acceptance.main()
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[:2] for row in rows[1:]] == [
        [f"| {size}", method] for size in (1, 2) for method in ("constant k=1", "constant k=3", "adaptive")
    ]
    # 7 tokens after the first: seven cycles of one, or cycles of 4 and 3, or of 2, 2, 2 and 1.
    assert all("(1.00)" in row and "(3.50)" in row for row in rows[1:] if "k=3" in row)
    assert all("(1.00)" in row and "(1.75)" in row for row in rows[1:] if "k=1" in row)
    assert set(json.loads(out.read_text())) == {"1", "2"}


def test_a_simulated_drafter_shares_weights_and_shows_calibrated_confidence():
    target, drafter = make_target("llama"), make_drafter()
    text = greedy(target, prompts(1)[0].ids, max_new_tokens=NEW)
    simulated = simulated_drafter(drafter, 2.5)
    simulated.set_texts([0], [text])
    assert simulated.fc.weight is drafter.fc.weight
    acceptance, seen = acceptance_for_tau(2.5, BLOCK - 1), []
    compute = simulated.compute_logits
    simulated.compute_logits = lambda *args: seen.append(compute(*args)) or seen[-1]
    ids = torch.tensor([text[:LENGTH]])
    target.generate(ids, do_sample=False, max_new_tokens=NEW, assistant_model=simulated)
    tops = torch.cat([logits[0].float().softmax(-1).amax(-1) for logits in seen])
    torch.testing.assert_close(tops, torch.full_like(tops, acceptance))
    simulated.generation_config.num_assistant_tokens = 1
    assert drafter.generation_config.num_assistant_tokens is None


def test_rows_that_left_a_batch_are_told_from_their_anchors():
    texts = [[5, 6, 7, 8], [1, 6, 2, 8], [5, 3, 7, 4], [5, 6, 7, 9]]
    assert _rows_in_batch(texts, [1, 1, 1, 1], [6, 6, 3, 6]) == [0, 1, 2, 3]
    assert _rows_in_batch(texts, [2, 3], [2, 9]) == [1, 3]
    assert _rows_in_batch(texts, [1, 3], [3, 9]) == [2, 3]
    assert _rows_in_batch(texts, [0, 3, 3], [5, 8, 4]) == [0, 1, 2]


# -- batches, prompts, contexts --


def test_a_batch_counts_each_row_up_to_its_own_end_and_others_refuse_it():
    target, drafter, chosen = make_target("llama"), make_drafter(), prompts(5)
    alone = [greedy(target, prompt.ids, max_new_tokens=12) for prompt in chosen]
    ends = alone[2][len(chosen[2].ids) + 4]
    target.generation_config.eos_token_id = ends
    expected = [greedy(target, prompt.ids, max_new_tokens=12, pad_token_id=PAD) for prompt in chosen]
    methods = ["native", "prompt-lookup", "constant", "adaptive"]
    report = bench(target, drafter, chosen, methods=methods, max_new_tokens=12, batch_size=2)
    assert set(report.refused) == {"native", "prompt-lookup"} and "batch_size = 1" in report.refused["native"]
    assert all(run["ids_equal"] == [True] * len(run["prompts"]) for run in report.runs if run["method"] != "plain")
    runs = {tuple(run["prompts"]): run for run in report.runs if run["method"] == "constant"}
    assert set(runs) == {("p0", "p2"), ("p4",), ("p1", "p3")}  # of one category each
    for names, run in runs.items():
        lengths = [len(expected[int(name[1])]) - len(chosen[int(name[1])].ids) for name in names]
        assert run["new_tokens"] == lengths
        assert run["tokens_per_s"] == pytest.approx(sum(lengths) / run["seconds"])
    assert min(min(run["new_tokens"]) for run in runs.values()) <= 5
    assert set(report.to_dict()["by_category"]) == {"a", "b"}


def test_contexts_fill_prompts_with_the_others(byte_tokenizer):
    texts = ["ABCDE", "FGHIJKLM", "NOP"]
    filled = fill_contexts([Prompt(t, t) for t in texts], [6, 20], byte_tokenizer)
    assert [(p.id, p.context) for p in filled] == [(t, c) for c in (6, 20) for t in texts]
    by_ids = fill_contexts(prompts(2), [30], None)
    assert [len(p.ids) for p in by_ids] == [30, 30] and by_ids[0].ids[-LENGTH:] == prompts(2)[0].ids
    for prompt in filled:
        length = len(byte_tokenizer(prompt.text)["input_ids"])
        assert prompt.text.endswith(prompt.id) and abs(length - max(prompt.context, len(prompt.id))) <= 6
    batches = make_batches(filled, byte_tokenizer, 3, PAD, "cpu")
    assert [len({p.context for p in batch.prompts}) for batch in batches] == [1, 1]
    for batch in batches:
        for row, ids, mask in zip(batch.rows, batch.input_ids.tolist(), batch.attention_mask.tolist(), strict=True):
            assert ids[-len(row) :] == row and sum(mask) == len(row) and mask[-len(row) :] == [1] * len(row)


def test_prompts_are_read_filtered_and_hashed(tmp_path):
    file = tmp_path / "prompts.jsonl"
    records = [{"id": i, "category": "xy"[i % 2], "turns": [f"first {i}", "second"]} for i in range(6)]
    records.append({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "hello"}]})
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    chosen, sha256 = read_prompts(file)
    assert [prompt.text for prompt in chosen] == [f"first {i}" for i in range(6)] + ["hello"]
    assert sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    assert [p.id for p in read_prompts(file, per_category=2)[0]] == ["0", "1", "2", "3", "7"]
    assert [p.id for p in read_prompts(file, categories=["y"], limit=2)[0]] == ["1", "3"]
    with pytest.raises(ValueError, match="no category z; it has all, x, y"):
        read_prompts(file, categories=["z"])
    for line, message in (
        ("{", ":8: not JSON"),
        ('{"text": 1}', ":8: expected `turns`"),
        ("[1]", ":8: expected a JSON"),
    ):
        file.write_text("".join(json.dumps(record) + "\n" for record in records) + line)
        with pytest.raises(ValueError, match=message):
            read_prompts(file)
    with pytest.raises(FileNotFoundError, match="no file"):
        read_prompts(tmp_path / "absent.jsonl")


def test_prompts_are_those_that_answers_are_made_of(tmp_path, byte_tokenizer):
    """One reader for both: system messages, any separator in a text, compressed files; here an id may come twice."""
    records = [
        {"id": "a", "turns": ["one\u2028line", "two"]},
        {"id": "b", "messages": [{"role": "system", "content": "MNO"}, {"role": "user", "content": "ABC"}]},
    ]
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
    for suffix, write in (("", bytes), (".gz", gzip.compress), (".xz", lzma.compress)):
        file = tmp_path / f"prompts.jsonl{suffix}"
        file.write_bytes(write(text))
        chosen, sha256 = read_prompts(file)
        assert sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
        for prompt, expected in zip(chosen, read_conversations(file), strict=True):
            system = [] if prompt.system is None else [{"role": "system", "content": prompt.system}]
            first_turn = expected.messages[: len(system) + 1]
            assert [*system, {"role": "user", "content": prompt.text}] == first_turn and prompt.id == expected.id
    (tmp_path / "twice.jsonl").write_bytes(text + text)
    assert [prompt.id for prompt in read_prompts(tmp_path / "twice.jsonl")[0]] == ["a", "b"] * 2
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert tokenizer.decode(encode(chosen[1], tokenizer)) == "MNOABC"
    (longer,) = fill_contexts(chosen[1:], [30], tokenizer)
    assert tokenizer.decode(encode(longer, tokenizer)).startswith("MNO") and longer.text.endswith("ABC")


# -- interruption, bad input --


def test_ctrl_c_keeps_what_was_measured(tmp_path):
    target, drafter, out = make_target("llama"), make_drafter(), tmp_path / "bench.json"
    calls = itertools.count()

    class Interrupting(type(drafter)):
        def forward(self, *args, **kwargs):
            if next(calls) == 60:
                raise KeyboardInterrupt
            return super().forward(*args, **kwargs)

    drafter.__class__ = Interrupting
    report = bench(target, drafter, prompts(12), methods=["constant", "transformers"], max_new_tokens=8, out=out)
    assert report.interrupted
    whole = Counter(run["method"] for run in report.runs)
    assert 0 < whole["constant"] < 12 and whole["plain"] >= max(whole["constant"], whole["transformers"])
    assert all(run["new_tokens"] == [8] for run in report.runs)
    saved = json.loads(out.read_text())
    assert saved["interrupted"] and saved["runs"] == report.to_dict()["runs"]
    assert saved["summary"]["constant"]["ratio"]["low"] > 0
    assert not list(tmp_path.glob("*.part")) and not target._forward_hooks and not target._forward_pre_hooks


def test_a_report_that_cannot_be_written_leaves_the_older_one(tmp_path, monkeypatch):
    out = tmp_path / "bench.json"
    report = bench(make_target("llama"), make_drafter(), prompts(1), methods=["plain"], max_new_tokens=4, out=out)
    before = out.read_text()
    monkeypatch.setattr(type(out), "write_text", lambda *args, **kwargs: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        report.save(out)
    assert out.read_text() == before


BAD = [
    ({"methods": ["plain", "magic"]}, "no method magic; expected some of plain"),
    ({"methods": ["assistant"]}, "pass `assistant`"),
    ({"block_lengths": [0]}, "between 1 and 3"),
    ({"block_lengths": [4]}, "between 1 and 3"),
    ({"simulated_taus": [0.9]}, "between 1 and 4"),
    ({"simulated_taus": [4.1]}, "between 1 and 4"),
    ({"simulated_taus": [2], "sampling": Sampling(do_sample=True)}, "leave out sampling"),
    ({"batch_size": 0}, "batch_size must be at least 1"),
    ({"repeats": 0}, "repeats must be at least 1"),
    ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
    ({"prompts": []}, "at least one prompt"),
    ({"prompts": [Prompt("p", "text")]}, "pass the target's tokenizer"),
]


@pytest.mark.parametrize(("settings", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_settings_are_refused_before_anything_runs(settings, message):
    target, drafter = make_target("llama"), make_drafter()
    target.register_forward_pre_hook(lambda *_: pytest.fail("ran"))
    with pytest.raises(ValueError, match=message):
        bench(target, drafter, settings.pop("prompts", prompts(1)), **settings)


def test_bad_sampling_and_a_missing_folder(tmp_path):
    for settings in ({"temperature": 0}, {"top_p": 0}, {"top_p": 1.1}, {"top_k": -1}):
        with pytest.raises(ValueError, match="Expected a finite temperature > 0"):
            Sampling(do_sample=True, **settings)
    with pytest.raises(FileNotFoundError, match="no folder"):
        bench(make_target("llama"), make_drafter(), prompts(1), out=tmp_path / "absent" / "bench.json")


# -- memory and efficiency --


def test_peak_memory_sees_what_came_and_went():
    with peak_memory(torch.device("cpu")) as memory:
        block = torch.ones(96 * 2**20, dtype=torch.uint8)
        del block
    if memory.peak is None:
        pytest.skip("memory cannot be measured on this platform")
    assert 90 < memory.peak - memory.start < 130


@pytest.mark.parametrize("rows", [1, 8, 20])
def test_kernels_compute_the_same(rows):
    linear, x = torch.nn.Linear(48, 80), torch.randn(2, rows, 48)
    for bias in (linear.bias, None):
        expected = torch.nn.functional.linear(x, linear.weight, bias)
        for name, make in _kernels(linear.weight.detach()).items():
            with torch.no_grad():
                got = make(linear.weight.detach(), bias, 2 * rows)(x)
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4, msg=name)


def test_cycle_efficiency_is_the_bare_passes_over_the_cycle_and_leaves_the_models_alone():
    target, drafter, ids = make_target("gemma3"), make_drafter(), torch.tensor([prompts(1)[0].ids])
    with torch.no_grad():
        before = target(ids).logits
    hidden = len(make_target("gemma3")(ids, output_hidden_states=True).hidden_states)
    settings = {"batch_size": 2, "context": 30, "committed": 2, "rounds": 1, "passes": 3}
    found = cycle_efficiency(target, drafter, lambda: 2.0, **settings)
    assert found["efficiency"] == found["best_kernels"]["efficiency"]
    for version in ("as_it_is", "without_target_copies", "best_kernels"):
        of_version = found[version]
        assert of_version["target_s"] > 0 and of_version["drafter_s"] > 0
        seconds = of_version["target_s"] + of_version["drafter_s"]
        assert of_version["efficiency"] == pytest.approx(seconds / found["cycle_s"])
    assert found["as_it_is"]["kernels"] == {}
    kernels = found["without_target_copies"]["kernels"]
    packed = {shape for shape, name in kernels.items() if shape.startswith("target") and name in ("mkl", "onednn")}
    vocab = target.get_output_embeddings().weight.shape[0]
    assert packed <= {f"target {vocab} x {target.config.hidden_size}"}
    with torch.no_grad():
        assert torch.equal(target(ids).logits, before)
        assert len(target(ids, output_hidden_states=True).hidden_states) == hidden
        twin, kernels = with_kernels(target, ids.shape[1], copies=True)
        torch.testing.assert_close(twin(ids).logits, before, atol=1e-3, rtol=1e-3)
    assert kernels
    assert not any("forward" in vars(module) for model in (target, drafter) for module in model.modules())
    for cycle, settings, message in ((lambda: 0.0, {}, "positive"), (lambda: 1.0, {"context": 2}, "0 < committed")):
        with pytest.raises(ValueError, match=message):
            cycle_efficiency(target, drafter, cycle, **settings)


def test_bench_measures_the_efficiency_of_full_blocks(capsys):
    report = bench(
        make_target("llama"), make_drafter(), prompts(1), methods=["constant"], max_new_tokens=12, efficiency=True
    )
    found = report.cycle_efficiency
    assert found["method"] == "constant" and found["cycle_s"] > 0 and found["efficiency"] > 0
    report.print()
    shown = " ".join(capsys.readouterr().out.split())
    assert f"{found['without_target_copies']['efficiency']:.3f} with the fastest kernels that need no copy" in shown


# -- the command --


@pytest.fixture
def folders(tmp_path, byte_tokenizer):
    target = make_target("qwen3")
    target.save_pretrained(tmp_path / "target")
    byte_tokenizer.save_pretrained(tmp_path / "target")
    make_drafter().save_pretrained(tmp_path / "drafter")
    lines = [{"id": f"q{i}", "category": "xy"[i % 2], "turns": ["ABCDEFGH"[i:]]} for i in range(4)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def invoke(folder, *options):
    typer_testing = pytest.importorskip("typer.testing")
    from dflash_hf.cli import app

    arguments = ["bench", *(str(folder / name) for name in ("target", "drafter", "prompts.jsonl"))]
    return typer_testing.CliRunner().invoke(
        app, [*arguments, "--out", str(folder / "out.json"), "--device", "cpu", *options]
    )


def test_the_command_writes_json_a_table_and_plots(folders):
    pytest.importorskip("matplotlib")
    result = invoke(folders, "--max-new-tokens", "8", "--plots", str(folders / "plots"), "--repeats", "2",
                    "--block-lengths", "1,3", "--methods", "plain,native,constant", "--categories", "x")  # fmt: skip
    assert result.exit_code == 0, result.output
    for text in ("constant k=1", "constant k=3", "native", "4/4"):
        assert text in result.output
    saved = json.loads((folders / "out.json").read_text())
    assert saved["schema"] == 1 and set(saved["summary"]) == {"plain", "native", "constant k=1", "constant k=3"}
    assert saved["prompts"]["count"] == 2 and len(saved["prompts"]["sha256"]) == 64
    assert saved["environment"]["versions"]["torch"] == torch.__version__
    assert saved["target"]["dtype"] == saved["drafter"]["dtype"] == "float32"
    plots = sorted(folders.glob("plots/*"))
    assert [p.name for p in plots] == ["out-acceptance.png", "out-speedup.png", "out-time.png"]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in plots)


def test_the_command_takes_folders_of_speculators_under_their_own_names(folders, monkeypatch):
    monkeypatch.chdir(folders)
    Path("drafter", "generation_config.json").unlink()  # speculators' layout holds no schedule
    convert("drafter", "s", to="speculators", target="someone/some-target")
    (folders / "drafter").rename(folders / "z")
    (folders / "s").rename(folders / "drafter")
    result = invoke(Path(), "--max-new-tokens", "8", "--methods", "constant", "--limit", "1")
    assert result.exit_code == 0, result.output
    saved = json.loads((folders / "out.json").read_text())
    assert (saved["drafter"]["name"], saved["target"]["name"]) == ("drafter", "target")
    assert saved["prompts"]["count"] == 1 and not saved["refused"]


def test_the_command_says_in_one_line_what_is_wrong(folders):
    for options, message in (
        (["--methods", "magic"], "no method magic"),
        (["--block-lengths", "1,two"], "Expected numbers"),
        (["--categories", "z"], "no category z"),
        (["--sample", "--temperature", "0"], "temperature > 0"),
    ):
        result = invoke(folders, *options)
        assert result.exit_code == 1 and message in result.output, result.output
        assert not (folders / "out.json").exists()
