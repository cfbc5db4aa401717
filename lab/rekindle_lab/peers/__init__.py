"""What Rekindle is compared with: real programs, driven as their own documentation says."""
