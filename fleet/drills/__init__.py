"""Drills: a fault done to a live cluster, watched from outside and judged against its bound (docs/drills.md).

`catalogue` lists them, `faults` and `host_faults` do the damage and prove it, and `testbed` is the drill's own run.
`watch` measures, `recovery` and `scenarios` are what is watched for, and `runner` goes through them and judges.
"""
