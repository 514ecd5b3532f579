"""The operator's verbs, from question to exit, a file each; fleet/command_line has their flags."""
