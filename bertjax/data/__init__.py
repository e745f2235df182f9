"""From text to batches, in four rooms.

corpus: documents and labelled data. preprocessing: documents to records. records: the file format. loading: records to
the batch of a step, packed and masked. preprocessing uses the three other rooms, loading uses records. TensorFlow is
imported by `bertjax.data.tensorflow` only, and only where it is used.
"""
