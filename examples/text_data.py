"""Real text that every Python installation carries: the help topics of ``pydoc``, as bytes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

VOCABULARY = 256  # a token is one byte


def topics() -> np.ndarray:
    """Return the text as uint8; about 0.5 MB of English prose, grammar rules and code."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    return np.frombuffer(text.encode(), np.uint8)


def windows(text: np.ndarray, batch: int, length: int, seed: int) -> Iterator[np.ndarray]:
    """Yield int32 arrays [batch, length]: stretches of ``text`` from random places, for ever."""
    rng = np.random.default_rng(seed)
    stretches = np.lib.stride_tricks.sliding_window_view(text, length)
    while True:
        yield stretches[rng.integers(0, len(stretches), batch)].astype(np.int32)
