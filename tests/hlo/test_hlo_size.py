"""Large texts: time and memory stay in proportion."""

import subprocess
import sys
import tracemalloc

import pytest
from hlotools import repeated, stored

from collmm.hlo.audit import audit
from collmm.hlo.collectives import summarize
from collmm.hlo.parse import parse

MEGABYTE = 1_000_000


def test_memory_stays_near_the_size_of_the_text():
    text = repeated(stored("v5e-jax012-grid"), 30)
    assert len(text) > 3 * MEGABYTE
    tracemalloc.start()
    try:
        module = parse(text)
        indexed = tracemalloc.get_traced_memory()[1]
        summarize(module)
        findings = audit(module, mesh_axes={"data": 2, "model": 4})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(findings) == 30 * len(audit(parse(stored("v5e-jax012-grid"))))
    assert indexed < 2 * len(text)
    # Up to 4 MB of text is kept parsed, at some ten times its size, whatever the module's.
    assert peak < 4 * len(text) + 40 * MEGABYTE


SCRIPT = r"""
import re, sys, time
from collmm.hlo.audit import audit
from collmm.hlo.collectives import summarize
from collmm.hlo.parse import parse

begin = time.process_time()
module = parse(sys.argv[1])
summarize(module)
audit(module, mesh_axes={"data": 2, "model": 4}, transfer_time=lambda f: 1e-4, clock_hz=1e9)
seconds = time.process_time() - begin
print(seconds, int(re.search(r"VmHWM:\s*(\d+)", open("/proc/self/status").read())[1]) * 1024)
"""


@pytest.mark.long
def test_a_dump_of_200_megabytes(tmp_path):
    """Well below a minute per 100 MB, and below four times the text in memory, itself included."""
    text = stored("v5e-jax012-grid")
    path = tmp_path / "large.hlo"
    path.write_text(repeated(text, 200 * MEGABYTE // len(text)))
    size = path.stat().st_size
    assert size > 190 * MEGABYTE
    out = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(path)], capture_output=True, text=True, check=True
    )
    seconds, memory = map(float, out.stdout.split())
    assert seconds < 40 * size / (100 * MEGABYTE)
    assert memory < 4 * size
