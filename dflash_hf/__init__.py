"""DFlash block-diffusion speculative decoding for Hugging Face transformers (arXiv 2602.06036).

>>> from dflash_hf import DFlashDraftModel                                   # doctest: +SKIP
>>> drafter = DFlashDraftModel.from_pretrained("z-lab/Qwen3-8B-DFlash-b16")  # doctest: +SKIP
>>> target.generate(**inputs, assistant_model=drafter)                       # doctest: +SKIP
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .drafter.candidates import DFlashCandidateGenerator, DFlashRun
    from .drafter.configuration_dflash import DFlashConfig
    from .drafter.modeling_dflash import DFlashDraftModel

__version__ = "0.1.0"

# Resolved on first use: the modelling code pulls in transformers' own modelling modules (seconds), and the hook that
# generate() needs is installed with it, so it is there before any drafter can exist.
_HOME = {
    "DFlashConfig": "configuration_dflash",
    "DFlashDraftModel": "modeling_dflash",
    "DFlashCandidateGenerator": "candidates",
    "DFlashRun": "candidates",
}
__all__ = ["DFlashCandidateGenerator", "DFlashConfig", "DFlashDraftModel", "DFlashRun"]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'dflash_hf' has no attribute {name!r}")
    return getattr(import_module(f".drafter.{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
