"""Numbers as text for people: metrics, rates, bytes, durations and counts."""

from __future__ import annotations


def format_metric(value: float, metric: str) -> str:
    """Accuracy in per cent, any other metric with four decimals.

    >>> format_metric(97.126, "accuracy"), format_metric(0.5, "loss")
    ('97.13 %', '0.5000')
    """
    return f"{value:.2f} %" if metric == "accuracy" else f"{value:.4f}"


def format_rate(mbit: float) -> str:
    """A rate in Mbit/s, without the unit.

    >>> format_rate(9.78), format_rate(98.76), format_rate(8190.3)
    ('9.78', '98.8', '8,190')
    """
    return f"{mbit:,.0f}" if mbit >= 1000 else f"{mbit:.3g}"


def format_bytes(num_bytes: float) -> str:
    """Bytes with a decimal unit, B to TB.

    >>> format_bytes(999), format_bytes(1234), format_bytes(5_600_000), format_bytes(128_000_000_000)
    ('999 B', '1.23 kB', '5.60 MB', '128 GB')
    """
    units = ["B", "kB", "MB", "GB", "TB"]
    while num_bytes >= 1000 and len(units) > 1:
        num_bytes /= 1000
        del units[0]
    digits = 0 if units[0] == "B" or num_bytes >= 100 else 1 if num_bytes >= 10 else 2
    return f"{num_bytes:.{digits}f} {units[0]}"


def format_seconds(seconds: float) -> str:
    """A duration in ms or s, from a minute on as minutes:seconds or hours:minutes:seconds.

    >>> format_seconds(0.004), format_seconds(4.26), format_seconds(75), format_seconds(7300)
    ('4 ms', '4.3 s', '1:15', '2:01:40')
    """
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_count(number: float) -> str:
    """A number with a decimal prefix, k to T.

    >>> format_count(999), format_count(1234), format_count(5_600_000_000)
    ('999', '1.23 k', '5.60 G')
    """
    return format_bytes(number).removesuffix("B").strip()
