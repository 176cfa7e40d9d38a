"""The split kernel for Hopper, in Gluon; imported only when a call needs it."""
