"""Every phase of site.yml, with hosts that are lost in it (`make site-drills`)."""
