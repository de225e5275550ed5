"""``python -m collmm``: the command line."""

import sys

from collmm.cli.main import run

sys.exit(run())
