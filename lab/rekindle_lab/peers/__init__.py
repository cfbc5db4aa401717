"""Programs with which Rekindle is compared, driven as their own documentation describes."""
