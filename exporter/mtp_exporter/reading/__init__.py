"""From what a user names to tensors by role: directories, configurations, headers, rows."""
