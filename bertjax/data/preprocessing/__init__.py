"""Documents to records, in worker processes or on Beam."""
