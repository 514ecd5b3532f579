"""What is wrong with a cluster, how bad that is, and what mends it: `fab doctor`."""
