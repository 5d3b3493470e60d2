"""The tokens of a step's requests, and a rank's limits, say where it is computed and why."""

from __future__ import annotations

import pytest

from ray_hetero.kernels.step_route import (
    DECODING_TOKENS,
    NATIVE_ROWS,
    PROMPT_TOKENS,
    Place,
    Reason,
    StepLimits,
    StepRoute,
)

ALONE = StepLimits(native_tokens=128)
WITH_GPU = StepLimits(native_tokens=128, gpu_from=96, gpu_room=8192, has_products=True)
OF_GROUP = StepLimits(native_tokens=128, gpu_from=96, gpu_room=8192)
FAST_LINK = StepLimits(native_tokens=95, gpu_from=96, gpu_room=8192, has_products=True)
SLOW_LINK = StepLimits(native_tokens=128, gpu_from=1024, gpu_room=512, has_products=True)
NOT_FUSED = StepLimits(native_tokens=0, gpu_from=96, gpu_room=8192, has_products=True)


@pytest.mark.parametrize(
    ("counts", "limits", "place", "reason"),
    [
        ([1], ALONE, Place.NATIVE, Reason.DECODING),
        ([1] * 128, ALONE, Place.NATIVE, Reason.DECODING),
        ([1] * 129, ALONE, Place.CORES, Reason.NO_GPU),
        ([NATIVE_ROWS], ALONE, Place.NATIVE, Reason.DECODING),
        ([NATIVE_ROWS + 1], ALONE, Place.CORES, Reason.NO_GPU),
        ([8192], ALONE, Place.CORES, Reason.NO_GPU),
        # Requests of 16 tokens suit the native call and the GPU: the native call is asked first.
        ([16] * 8, WITH_GPU, Place.NATIVE, Reason.DECODING),
        ([16] * 8 + [1], WITH_GPU, Place.GPU, Reason.PROMPTS),
        ([15] * 9, WITH_GPU, Place.PRODUCTS, Reason.MANY_REQUESTS),
        ([1] * 129, WITH_GPU, Place.PRODUCTS, Reason.MANY_REQUESTS),
        ([1] * 129, OF_GROUP, Place.CORES, Reason.MANY_REQUESTS),
        ([95], WITH_GPU, Place.CORES, Reason.FEW_TOKENS),
        ([96], WITH_GPU, Place.GPU, Reason.PROMPTS),
        ([96], OF_GROUP, Place.GPU, Reason.PROMPTS),
        ([17] + [1] * 78, WITH_GPU, Place.CORES, Reason.FEW_TOKENS),
        ([17] + [1] * 79, WITH_GPU, Place.GPU, Reason.PROMPTS),
        ([8192], WITH_GPU, Place.GPU, Reason.PROMPTS),
        ([8193], WITH_GPU, Place.CORES, Reason.NO_ROOM),
        ([1] * 95, FAST_LINK, Place.NATIVE, Reason.DECODING),
        ([1] * 96, FAST_LINK, Place.PRODUCTS, Reason.MANY_REQUESTS),
        ([512], SLOW_LINK, Place.CORES, Reason.FEW_TOKENS),
        ([1], NOT_FUSED, Place.CORES, Reason.FEW_TOKENS),
        ([1] * 96, NOT_FUSED, Place.PRODUCTS, Reason.MANY_REQUESTS),
        ([1], StepLimits(), Place.CORES, Reason.NO_GPU),
        # A step without tokens, once the last request has ended.
        ([], WITH_GPU, Place.NATIVE, Reason.DECODING),
    ],
)
def test_the_questions_have_one_order(
    counts: list[int], limits: StepLimits, place: Place, reason: Reason
) -> None:
    route = StepRoute.of(counts, limits)
    assert (route.place, route.reason) == (place, reason)
    assert route.tokens == sum(counts)
    # A call of the same tokens and requests, but of no scheduled step.
    other = StepRoute.of_rows(sum(counts), max(counts, default=0), limits)
    assert (other.place, other.reason) == (place, reason)


@pytest.mark.parametrize(
    ("counts", "reads_ahead"),
    [
        ([96], True),
        ([95, 1], False),  # the cores may decode one of them, and too few are left
        ([96, DECODING_TOKENS], True),
        ([DECODING_TOKENS] * 12 + [PROMPT_TOKENS], False),
        ([DECODING_TOKENS + 1] * 11, False),  # a native call
        ([DECODING_TOKENS + 1] * 15, True),
    ],
)
def test_weights_are_read_ahead_for_prompts_that_the_gpu_computes(
    counts: list[int], reads_ahead: bool
) -> None:
    assert StepRoute.of(counts, WITH_GPU).reads_ahead is reads_ahead
    assert not StepRoute.of(counts, ALONE).reads_ahead


def test_what_the_next_stage_takes_for_decoding_stays_on_no_gpu() -> None:
    for longest in range(1, 64):
        for requests in (1, 12, 200):
            route = StepRoute.of([longest] * requests, WITH_GPU)
            assert route.is_decoding == (longest <= DECODING_TOKENS)
            assert not (route.is_decoding and route.place is Place.GPU)


def test_single_linear_layers_are_the_gpus_by_their_tokens() -> None:
    assert [WITH_GPU.is_for_gpu(one) for one in (95, 96, 8192, 8193)] == [False, True, True, False]
    assert not ALONE.is_for_gpu(96)
