"""The kernels in Pallas, lowered through Triton; each mirrors its counterpart in ``swa_torch._triton``."""
