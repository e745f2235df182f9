"""Parts that several objectives share."""
