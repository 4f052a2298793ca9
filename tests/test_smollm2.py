"""The real pair: SmolLM2-135M-Instruct and the drafter in model_cards."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, pipeline

from dflash_hf import DFlashDraftModel

CARD = Path(__file__).resolve().parents[1] / "model_cards" / "SmolLM2-135M-Instruct-DFlash"
OWN_PROMPTS = [
    "A farmer packs 12 eggs in a box. She has 5 full boxes and 7 loose eggs. How many eggs does she have?",
    "Write two sentences about why the sea is salty.",
    "List the steps to boil an egg.",
]
pytestmark = pytest.mark.usefixtures("all_cores")


@pytest.fixture(scope="module")
def drafter():
    return DFlashDraftModel.from_pretrained(CARD, dtype=torch.float32).eval()


def encode(tokenizer, text):
    chat = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)


def assert_same_text(target, tokenizer, drafter, prompts, new_tokens):
    tokens = cycles = 0
    for prompt in prompts:
        inputs = encode(tokenizer, prompt)
        settings = dict(do_sample=False, max_new_tokens=new_tokens)
        expected = target.generate(**inputs, **settings)
        assert target.generate(**inputs, **settings, assistant_model=drafter).tolist() == expected.tolist(), prompt
        tokens, cycles = tokens + drafter.last_run.tokens - 1, cycles + drafter.last_run.cycles
    return tokens / cycles


def test_same_text_in_fewer_target_passes(smollm2, drafter):
    assert assert_same_text(*smollm2, drafter, OWN_PROMPTS, 48) > 1.2


def test_same_text_on_twenty_prompts_of_the_shared_data(smollm2, drafter, shared):
    prompts = []
    for name, count in (("gsm8k_dev", 10), ("specbench_dev", 5), ("humaneval_dev", 5)):
        lines = (shared / "data" / f"{name}.jsonl").read_text().splitlines()
        prompts += [json.loads(line)["turns"][0] for line in lines[:: len(lines) // count][:count]]
    assert len(prompts) == 20
    assert assert_same_text(*smollm2, drafter, prompts, 40) > 1.2


@pytest.mark.skipif(
    importlib.util.find_spec("dflash") is None, reason="needs PyPI dflash 0.1.0 (pip install --no-deps)"
)
def test_greedy_drafts_equal_pypi_dflash_on_real_hidden_states(smollm2, drafter):
    from dflash import DFlashDraftModel as Peer
    from dflash import extract_context_feature

    target, tokenizer = smollm2
    raw = {k: v for k, v in json.loads((CARD / "config.json").read_text()).items() if k != "auto_map"}
    config = Qwen3Config.from_dict(raw)
    config._attn_implementation = "sdpa"
    peer = Peer(config).eval()
    peer.load_state_dict(drafter.state_dict())

    ids = target.generate(**encode(tokenizer, OWN_PROMPTS[0]), do_sample=False, max_new_tokens=48)
    with torch.no_grad():
        states = target(ids, output_hidden_states=True).hidden_states
        context = extract_context_feature(states, drafter.config.target_layer_ids)
        head, table = target.get_output_embeddings(), target.get_input_embeddings()
        for anchor in range(ids.shape[1] - 40, ids.shape[1] - 1, 3):
            block = torch.full((1, drafter.config.block_size), drafter.config.mask_token_id)
            block[0, 0] = ids[0, anchor]
            positions = torch.arange(anchor + drafter.config.block_size)[None]
            theirs = peer(positions, noise_embedding=table(block), target_hidden=context[:, :anchor])
            ours = drafter(drafter.embed_block(block, table), context[:, :anchor], positions).last_hidden_state
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
            drafts = drafter.compute_logits(ours[:, 1:], head, drafter.config.vocab_size).argmax(-1)
            assert drafts.tolist() == peer.compute_logits(theirs[:, 1:], head).argmax(-1).tolist()


def test_pipeline_with_strings_and_chats(smollm2, drafter):
    target, tokenizer = smollm2
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer)
    fast = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=drafter)
    for prompt in ("The three primary colours are", [{"role": "user", "content": "Name a fruit."}]):
        settings = dict(max_new_tokens=12, do_sample=False)
        assert fast(prompt, **settings) == plain(prompt, **settings)
        assert drafter.last_run.tokens <= 12


def test_sampling_on_the_real_model(smollm2, drafter):
    target, tokenizer = smollm2
    inputs = encode(tokenizer, OWN_PROMPTS[0])
    torch.manual_seed(0)
    target.generate(
        **inputs,
        do_sample=True,
        temperature=0.8,
        top_k=50,
        top_p=0.95,
        max_new_tokens=40,
        assistant_model=drafter,
    )
    assert drafter.last_run.tau > 1.0


def test_the_foreign_checkpoint_loads_as_it_is(shared, drafter):
    foreign = DFlashDraftModel.from_pretrained(
        shared / "drafters" / "smollm2-135m-instruct-dflash-b8", dtype=torch.float32
    )
    assert foreign.config.block_size == 8 and foreign.config.target_layer_ids == [1, 8, 14, 20, 27]
    assert len(foreign.state_dict()) == 36
