"""What trains: from samples to new weights."""
