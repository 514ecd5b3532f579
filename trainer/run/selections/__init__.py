"""What is trained: the run, sweep or search that an operator chose, and the queue."""
