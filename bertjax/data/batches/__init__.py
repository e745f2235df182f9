"""From records, or from a task's examples, to the batch of a step."""
