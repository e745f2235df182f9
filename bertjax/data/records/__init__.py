"""The file format of pre-training: TFRecords and the manifest beside them."""
