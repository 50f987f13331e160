"""Process groups: finding them, comparing ranks, and what happens when one fails."""
