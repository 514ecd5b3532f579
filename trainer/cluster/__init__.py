"""The members of the cluster, and which of them are alive."""
