"""What is wrong with a sample: the error that every step of its reading raises, and the policies for it."""

from __future__ import annotations

ON_BAD_SAMPLE = ("raise", "skip", "report")


class BadSample(ValueError):
    """A sample that cannot be used; `kind` groups it with others in a report."""

    # One required argument: DataLoader rebuilds a worker's exception from its message alone.
    def __init__(self, message: str, kind: str = "format") -> None:
        super().__init__(message)
        self.kind = kind
