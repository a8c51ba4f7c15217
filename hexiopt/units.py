"""Units: files speak GB/s, TFLOPS, GiB and µs; inside are bytes, FLOP and seconds."""

import math

GB = 1e9
TFLOP = 1e12
GIB = float(2**30)
MICROSECOND = 1e-6


def in_unit(value: float, unit: float, digits: int = 12) -> float:
    """The number x for a file with x · `unit` == `value` exactly, of at most `digits` digits if possible.

    Where no such number exists, the quotient.
    """
    quotient = value / unit
    below, above = math.nextafter(quotient, 0.0), math.nextafter(quotient, math.inf)
    outer = math.nextafter(below, 0.0), math.nextafter(above, math.inf)
    candidates = (float(f"{quotient:.{digits}g}"), quotient, below, above, *outer)
    return next((x for x in candidates if x * unit == value), quotient)
