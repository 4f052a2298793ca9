"""Running out of memory, which Python and torch say in three ways."""

import torch


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether `error` says so: of Python, of an accelerator, or torch's RuntimeError of a CPU.

    Example:
        >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("shapes differ"))
        (True, False)
    """
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )
