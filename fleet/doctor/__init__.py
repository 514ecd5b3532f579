"""What is wrong with a cluster, how bad that is, and what fixes it: `fab doctor`."""
