"""Python's garbage collector, which rests while the process of a rank imports.

Importing torch and vLLM makes about a million objects that stay, and the collector would look
through them again and again: 1.5 s of processor time of 7.5, measured.  It rests from the import of
this module on, which is the first that a rank's process imports, until `wake`.
"""

from __future__ import annotations

import gc

_WAS_AWAKE = gc.isenabled()
gc.disable()


def wake() -> None:
    """All is imported; the driver, which imports the same modules, collects again as well."""
    if _WAS_AWAKE:
        gc.enable()


def keep_what_is_there() -> None:
    """In a rank's process: leave what was imported out of every later collection."""
    gc.freeze()
