"""From text to batches: the text (`corpus`), its records (`preprocessing`, `records`), and their batches (`loading`).

`preprocessing` imports the three other packages, because it masks tokens. `loading` imports `records`. Only the module
`bertjax.data.tensorflow` imports TensorFlow, and other modules import this module only where they need TensorFlow.
"""
