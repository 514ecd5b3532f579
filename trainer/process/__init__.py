"""What a process is: its supervisor, the warm parent that forks it, and the devices that it sees."""
