"""Everything of vLLM that is not meant to be touched from outside, a file for each part of vLLM.

`engine/` has what belongs to the processes of the user and of the engine, `worker/` to that of a
rank, `models/` to the models that it computes; beside them are the installation and the platform.

Each patch stands alone: what is replaced, why, and when it can go.  A name that upstream has
renamed is an error when the patch is made, never a silent no-op (`patching.original`).
"""
