"""PyTorch's own RPC tests, from the installed torch, run on aiorpc; see README.md."""
