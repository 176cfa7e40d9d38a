"""The portable kernels in Triton. Nothing here is imported before a call needs Triton."""
