"""What trains: the scheduler, the two loops, the model's calls, the data."""
