"""Numbers formatted for people."""


def size(nbytes: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if nbytes < 1024 or unit == "TiB":
            break
        nbytes /= 1024
    return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.3g} {unit}" if nbytes < 1000 else f"{nbytes:.0f} {unit}"


def duration(seconds: float) -> str:
    """0.00153 -> '1.53 ms'."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= 0.9995 * scale:  # three digits round up to it
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.2g} µs" if seconds else "0 s"


def count(number: int, noun: str) -> str:
    """2, 'line' -> '2 lines'."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
