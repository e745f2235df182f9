"""From text to batches: the text (`corpus`), its records (`preprocessing`, `records`), and their batches (`loading`).

`preprocessing` imports the three others, since it masks; `loading` imports `records`. TensorFlow is imported by
`bertjax.data.tensorflow` only, and only where it is used.
"""
