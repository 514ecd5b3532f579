"""Who belongs to the cluster, and who lives."""
