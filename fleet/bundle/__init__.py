"""One archive for a bug report, without secrets: `fab bundle`."""
