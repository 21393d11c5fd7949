"""What a user would train the same model with today: padded batches, plain torch attention, DeepSpeed."""
