"""The methods of comparison: pure functions over arrays, one file each.

A new method is a file here and a line in METHODS.
"""

from registry.methods import log_likelihood

METHODS = (log_likelihood,)
