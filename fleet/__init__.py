"""The control machine: the verbs, and what they are made of, from site to command line. docs/design.md has the tree."""
