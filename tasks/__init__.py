"""Work on models: whatever needs torch, the Hub or a chat template, and the jobs that do it."""

import os
import sys

# Read once by torch's thread pool when it starts, hence here.  Threads that spin at every barrier cost several times
# the speed as soon as anything else runs on the machine, be it only the database; a set value is left alone.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Likewise tqdm, at its import: bars belong on a terminal, not into a log.
if not sys.stderr.isatty():
    os.environ.setdefault("TQDM_DISABLE", "1")
