"""What a worker process is told to do in the tests of crashing compilers."""

import ctypes

from collmm.targets import compilation

compile_ = compilation._compile


def compile_and_crash(topology, request):
    """Compile, then read address 0 in native code."""
    compile_(topology, request)
    ctypes.string_at(0)
