"""Numbers as text, at the edges of their units: no number is rounded up to the next unit and left in its own."""

import pytest

from shardwright.formatting import format_bytes, format_count, format_duration, format_seconds


@pytest.mark.parametrize(
    ("written", "value", "expected"),
    [
        (format_bytes, 1023, "1023 B"),
        (format_bytes, 1023.6, "1.0 KiB"),
        (format_bytes, 1023.94 * 2**10, "1023.9 KiB"),
        (format_bytes, 1023.99 * 2**10, "1.0 MiB"),
        (format_bytes, 2**40 - 1, "1.0 TiB"),
        (format_bytes, 5000 * 2**40, "5000.0 TiB"),
        (format_bytes, -(2**20), "-1.0 MiB"),
        (format_count, 999, "999"),
        (format_count, 999.7, "1.0 k"),
        (format_count, 999_940, "999.9 k"),
        (format_count, 999_960, "1.0 M"),
        (format_seconds, 0.9994, "999 ms"),
        (format_seconds, 0.9996, "1 s"),
        (format_seconds, 59.96, "60 s"),
        (format_seconds, 999.4, "999 s"),
        (format_seconds, 1234.5, "1234 s"),
        (format_seconds, -86400.0, "-86400 s"),
        (format_seconds, float("inf"), "inf s"),
        (format_duration, 0.9994, "999 ms"),
        (format_duration, 0.9996, "1.0 s"),
        (format_duration, 59.94, "59.9 s"),
        (format_duration, 59.96, "1 min 00 s"),
        (format_duration, 3599.4, "59 min 59 s"),
        (format_duration, 3599.7, "1 h 00 min"),
        (format_duration, float("inf"), "inf s"),
    ],
)
def test_a_number_at_the_edge_of_a_unit_is_written_in_the_unit_that_it_is_rounded_to(written, value, expected):
    assert written(value) == expected
