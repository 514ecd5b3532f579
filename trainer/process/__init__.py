"""How a process starts and ends: its supervisor, the warm parent that forks it, and the devices that it sees."""
