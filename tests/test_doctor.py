"""The doctor finds mistakes that are planted, on the real pair and on tiny ones, and none where there is none."""

import copy
import json
import os
import random
import warnings
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from dflash_hf import DFlashDraftModel
from dflash_hf.benchmark import Prompt
from dflash_hf.benchmark.prompts import encode
from dflash_hf.checkpoints import convert
from dflash_hf.cli import app
from dflash_hf.doctor import diagnose, find_faults, gather, score
from dflash_hf.doctor.formats import other_formats
from dflash_hf.doctor.mistakes import variant
from dflash_hf.training.answers import Sample
from dflash_hf.training.features import target_features
from dflash_hf.training.trainer import DFlashTrainer, DFlashTrainingArguments, SampleDataset
from drafters import make_drafter
from targets import MASK, NUM_LAYERS, PAD, make_target, prompt_ids
from test_hybrid import HYBRIDS, hybrid

CARD = Path(__file__).resolve().parents[1] / "model_cards" / "SmolLM2-135M-Instruct-DFlash"
QUESTIONS = [
    "A farmer packs 12 eggs in a box. She has 5 full boxes and 7 loose eggs. How many eggs does she have?",
    "Tom buys 3 notebooks for $4 each and a pen for $2. How much does he pay in total?",
    "A train travels 60 miles in one hour. How many miles does it travel in 3 hours and a half?",
    "Anna reads 15 pages a day. How many pages does she read in two weeks?",
    "A baker bakes 8 trays of 24 rolls and sells 150 rolls. How many rolls are left?",
    "Ben has $50. He buys 2 shirts for $12 each. How much money does he have left?",
    "There are 28 children in a class, and a quarter of them wear glasses. How many children do not wear glasses?",
    "A garden has 6 rows of 9 tulips. Rain ruins 11 tulips. How many tulips are left?",
]
# For mistakes that cost little.
MORE_QUESTIONS = [
    "A shop sells apples at 3 for $2. How much do 18 apples cost?",
    "Lena runs 4 kilometres every morning. How many kilometres does she run in 30 days?",
    "A tank holds 240 litres and loses 15 litres an hour. After how many hours is it empty?",
    "Sam has 45 marbles. He gives 9 to each of 3 friends. How many marbles does he keep?",
    "A bus has 40 seats, and 5 of every 8 are taken. How many seats are free?",
    "A book has 320 pages. Ida has read 3 quarters of it. How many pages are left?",
    "Two brothers share $96, and the older one gets twice as much. How much does the younger one get?",
    "A wall needs 1,200 bricks. A mason lays 80 bricks an hour for 6 hours a day. How many days does the wall take?",
]
SLIDING = ["sliding_attention"] * 3
LAYERS = [1, 8, 14, 20, 27]  # of the shipped drafter


def rope(theta: float, **scaling) -> dict:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta} | scaling}


