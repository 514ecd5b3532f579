"""What to stop, start and leave, and what that costs: worked out from what was observed."""
