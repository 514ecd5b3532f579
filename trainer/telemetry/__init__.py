"""What a process reports while it runs: status, events, history, counters."""
