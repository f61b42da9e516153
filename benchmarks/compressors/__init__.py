"""Published methods of compression in plain torch operations, one file each: what ours are timed against."""
