"""SQL that somebody else wrote, on databases that can only be read."""
