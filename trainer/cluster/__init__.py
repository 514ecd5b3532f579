"""The members of the cluster, and which of them are alive.

`member` has a member's states, and what changes them. `members/heartbeat` asks each member every second and keeps its
record; `members/membership` decides by these who trains, and whether a generation ends. `reach` tries the ways between
members.
"""