def random_mistake(rng: random.Random, drafter, evidence) -> tuple[str, dict]:
    """One kind of mistake and a random value of it, drawn again until it costs something."""
    config, healthy = drafter.config, score(drafter, evidence).likelihood.mean()
    num_layers, theta = evidence.target.config.num_hidden_layers, config.rope_parameters["rope_theta"]
    sliding = ["sliding_attention"] * config.num_hidden_layers
    while True:
        kind, changes = rng.choice(
            [
                ("feature layers", {"target_layer_ids": rng.sample(range(num_layers), len(config.target_layer_ids))}),
                ("mask token", {"mask_token_id": rng.randrange(config.vocab_size // 4, config.vocab_size)}),
                ("embedding scale", {"input_embedding_scale": 10 ** rng.uniform(-2, 2)}),
                ("RoPE base", rope(theta * 10 ** rng.uniform(-4, 4))),
                ("window", {"layer_types": sliding, "sliding_window": rng.randrange(2, 8), "is_causal": False}),
            ]
        )
        if score(variant(drafter, changes), evidence).likelihood.mean() < healthy - 0.3:
            return kind, changes


# -- the real pair --


class Real:
    """The shipped drafter with its target, and what that target answered to grade-school maths."""

    def __init__(self, target, tokenizer, questions, new_tokens):
        self.target, self.tokenizer = target, tokenizer
        self.drafter = DFlashDraftModel.from_pretrained(CARD, dtype=torch.float32).eval()
        prompts = [encode(Prompt("", question), tokenizer) for question in questions]
        self.evidence = gather(target, prompts, num_drafts=7, max_new_tokens=new_tokens)
        self.healthy = score(self.drafter, self.evidence)

    def faults(self, changes: dict) -> list:
        """Of the drafter with a mistake planted; whatever is found must mend it, in any spelling."""
        planted = variant(self.drafter, changes)
        found = find_faults(planted, self.evidence, tokenizer=self.tokenizer)
        assert found.before.likelihood.mean() < self.healthy.likelihood.mean()
        assert found.after.likelihood.mean() > self.healthy.likelihood.mean() - 0.05
        return found.faults


@pytest.fixture(scope="module")
def few(smollm2):
    return Real(*smollm2, QUESTIONS[:4], 32)


@pytest.fixture(scope="module")
def real(smollm2):
    return Real(*smollm2, QUESTIONS, 48)


@pytest.fixture(scope="module")
def much(smollm2):
    return Real(*smollm2, QUESTIONS + MORE_QUESTIONS, 64)


QUICK = {
    "another RoPE style": ({"is_neox_style": False}, ["RoPE style"]),
    "two at once": ({"input_embedding_scale": 24.0, "mask_token_id": 1000}, ["embedding scale", "mask token"]),
}
PLANTED = {
    "layers one too high": ({"target_layer_ids": [i + 1 for i in LAYERS]}, ["feature layers"]),
    "the last layer one too high": ({"target_layer_ids": [*LAYERS[:4], 28]}, ["feature layers"]),
    "other layers": ({"target_layer_ids": [3, 11, 12, 22, 29]}, ["feature layers"]),
    "another mask token": ({"mask_token_id": 0}, ["mask token"]),
    "embeddings scaled": ({"input_embedding_scale": 24.0}, ["embedding scale"]),
    "causal": ({"is_causal": True}, ["causality"]),
    "a window that is not there": ({"layer_types": SLIDING, "sliding_window": 8}, ["window"]),
    "a larger RoPE base": (rope(1e6), ["RoPE base"]),
    "a smaller RoPE base": (rope(1e4), ["RoPE base"]),
    "a RoPE scaling": (rope(1e5, rope_type="linear", factor=4.0), ["RoPE scaling"]),
    "style and mask token": ({"is_neox_style": False, "mask_token_id": 1000}, ["RoPE style", "mask token"]),
}
# With the real drafter these cost less than eight short answers can tell from chance.
SMALL = {
    "layers one too low": ({"target_layer_ids": [i - 1 for i in LAYERS]}, ["feature layers"]),
    "layers and mask token": (
        {"target_layer_ids": [i - 1 for i in LAYERS], "mask_token_id": 1000},
        ["mask token", "feature layers"],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_a_mistake_planted_on_the_real_drafter_is_named(few, name, all_cores):
    changes, kinds = QUICK[name]
    assert sorted(fault.kind for fault in few.faults(changes)) == sorted(kinds)


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_every_mistake_planted_on_the_real_drafter_is_named_first(real, name, all_cores):
    changes, kinds = PLANTED[name]
    assert sorted(fault.kind for fault in real.faults(changes)) == sorted(kinds)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_a_mistake_that_costs_little_is_named_on_more_answers(much, name, all_cores):
    changes, kinds = SMALL[name]
    assert sorted(fault.kind for fault in much.faults(changes)) == sorted(kinds)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_random_mistakes_on_the_real_drafter_are_named_first(real, seed, all_cores):
    kind, changes = random_mistake(random.Random(seed), real.drafter, real.evidence)
    assert [fault.kind for fault in real.faults(changes)] == [kind], changes


@pytest.mark.slow
def test_another_chat_template_than_in_training_is_named_first(real, all_cores):
    bare = copy.deepcopy(real.tokenizer)
    bare.chat_template = "{% for m in messages %}Question: {{ m.content }}\nAnswer:{% endfor %}"
    prompts = [Prompt(str(n), question) for n, question in enumerate(QUESTIONS)]
    found = diagnose(real.target, real.drafter, prompts, tokenizer=bare, max_new_tokens=32)
    assert found.faults[0].kind == "chat template" and "ChatML" in found.verdict, found.verdict


@pytest.mark.slow
def test_another_model_of_the_same_shape_is_named_first(real, all_cores):
    other = copy.deepcopy(real.target)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for name, weight in other.named_parameters():
            if "mlp" in name:
                weight.data.mul_(1 + 0.4 * torch.randn_like(weight))
    prompts = [Prompt(str(n), question) for n, question in enumerate(QUESTIONS[:4])]
    options = {"tokenizer": real.tokenizer, "max_new_tokens": 32, "other_targets": {"SmolLM2": real.target}}
    found = diagnose(other, real.drafter, prompts, **options)
    assert found.faults[0].kind == "target" and "SmolLM2" in found.verdict, found.verdict


@pytest.mark.slow
def test_the_shipped_pair_has_no_fault(real, all_cores):
    weights = {name: tensor.clone() for name, tensor in real.drafter.state_dict().items()}
    config = copy.deepcopy(real.drafter.config.to_dict())
    found = find_faults(real.drafter, real.evidence, tokenizer=real.tokenizer)
    assert found.faults == [] and found.before.tau > 2
    # Looking changes nothing.
    assert real.drafter.config.to_dict() == config
    assert all(torch.equal(tensor, weights[name]) for name, tensor in real.drafter.state_dict().items())


# -- tiny pairs, trained here --

VARIANTS = {
    "plain": {},
    "sliding": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4, "is_neox_style": False},
}
PROMPTS = [Prompt(str(n), ids=prompt_ids(1, 10, seed=n)[0].tolist(), category="ab"[n % 2]) for n in range(6)]
NEW = 24


@pytest.fixture(scope="module")
def tiny_target():
    return make_target("qwen3")


def learn(drafter, target, prompts, folder, steps: int = 80):
    """Train a drafter on the target's answers to `prompts` until it knows them by heart."""
    samples = []
    for prompt in prompts:
        ids = target.generate(torch.tensor([prompt.ids]), do_sample=False, max_new_tokens=NEW)[0].tolist()
        samples.append(Sample(prompt.id, ids, [(len(prompt.ids), len(ids))]))
    arguments = DFlashTrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        max_steps=steps,
        per_device_train_batch_size=len(samples),
        gradient_accumulation_steps=1,
        num_anchors=16,
        learning_rate=1e-2,
    )
    DFlashTrainer(drafter.train(), target, arguments, SampleDataset(samples)).train()
    drafter.config._attn_implementation = "sdpa"
    return drafter.eval()


@pytest.fixture(scope="module")
def tiny(tiny_target, tmp_path_factory):
    """Drafters that know the target's answers to PROMPTS by heart, one for each of VARIANTS."""
    drafters = {}
    for name, options in VARIANTS.items():
        # The padding token stands in no text, and is among the ids that are tried.
        drafter = make_drafter(initializer_range=0.05, mask_token_id=PAD, **options)
        drafters[name] = learn(drafter, tiny_target, PROMPTS, tmp_path_factory.mktemp(name))
    return drafters


def evidence_of(target):
    return gather(target, [prompt.ids for prompt in PROMPTS], num_drafts=3, max_new_tokens=NEW)


@pytest.mark.parametrize("name", VARIANTS)
def test_healthy_tiny_pairs_have_no_fault(tiny_target, tiny, name):
    found = diagnose(tiny_target, tiny[name], PROMPTS, max_new_tokens=NEW)
    assert found.faults == [] and found.problems == [] and found.exit_code in (0, 7), found.verdict
    assert found.tau > 2 and set(found.tau_by_category) == {"a", "b"}
    assert all(difference["near_tie"] for difference in found.differences)
    json.dumps(found.to_dict())


@pytest.mark.parametrize(
    "changes, kind",
    [
        ({"target_layer_ids": [0, 2, 3]}, "feature layers"),
        ({"mask_token_id": 20}, "mask token"),
        ({"layer_types": ["full_attention"] * 2, "is_causal": None}, "window"),
        ({"is_neox_style": True}, "RoPE style"),
    ],
)
def test_a_mistake_on_a_sliding_drafter_is_named(tiny_target, tiny, changes, kind):
    faults = find_faults(variant(tiny["sliding"], changes), evidence_of(tiny_target)).faults
    assert faults[0].kind == kind


@pytest.mark.parametrize("seed", range(6))
def test_random_mistakes_are_named(tiny_target, tiny, seed):
    rng, evidence = random.Random(seed), evidence_of(tiny_target)
    first, changes = random_mistake(rng, tiny["plain"], evidence)
    kinds = {first}
    if seed % 2:  # and another kind on top
        while len(kinds) < 2:
            kind, more = random_mistake(rng, tiny["plain"], evidence)
            if kind not in kinds:
                kinds.add(kind)
                changes = changes | more
    faults = find_faults(variant(tiny["plain"], changes), evidence).faults
    assert {fault.kind for fault in faults} == kinds, changes


FALSE_ALARM_PAIRS = [(family, seed) for family in ("qwen3", "llama", "gemma3", "gpt2") for seed in range(3)]


@pytest.mark.slow
def test_false_alarms(tmp_path):
    """Healthy pairs on texts of which a drafter knows a third, and untrained ones, with which nothing can be told."""
    prompts = [Prompt(str(n), ids=prompt_ids(1, 10, seed=100 + n)[0].tolist()) for n in range(6)]
    alarms = {"trained": [], "untrained": []}
    for family, seed in FALSE_ALARM_PAIRS:
        target = make_target(family, seed=seed)
        evidence = gather(target, [prompt.ids for prompt in prompts], num_drafts=3, max_new_tokens=NEW)
        for kind in alarms:
            drafter = make_drafter(seed, initializer_range=0.05, mask_token_id=PAD)
            if kind == "trained":
                learn(drafter, target, prompts[:2], tmp_path / f"{family}-{seed}", steps=50)
            found = find_faults(drafter, evidence)
            print(f"{family} {seed} {kind}: tau {found.before.tau:.2f}", *found.faults, flush=True)
            alarms[kind] += [(family, seed, fault.kind, fault.changes) for fault in found.faults]
    print({kind: f"{len(of)} false alarms in {len(FALSE_ALARM_PAIRS)} pairs" for kind, of in alarms.items()})
    assert alarms == {"trained": [], "untrained": []}


def test_a_target_of_the_same_shape_is_told_from_the_right_one(tiny_target, tiny):
    other = make_target("qwen3", seed=1)
    alone = diagnose(other, tiny["plain"], PROMPTS, max_new_tokens=NEW)
    assert alone.faults == [] and alone.exit_code == 6 and "another model" in alone.verdict
    others = {"a wide one": make_target("qwen3", hidden_size=48), "the right one": tiny_target}
    found = diagnose(other, tiny["plain"], PROMPTS, max_new_tokens=NEW, other_targets=others)
    assert any(note.startswith("a wide one was not tried: ") and "width" in note for note in found.notes)
    assert [fault.kind for fault in found.faults] == ["target"] and "the right one" in found.verdict
    assert found.exit_code == 5


@pytest.mark.parametrize("switch, kind", [("enable_thinking", "thinking mode"), ("other", "chat template")])
def test_prompts_written_unlike_in_training_are_noticed(tiny_target, tiny, byte_tokenizer, switch, kind):
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}"
        "{% if " + switch + " is not defined or " + switch + " %}KLMNOP{% endif %}"
    )
    prompts = [Prompt(prompt.id, tokenizer.decode(prompt.ids).replace(" ", "")) for prompt in PROMPTS]
    assert tokenizer(prompts[0].text)["input_ids"] == PROMPTS[0].ids
    found = diagnose(tiny_target, tiny["plain"], prompts, tokenizer=tokenizer, max_new_tokens=NEW)
    assert [fault.kind for fault in found.faults] == [kind] and found.exit_code == 5


def test_another_text_than_the_targets_is_no_rounding(tiny_target, tiny, monkeypatch):
    right = DFlashDraftModel.decode

    def wrong(self, target, input_ids, **kwargs):
        ids = right(self, target, input_ids, **kwargs)
        ids[:, input_ids.shape[1] + 5] = MASK
        return ids

    monkeypatch.setattr(DFlashDraftModel, "decode", wrong)
    found = diagnose(tiny_target, tiny["plain"], PROMPTS[:2], max_new_tokens=NEW)
    assert found.exit_code == 4 and "Wrong text" in found.verdict
    assert all(difference["position"] == 15 and not difference["near_tie"] for difference in found.differences)


# -- the parts --

READINGS = {
    "bidirectional": {},
    "causal": {"is_causal": True},
    "sliding": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4},
    "scaled": {"input_embedding_scale": 3.0},
    "rope": {"is_neox_style": False, "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
    "layers": {"target_layer_ids": [0, 2, NUM_LAYERS - 1]},
    "mask": {"mask_token_id": 30},
}


@pytest.mark.parametrize("name", READINGS)
def test_scores_are_those_of_single_passes_of_a_drafter_made_with_that_config(tiny_target, name):
    drafter, changes = make_drafter(), READINGS[name]
    nested = {key: value for key, value in changes.items() if key == "input_embedding_scale"}
    options = {key: value for key, value in changes.items() if key not in nested}
    made = make_drafter(**options, dflash_config=nested)
    made.load_state_dict(drafter.state_dict())
    evidence = gather(tiny_target, [prompt.ids for prompt in PROMPTS[:2]], num_drafts=3, max_new_tokens=12)
    found = score(variant(drafter, changes), evidence)
    head, table, config = tiny_target.get_output_embeddings(), tiny_target.get_input_embeddings(), made.config
    accepted, likelihoods = [], []
    for ids, anchors in zip(evidence.sequences, evidence.anchors, strict=True):
        for anchor in anchors:
            features, _ = target_features(tiny_target, ids[None, :anchor], config.target_layer_ids)
            block = torch.full((1, config.block_size), config.mask_token_id)
            block[0, 0] = ids[anchor]
            with torch.no_grad():
                states = made(made.embed_block(block, table), features).last_hidden_state[:, 1:]
                logits = made.compute_logits(states, head, config.vocab_size)[0]
            right = ids[anchor + 1 : anchor + 4]
            equal = logits.argmax(-1)[: len(right)] == right
            accepted.append(equal.long().cumprod(0).sum().item())
            likelihoods.append(logits.log_softmax(-1).gather(1, right[:, None]).clamp(min=-12).mean().item())
    assert found.accepted.tolist() == accepted
    torch.testing.assert_close(found.likelihood, torch.tensor(likelihoods), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", HYBRIDS)
def test_answers_of_targets_with_a_state_are_those_of_each_prompt_alone(family):
    """Padding on the left leaves no trace in a recurrent state."""
    target, prompts = hybrid(family), [prompt_ids(1, 4 + 3 * n, seed=n)[0].tolist() for n in range(4)]
    evidence = gather(target, prompts, num_drafts=3, max_new_tokens=12)
    alone = [target.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=12)[0] for ids in prompts]
    assert [ids.tolist() for ids in evidence.sequences] == [ids.tolist() for ids in alone]


def test_a_prompts_system_message_stays_in_every_way_of_writing_it(byte_tokenizer):
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking is not defined %}K{% endif %}"
    )
    prompt = Prompt("", "ABC", system="MNO")
    written = {tokenizer.decode(form.encode(prompt)) for form in other_formats(tokenizer)}
    assert tokenizer.decode(encode(prompt, tokenizer)) == "MNOABCK" and "MNOABC" in written
    assert all(text.startswith("MNO") and text.endswith("ABC") for text in written)


