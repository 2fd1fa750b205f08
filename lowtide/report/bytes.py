"""Numbers as people read them: bytes in binary units, seconds, shares and bars."""

from __future__ import annotations

UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")
EIGHTHS = " ▏▎▍▌▋▊▉"


def show_bytes(nbytes: float) -> str:
    """Bytes in the unit that leaves one to four digits before the point: `23.41 MiB`."""
    if abs(nbytes) < 1024:
        return f"{nbytes:.0f} B"
    amount, unit = nbytes / 1024, UNITS[0]
    for larger in UNITS[1:]:
        if abs(amount) < 999.995:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.2f} {unit}"


def show_seconds(seconds: float) -> str:
    """Seconds in the unit that fits them: `41.3 ms`."""
    if seconds >= 100:
        return f"{seconds:.0f} s"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.0f} µs"


def show_share(part: float, whole: float) -> str:
    """A part in percent of the whole; one that is there but tiny is not called nothing."""
    share = 100 * part / whole if whole else 0.0
    return "<0.1%" if 0 < share < 0.05 else f"{share:.1f}%"


def show_difference(found: float, expected: float) -> str:
    """By how much what was found differs from what was expected, in percent of what was found."""
    if not found:
        return "n/a"
    return f"{100 * (expected - found) / found:+.2f}%"


def bar(part: float, whole: float, width: int) -> str:
    """A bar of at most `width` characters, drawn in eighths of one; whatever is there shows."""
    eighths = round(8 * width * part / whole) if whole else 0
    eighths = min(max(eighths, 1 if part > 0 else 0), 8 * width)
    full, rest = divmod(eighths, 8)
    return "█" * full + (EIGHTHS[rest] if rest else "")
