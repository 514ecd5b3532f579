"""What a release is made of: its bill of materials, and what is known against its parts. `make sbom`, `make audit`."""
