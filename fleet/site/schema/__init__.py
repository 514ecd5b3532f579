"""What an inventory may say: every group and variable, and what is wrong with one that says something else."""
