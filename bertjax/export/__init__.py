"""Exports checkpoints as programs that do not need bertjax: StableHLO for JAX, and ONNX."""
