"""What is said of tasks and runs."""
