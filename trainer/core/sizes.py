"""Numbers of bytes, as a person reads them."""


def size(count: float) -> str:
    """Return a number of bytes in three digits or four, as `1.46 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1023.5:
            return f"{count:.0f} {unit}" if abs(count) >= 100 or unit == "B" else f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"
