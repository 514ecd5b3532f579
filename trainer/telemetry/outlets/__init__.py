"""Where reports go: systemd, the journal, Prometheus, a webhook."""