def test_pairs_that_do_not_fit(tiny_target, tmp_path):
    narrow = make_drafter(target_hidden_size=48)
    (tmp_path / "config.json").write_text("{}")
    from_one = make_drafter(target_layer_ids=[1, 3, NUM_LAYERS])
    tiny_target.save_pretrained(tmp_path / "target")
    for drafter, words in [
        (narrow, "width 48"),
        (from_one, f"try target_layer_ids [0, 2, {NUM_LAYERS - 1}]"),
        (tmp_path, "no model.safetensors"),
        (tmp_path / "target", "holds a model of the class Qwen3ForCausalLM"),
    ]:
        found = diagnose(tiny_target, drafter, PROMPTS)
        assert found.exit_code == 3 and words in found.verdict, found.verdict


def test_a_drafter_that_cannot_be_fetched_says_nothing_about_the_pair(tiny_target, tmp_path):
    for name, words in [
        (tmp_path / "none", "Expected a drafter's folder or a Hub name"),
        ("someone/nothing", "someone/nothing cannot be fetched"),  # tests are offline
    ]:
        with pytest.raises(OSError, match=words):
            diagnose(tiny_target, name, PROMPTS)


OUT_OF_MEMORY = [
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory."),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
def test_too_little_memory_says_nothing_about_the_pair(tiny_target, tmp_path, monkeypatch, error):
    make_drafter().save_pretrained(tmp_path)
    monkeypatch.setattr(DFlashDraftModel, "from_pretrained", Mock(side_effect=error))
    with pytest.raises(type(error)):
        diagnose(tiny_target, tmp_path, PROMPTS)


TOO_LONG = Prompt("", ids=[8] * 500)  # the target has 512 positions
REQUESTS = {
    "no prompts": ([], {}, "at least one prompt"),
    "an empty prompt": ([Prompt("", ids=[])], {}, "one is empty"),
    "answers too short to draft": (PROMPTS, {"max_new_tokens": 2}, "3 tokens or more"),
    "a prompt beyond the context": ([PROMPTS[0], TOO_LONG], {"max_new_tokens": 13}, "500 tokens and 13 new ones"),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_requests_that_cannot_be_served_are_refused_before_any_pass(tiny_target, monkeypatch, name):
    prompts, options, words = REQUESTS[name]
    monkeypatch.setattr(type(tiny_target), "forward", None)  # whoever runs the target fails in another way
    with pytest.raises(ValueError, match=words):
        diagnose(tiny_target, make_drafter(), prompts, **options)


def test_an_answer_with_room_for_one_anchor_gives_no_warning(tiny_target, tiny):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = diagnose(tiny_target, tiny["plain"], PROMPTS[:1], max_new_tokens=3)
    assert found.before["anchors"] == 1 and found.faults == []


def test_a_folder_in_speculators_layout_is_examined_as_it_is(tiny_target, tiny, tmp_path):
    tiny["plain"].save_pretrained(tmp_path / "z-lab")
    (tmp_path / "z-lab" / "generation_config.json").unlink()  # speculators' layout holds no schedule
    convert(tmp_path / "z-lab", tmp_path / "speculators", to="speculators", target="a/target")
    found = diagnose(tiny_target, tmp_path / "speculators", PROMPTS[:2], max_new_tokens=NEW)
    assert found.problems == [] and found.faults == [] and found.tau > 2


def _edit(**changes):
    def edit(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return edit


def _no_numbers(folder):
    weights = load_file(folder / "model.safetensors")
    weights["fc.weight"][0, 0] = torch.inf
    save_file(weights, folder / "model.safetensors")


DAMAGES = {
    "weights that are no numbers": _no_numbers,
    "no JSON": lambda folder: (folder / "config.json").write_text("{"),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "half the weights": lambda folder: os.truncate(folder / "model.safetensors", 20_000),
    "pickle weights": lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
    "width of another kind": _edit(hidden_size="wide"),
    "no heads": _edit(num_attention_heads=0),
    "more layers than the file holds": _edit(num_hidden_layers=9, layer_types=None),
    "options of another kind": _edit(dflash_config=[1, 2]),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_drafter_is_refused_in_one_line(tiny_target, tmp_path, name, capsys):
    make_drafter().save_pretrained(tmp_path)
    DAMAGES[name](tmp_path)
    found = diagnose(tiny_target, tmp_path, PROMPTS)
    found.print()
    lines = capsys.readouterr().out.splitlines()
    assert found.exit_code == 3 and len(lines) == 1 and lines[0].startswith("Not a pair: ") and len(lines[0]) > 40


def test_the_command(tiny_target, tiny, byte_tokenizer, tmp_path):
    tiny_target.save_pretrained(tmp_path / "target")
    byte_tokenizer.save_pretrained(tmp_path / "target")
    tiny["plain"].save_pretrained(tmp_path / "drafter")
    lines = [{"turns": [byte_tokenizer.decode(prompt.ids).replace(" ", "")]} for prompt in PROMPTS]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    common = ["--prompts", str(tmp_path / "prompts.jsonl"), "--max-new-tokens", str(NEW)]
    run = CliRunner().invoke

    healthy = run(app, ["check", str(tmp_path / "target"), str(tmp_path / "drafter"), *common])
    assert healthy.exit_code in (0, 7) and "Same text: 12 of 12" in healthy.output, healthy.output

    config = json.loads((tmp_path / "drafter" / "config.json").read_text())
    config["dflash_config"]["target_layer_ids"] = [0, 2, 3]
    (tmp_path / "drafter" / "config.json").write_text(json.dumps(config))
    out = tmp_path / "found.json"
    broken = run(app, ["check", str(tmp_path / "target"), str(tmp_path / "drafter"), *common, "--out", str(out)])
    assert broken.exit_code == 5 and "feature layers" in broken.stdout.rstrip().splitlines()[-1], broken.output
    assert json.loads(out.read_text())["faults"][0]["changes"] == {"target_layer_ids": [1, 3, 4]}

    for arguments, code in [
        (["check", str(tmp_path / "target"), str(tmp_path / "none"), *common], 1),
        (["check", str(tmp_path / "none"), str(tmp_path / "drafter"), *common], 1),
        (["check", str(tmp_path / "target"), str(tmp_path / "target"), *common], 3),
        (["check", str(tmp_path / "drafter"), str(tmp_path / "target"), *common], 1),
        (["check", str(tmp_path / "target"), str(tmp_path / "drafter"), "--out", str(tmp_path / "no" / "x.json")], 1),
        (["check", str(tmp_path / "target"), str(tmp_path / "drafter"), "--out", str(tmp_path)], 1),
        (["check", str(tmp_path / "target"), str(tmp_path / "drafter"), "--prompts", str(tmp_path / "x.jsonl")], 1),
        (["check", str(tmp_path / "target"), str(tmp_path / "drafter"), "--limit", "0"], 2),
    ]:
        assert run(app, arguments).exit_code == code
