"""What an inventory means: who is in the cluster, what each host gets of it, and what is wrong with it."""
