"""Numbers in sentences: plural by number, one decimal, units that fit."""

from __future__ import annotations

from placement.words import duration, plural, size


def test_nouns_follow_their_number() -> None:
    assert [plural(count, "stage") for count in (0, 1, 2, 4096)] == [
        "0 stages", "1 stage", "2 stages", "4,096 stages",
    ]  # fmt: skip


def test_times_and_sizes_have_one_decimal() -> None:
    assert [duration(seconds) for seconds in (0.0107, 0.9994, 1.55, 1234)] == [
        "10.7 ms", "999.4 ms", "1.6 s", "1,234.0 s",
    ]  # fmt: skip
    assert [size(count) for count in (3 << 29, 12 << 20, 512)] == ["1.5 GiB", "12.0 MiB", "0.5 KiB"]
