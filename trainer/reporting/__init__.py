"""What a process says of itself: progress, events, goodput, status, systemd, logs."""
