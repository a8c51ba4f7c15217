"""Units: files speak GB/s, TFLOPS, GiB and µs; inside are bytes, FLOP and seconds."""

GB = 1e9
TFLOP = 1e12
GIB = float(2**30)
MICROSECOND = 1e-6
