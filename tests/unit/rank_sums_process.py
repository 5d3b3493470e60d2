"""A rank that adds up with others, in a process of its own that needs neither PyTorch nor vLLM.

    python rank_sums_process.py '{"memory": 3, "own": 0, "members": 2, "limit_s": 1, …}'

Prints a line of JSON once it is ready, waits for a line, and prints one for each thing that it has
done; `doing` says what: "check" adds up random numbers at each level and prints a digest of the
results, "repeat" adds up once, and then until a rank is missing, "other" then adds up other
elements than the rest.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import signal
import sys
from typing import Any

import numpy as np

from ray_hetero import _streaming_linear as native

ELEMENTS = 1 << 17
SIZES = (16, 4096, 5 * 4096 + 16, ELEMENTS)
"""Elements of sums; the larger ones are added up in slices where there are more than two ranks."""


def numbers(member: int, elements: int) -> Any:
    """What a rank adds; some are so small that the order of sums shows."""
    random = np.random.default_rng(1000 * member + elements)
    values = random.normal(0, 1, elements) * 10.0 ** random.integers(-6, 6, elements)
    return values.astype(np.float32)


def digest(values: Any) -> str:
    """Of bf16."""
    return hashlib.sha256(values.tobytes()).hexdigest()


def main() -> None:
    given = json.loads(sys.argv[1])
    size = native.RankSums.bytes(given["members"], ELEMENTS)
    memory = np.frombuffer(mmap.mmap(given["memory"], size), dtype=np.uint8)
    sums = native.RankSums(
        memory=memory.ctypes.data,
        bytes=size,
        elements=ELEMENTS,
        ranks=[10 + member for member in range(given["members"])],
        own=given["own"],
        limit_s=given["limit_s"],
        connections=given["connections"],
    )
    y = np.zeros(ELEMENTS, dtype=np.uint16)

    def run(elements: int, level: Any, times: int = 1) -> None:
        x = numbers(given["own"], elements)
        sums.run(
            x=x.ctypes.data, elements=elements, y=y.ctypes.data, level=level, times=times
        )  # fmt: skip

    def tell(**what: Any) -> None:
        print(json.dumps(what), flush=True)

    tell(pid=os.getpid())
    sys.stdin.readline()
    if given["doing"] == "check":
        for level in native.levels():
            for elements in SIZES:
                for times in (1, 2, 3):
                    run(elements, level, times)
                    tell(level=level.name, elements=elements, sums=digest(y[:elements]))
        return
    level = native.levels()[-1]
    run(4096, level)
    tell(sums=1)
    try:
        if given["doing"] == "other":
            run(8192, level)
        while True:
            run(4096, level, 100)
    except native.MissingRank as error:
        tell(error=str(error))
    # The connections end with the process; those who look at them later find out.
    signal.pause()


if __name__ == "__main__":
    main()
