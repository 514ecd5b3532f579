"""What is asked of hosts and done to them, over SSH."""
