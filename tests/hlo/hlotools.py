"""Helpers of the HLO tests: the stored texts, and small texts written by hand."""

import gzip
import re
import textwrap
from pathlib import Path

FIXTURES = Path(__file__).parent / "fixtures"
NAMES = sorted(p.name for p in FIXTURES.iterdir())


def stored(name: str) -> str:
    """The stored text ``name``, such as ``v5e-jax012-mlp``."""
    plain = FIXTURES / f"{name}.hlo"
    if plain.exists():
        return plain.read_text()
    return gzip.decompress((FIXTURES / f"{name}.hlo.gz").read_bytes()).decode()


def hlo(body: str, *, header: str = "is_scheduled=true, num_partitions=8") -> str:
    """A module of the computations in ``body``, which is indented as in a test."""
    return f"HloModule m, {header}\n\n{textwrap.dedent(body).strip()}\n"


def repeated(text: str, times: int) -> str:
    """A valid module with the computations of ``text`` ``times`` over, under new names.

    The entry runs all of them one after the other.
    """
    blocks = [b.strip("\n") for b in text.split("\n\n") if b.strip()]
    head = [b for b in blocks if not b.startswith(("%", "ENTRY"))]
    entry = next(b for b in blocks if b.startswith("ENTRY"))
    others = [b for b in blocks if b.startswith("%")]
    first, *lines, last = entry.split("\n")
    parameters = [line for line in lines if " parameter(" in line]
    body = [line for line in lines if " parameter(" not in line]
    kept = {line.split("%")[1].split(" ")[0] for line in parameters}

    def renamed(block: str, k: int) -> str:
        return re.sub(r"%([\w.\-]+)", lambda m: m[0] if m[1] in kept else f"%{m[1]}.copy{k}", block)

    out = list(head)
    for k in range(times):
        out += [renamed(b, k) for b in others]
    out.append("\n".join([first, *parameters]))
    for k in range(times):
        block = renamed("\n".join(body), k)
        out[-1] += "\n" + (block if k == times - 1 else block.replace("  ROOT ", "  "))
    out[-1] += "\n" + last
    return "\n\n".join(out) + "\n"
