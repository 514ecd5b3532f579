"""The control machine: the verbs, and what they are made of, from site to command line.

To read what a verb does, by the longest: `verbs/start` looks at the hosts (`hosts/cluster`), plans (`planning/plan`),
ships and proves (`actions/shipping`, `rollout`), starts the tasks, and looks on (`actions/watch`). What the inventory
means is `site`. docs/design.md has the tree.
"""
