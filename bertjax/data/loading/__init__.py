"""Records to the batch of a step: order, packing, masking, transforms."""
