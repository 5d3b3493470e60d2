"""Everything of vLLM that is not meant to be touched from outside, a file for each part of vLLM.

Each patch stands alone: what is replaced, why, and when it can go.  A name that upstream has
renamed is an error when the patch is made, never a silent no-op (`patching.original`).
"""
