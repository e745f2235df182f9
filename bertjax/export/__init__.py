"""Checkpoints as programs that need no bertjax: StableHLO and ONNX."""
