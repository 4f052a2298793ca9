"""Finding out why a drafter does not help: does it fit, is the text right, which mistake costs acceptance.

>>> from dflash_hf.doctor import diagnose                                        # doctest: +SKIP
>>> print(diagnose(target, drafter, tokenizer=tokenizer).verdict)                # doctest: +SKIP
"""

from .diagnosis import PROMPTS, Diagnosis, diagnose
from .evidence import Evidence, gather, score
from .search import Fault, Findings, find_faults

__all__ = ["PROMPTS", "Diagnosis", "Evidence", "Fault", "Findings", "diagnose", "find_faults", "gather", "score"]
