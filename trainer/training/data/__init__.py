"""The data: files, a worker's part of them, the data service, and what workers can't read."""
