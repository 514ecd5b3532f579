"""Drills: a fault done to a live cluster, watched from outside and judged against its bound (docs/drills.md).

`catalogue` says which there are, `faults` and `host_faults` do the damage and prove it, `stage` is the drill's own run,
`watch` measures, `recovery` and `scenes` are what is watched for, `rehearsal` goes through them and judges.
"""
