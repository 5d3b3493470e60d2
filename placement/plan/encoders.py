"""Encoders of images, video and sound: which stage computes them, and what a plan says of that.

vLLM gives them to every stage, and has the first one compute them.
"""

from __future__ import annotations

from placement.cluster.layout import Layout
from placement.model.shape import ModelShape
from placement.units import GIB

UNKNOWN = "of unknown size, for want of a library of images here"


def are_on_gpu(layout: Layout) -> bool:
    """Whether the first stage has a GPU, or no stage has one."""
    return "gpu" in layout.stages[0] or not layout.count("gpu")


def encoder_line(shape: ModelShape, layout: Layout) -> str:
    """Sentence on where a model's encoders compute; empty for a model that has none."""
    if not shape.has_encoders:
        return ""
    first = layout.stages[0]
    where = " and ".join(
        words for kind, words in (("gpu", "the GPU"), ("cpu", "the socket")) if kind in first
    )
    if len(first) > 1 and len(set(first)) == 1:
        where += "s"
    held = sum(tensor.nbytes for tensor in shape.towers)
    sentences = [
        f"Encoders of images, video or sound ({f'{held / GIB:.1f} GiB' if held else UNKNOWN}) "
        f"compute on {where} of stage 0."
    ]
    if len(layout.stages) > 1:
        sentences.append("Every stage holds them.")
    if not are_on_gpu(layout):
        sentences.append("A layout whose first stage is a GPU computes them sooner.")
    sentences.append("--language-model-only leaves them out.")
    return " ".join(sentences)
