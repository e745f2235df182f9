"""From text to batches, in four rooms.

documents: where text and labelled data lie, and which of it is used. preparation: documents -> records. batches:
records -> the batch of a step, packed and masked. records: their format. preparation knows the three others (it masks),
batches knows records. What several of them need stands beside them: worker processes, rows sorted on disk, progress
bars, TensorFlow.
"""
