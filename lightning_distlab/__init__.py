"""Lightning strategies that cut communication and split models."""
