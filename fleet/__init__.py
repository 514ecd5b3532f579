"""What the operator's verbs in `fabfile.py` share: the inventory, SSH to its hosts, the cluster's state, tables."""
