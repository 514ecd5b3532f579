"""Tables that are split over the ps: lookups, updates and saves by row; dynamic/ has those without a vocabulary."""
