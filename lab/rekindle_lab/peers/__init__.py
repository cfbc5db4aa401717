"""Programs with which Rekindle is compared, driven as their own documentation describes.

`cpr` (`cpr-transfer`: replaces a QEMU), `migrate` (moves a guest), `snapshot` (saves and restores a guest);
`destination` is the waiting QEMU that the last two share.
"""
