"""Drafter folders of other projects, read and written.

>>> from dflash_hf.checkpoints import convert, load_drafter                     # doctest: +SKIP
>>> convert("speculators-folder", "drafter")                                    # doctest: +SKIP
"""

from .convert import Conversion, convert, load_drafter, meaning
from .files import Checkpoint, read

__all__ = ["Checkpoint", "Conversion", "convert", "load_drafter", "meaning", "read"]
