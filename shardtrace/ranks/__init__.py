"""Process groups: finding them, comparing their ranks, and reporting the failure of a rank."""
