"""What brings a release to the hosts, and what the roles would leave there."""
